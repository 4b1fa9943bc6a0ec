"""Where the costly part of a request body is done: decoding its JSON, rendering a chat, tokenising. Loop thread.

A small body is worked on at once, on the loop. A large one goes to a thread, so that nobody's tokens wait for it: the
tokenizer releases the GIL, and what does not is bounded by `router.max_body_bytes`. The largest have a thread of their
own, so that they keep no other body waiting for longer than one of its size takes. What waits for a client that left is
dropped; work that runs looks between two prompts whether it is still wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from chitu.http.exchange import Exchange
from chitu.http.request_bodies import LARGE_BODY_BYTES
from chitu.net.http import ClientGone

HUGE_BODY_BYTES = 256 << 10
NUM_THREADS = 2
"""For bodies between the two sizes."""

T = TypeVar("T")


class BodyThreads:
    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(NUM_THREADS, "body")
        self._huge = ThreadPoolExecutor(1, "huge-body")

    async def run(self, exchange: Exchange, num_bytes: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises, for a body of that size. ClientGone where nobody waits for it any more."""
        if num_bytes <= LARGE_BODY_BYTES:
            return work()
        threads = self._large if num_bytes <= HUGE_BODY_BYTES else self._huge
        return await wait(exchange, asyncio.wrap_future(threads.submit(work)))

    def close(self) -> None:
        """What waits is dropped; what runs ends by itself."""
        for threads in (self._large, self._huge):
            threads.shutdown(wait=False, cancel_futures=True)


async def wait(exchange: Exchange, future: asyncio.Future[T]) -> T:
    """What `future` has in the end. ClientGone, and it is cancelled, where nobody waits for it any more."""

    def on_gone() -> None:
        future.cancel()

    exchange.call_when_gone(on_gone)
    try:
        return await future
    except asyncio.CancelledError:
        if exchange.is_client_gone:
            raise ClientGone from None
        raise
    finally:
        exchange.call_when_gone(None)
