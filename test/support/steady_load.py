"""A steady load of clients that send requests without a pause; every answer is checked token by token.

Used by `soak.py` and by the chaos tests. `SteadyLoad` has one thread with an asyncio loop that runs every client;
one other thread may call its methods. Each request ends as exactly one `CheckedAnswer` with one outcome: `right`,
`wrong` (other tokens, which must never happen), `left` (the client disconnected on purpose), the code of a typed error,
`connection refused` and `connection lost` (the router is down), or what must never happen: `hung` (no end within the
client's timeout), `cut off` (the stream ended without `[DONE]`), `untyped ...` (no error of the closed list).
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from chitu.errors import Internal, Overloaded, from_code

RIGHT, WRONG, LEFT, HUNG = "right", "wrong", "left", "hung"
LOST, REFUSED, CUT_OFF = "connection lost", "connection refused", "cut off"
REST_S = 0.3
"""Time between a failed request of a client and its next one, so that a restarting router is not flooded."""
COME_AGAIN_S = 1.0
"""Time before a request that was rejected as `overloaded` is sent again: the router's smallest `Retry-After`."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. It is greedy if `seed` is None."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None
    stream: bool = False
    leave_after_s: float | None = None
    """Time after which the client closes its connection; None: never."""
    request_id: str = ""


@dataclass(slots=True)
class CheckedAnswer:
    ask: Ask
    outcome: str = ""
    detail: str = ""
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    """Cached tokens of a whole answer."""
    started_s: float = 0.0
    """Start, by `time.monotonic`, as `ended_s`."""
    ended_s: float = 0.0


class SteadyLoad:
    """Load of checked requests. `url` is called before each request; `expected` returns the right tokens; `next_ask`
    makes the clients' requests."""

    def __init__(
        self,
        url: Callable[[], str],
        model: str,
        next_ask: Callable[[random.Random], Ask],
        expected: Callable[[Ask], Sequence[int]],
        patience_s: float,
        seed: int = 0,
        rest_s: float = 0.0,
    ) -> None:
        """`rest_s`: time between a client's answer and its next request: a load that lasts while processes start, or
        are away, need not take all cores meanwhile."""
        self._rest_s = rest_s
        self._url = url
        self._model = model
        self._next_ask = next_ask
        self._expected = expected
        self._patience_s = patience_s
        self._rng = random.Random(seed)
        self._answers: list[CheckedAnswer] = []
        self._in_flight = 0
        self._loop = asyncio.new_event_loop()
        self._may_ask = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._clients: list[asyncio.Task[None]] = []
        self._http = _new_http()
        self._thread = threading.Thread(target=self._loop.run_forever, name="load", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------------- any one thread

    def start(self, clients: int) -> None:
        """Start this many clients, each with one request at a time."""

        async def start() -> None:
            self._may_ask.set()
            self._clients = [asyncio.create_task(self._client()) for _ in range(clients)]

        self._run(start())

    def pause(self, timeout_s: float) -> None:
        """Pause the clients and wait until all requests have ended and no connection is left. Raise TimeoutError."""

        async def pause() -> None:
            self._may_ask.clear()
            await asyncio.wait_for(self._idle.wait(), timeout_s)
            used, self._http = self._http, _new_http()
            await used.aclose()

        self._run(pause())

    def resume(self) -> None:
        self._loop.call_soon_threadsafe(self._may_ask.set)

    def send(self, asks: Iterable[Ask]) -> list[Future[CheckedAnswer]]:
        """Send more requests, all at once, in addition to those of the clients."""
        return [asyncio.run_coroutine_threadsafe(self._ask(ask), self._loop) for ask in asks]

    def take_answers(self) -> list[CheckedAnswer]:
        """Return the answers that ended since the last call, in the order of their ends."""

        async def take() -> list[CheckedAnswer]:
            taken, self._answers = self._answers, []
            return taken

        return self._run(take())

    def close(self) -> None:
        async def close() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._http.aclose()

        self._run(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # ------------------------------------------------------------------------------------------------ the load's thread

    async def _client(self) -> None:
        while True:
            await self._may_ask.wait()
            answer = await self._ask(self._next_ask(self._rng))
            await asyncio.sleep(self._rest_s if answer.outcome in (RIGHT, LEFT) else REST_S)

    async def _ask(self, ask: Ask) -> CheckedAnswer:
        answer = CheckedAnswer(ask, started_s=time.monotonic())
        self._in_flight += 1
        self._idle.clear()
        try:
            async with asyncio.timeout(ask.leave_after_s or self._patience_s):
                while not await self._converse(answer):
                    await asyncio.sleep(COME_AGAIN_S)
        except TimeoutError:
            answer.outcome = LEFT if ask.leave_after_s else HUNG
        except httpx.ConnectError:
            answer.outcome = REFUSED
        except httpx.HTTPError as error:
            answer.outcome, answer.detail = LOST, f"{type(error).__name__}: {error}"
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()
        answer.ended_s = time.monotonic()
        self._check_tokens(answer)
        self._answers.append(answer)
        return answer

    def _check_tokens(self, answer: CheckedAnswer) -> None:
        """Check that the received tokens are a prefix of the expected ones, and all of them if the answer is
        complete."""
        expected = list(self._expected(answer.ask))
        if answer.tokens != expected[: len(answer.tokens)] or (answer.outcome == RIGHT and answer.tokens != expected):
            wrong_at = next((i for i, (a, b) in enumerate(zip(answer.tokens, expected, strict=False)) if a != b), -1)
            answer.detail = (
                f"after {answer.outcome}: {len(answer.tokens)} of {len(expected)} tokens, wrong at {wrong_at}"
            )
            answer.outcome = WRONG

    async def _converse(self, answer: CheckedAnswer) -> bool:
        """Send the request once and read its answer. Return False if the router rejected it as `overloaded`."""
        ask, answer.outcome, answer.detail = answer.ask, "", ""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(ask.prompt),
            "max_tokens": ask.max_tokens,
            "temperature": 0 if ask.seed is None else 1,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": ask.stream,
        }
        if ask.seed is not None:
            body["seed"] = ask.seed
        headers = {"X-Request-Id": ask.request_id} if ask.request_id else {}
        async with self._http.stream("POST", f"{self._url()}/v1/completions", json=body, headers=headers) as reply:
            if reply.status_code != 200:
                _take_error(answer, reply.status_code, await reply.aread())
                return answer.outcome != Overloaded.code
            if ask.stream:
                await _read_stream(answer, reply)
            else:
                whole = json.loads(await reply.aread())
                answer.tokens, answer.outcome = whole["choices"][0]["token_ids"], RIGHT
                answer.cached_tokens = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
        return True


def _new_http() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
    return httpx.AsyncClient(timeout=None, trust_env=False, limits=limits)


async def _read_stream(answer: CheckedAnswer, reply: httpx.Response) -> None:
    async for line in reply.aiter_lines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            answer.outcome = answer.outcome or RIGHT
            return
        event = json.loads(data)
        if "error" in event:
            _take_error(answer, 200, data.encode())
        else:
            for choice in event["choices"]:
                answer.tokens += choice.get("token_ids") or []
    answer.outcome = answer.outcome or CUT_OFF


def _take_error(answer: CheckedAnswer, status: int, body: bytes) -> None:
    """Set the outcome to the code of an OpenAI error object if it is in the closed list, else to `untyped ...`."""
    try:
        error = json.loads(body)["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, LookupError, TypeError):
        answer.outcome, answer.detail = f"untyped {status}", body[:200].decode("utf-8", "replace")
        return
    known = from_code(code, "")
    is_known = not isinstance(known, Internal) or code == Internal.code
    answer.outcome, answer.detail = code if is_known else f"untyped {code}", message


def count_outcomes(answers: Iterable[CheckedAnswer]) -> Counter[str]:
    return Counter(answer.outcome for answer in answers)
