"""KV pages into another process's pool, by the transport that the engine takes there: one write of all layers, and a
write a layer, against what a scattered copy within one process reaches.

The parent writes, a child owns the target pool and says at the end whether the right bytes are in the right pages.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import torch

from chitu.bench.gpu.card import PAGE_SIZE, Card, Row, at_least
from chitu.config.schema import PDDisaggregationConfig
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.plan import plan_page_copies
from chitu.kv_transfer.select import open_transports
from chitu.kv_transfer.transport import Transport
from chitu.messages import KVLayout, RankMemory, encode

AIM = 0.8
TIMEOUT_S = 30.0


def new_pool(card: Card) -> KVPool:
    model = card.sizes.model
    layout = KVLayout(
        "bench", model.layers, model.kv_heads, model.resolved_head_dim, PAGE_SIZE, card.sizes.dtype, model.vocab_size
    )
    return KVPool(layout, card.sizes.pool_pages, 1, str(card.device))


def new_transport(card: Card) -> Transport:
    """`cuda_ipc` between GPUs; without one `shm`, which is the same to its callers."""
    config = PDDisaggregationConfig(transport="cuda_ipc" if card.is_gpu else "shm")
    return open_transports(config, "127.0.0.1", str(card.device))[0]


def page_sums(pool: KVPool, pages: list[int]) -> list[int]:
    """One number a page, over K and V of all layers, in which also the order of the regions counts."""
    index = torch.tensor(pages, device=pool.device)
    total = torch.zeros(len(pages), dtype=torch.int64, device=pool.device)
    for number, region in enumerate(region for pair in zip(pool.k, pool.v, strict=True) for region in pair):
        total += (2 * number + 1) * region[index].flatten(1).view(torch.int32).sum(1)
    sums: list[int] = total.tolist()
    return sums


def receive(card: Card) -> None:
    """The child: a registered pool; for every line of pages on stdin their sums on stdout."""
    pool, transport = new_pool(card), new_transport(card)
    transport.register(pool.arena_base, pool.arena_bytes)
    print(encode(rank_memory(pool, 0, [transport.local_session()])).hex(), flush=True)
    for line in sys.stdin:
        print(msgspec.json.encode(page_sums(pool, msgspec.json.decode(line, type=list[int]))).decode(), flush=True)
    transport.close()


def rows(card: Card, child_arguments: list[str]) -> Iterator[Row]:
    """`child_arguments`: the command line of a child that calls `receive` with the same sizes."""
    pool, transport = new_pool(card), new_transport(card)
    for region in (*pool.k, *pool.v):
        region.normal_()
    card.synchronize()
    transport.register(pool.arena_base, pool.arena_bytes)
    command = [sys.executable, "-m", "chitu.bench.gpu", *child_arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        memory = msgspec.msgpack.decode(bytes.fromhex(child.stdout.readline()), type=RankMemory)
        peer = transport.connect(memory, memory.sessions[0])
        rng, layers = random.Random(5), card.sizes.model.layers
        for count in card.sizes.transfer_pages:
            own, theirs = (rng.sample(range(card.sizes.pool_pages), count) for _ in range(2))
            whole = plan_page_copies(pool, memory, own, theirs, range(layers))
            by_layer = [plan_page_copies(pool, memory, own, theirs, range(i, i + 1)) for i in range(layers)]
            for name, lists in ((f"{count} pages, one write", [whole]), (f"{count} pages, a write a layer", by_layer)):
                times = []
                for _ in range(card.sizes.repeats + 2):
                    start_s = time.perf_counter()
                    for copies in lists:
                        transport.write(peer, copies, TIMEOUT_S)
                    times.append(time.perf_counter() - start_s)
                rate = whole.nbytes / statistics.median(times[2:])
                is_aimed = len(lists) == 1 and count == max(card.sizes.transfer_pages)
                what = f"{transport.name}: {name} ({whole.nbytes / 2**20:.3g} MiB)"
                ratio = rate / card.ceilings.scattered_bytes_per_s
                yield at_least(what, rate / 1e9, "GB/s", ratio, "scattered copy", AIM if is_aimed else None)
            child.stdin.write(msgspec.json.encode(theirs).decode() + "\n")
            child.stdin.flush()
            if msgspec.json.decode(child.stdout.readline()) != page_sums(pool, own):
                raise RuntimeError(f"{transport.name}: the peer found other bytes in {count} pages than were written")
        transport.disconnect(peer)
        child.stdin.close()
    transport.close()
