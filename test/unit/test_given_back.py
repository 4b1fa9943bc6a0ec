"""Memory that is given back: whose pages go, whose addresses stay, and which weights come back for those that were."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from chitu.engine.sleep import ON_GPU, PAGE_BYTES, SleepingWeights, digests_of, give_back_pools, give_back_range
from chitu.engine.weights import RankWeights, WeightsSource
from chitu.engine.weights_loader import NoLoader
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.transports.local import register_memory
from chitu.kv_transfer.transports.shm import ShmTransport
from chitu.protocol import KVLayout

LAYOUT = KVLayout.uniform("m", 2, 2, 16, 16, "float32", 100)


@dataclass
class Model:
    weights: list[torch.Tensor]
    small: torch.Tensor


def make_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    wide = torch.randn(3, 40_000, 8)
    return Model([wide[0].clone(), wide[1].to(torch.bfloat16), wide[2].t()], torch.arange(7.0))


def resident(base: int, nbytes: int) -> int:
    """Return the bytes of these whole pages that are in memory."""
    count = nbytes // PAGE_BYTES
    found = (ctypes.c_ubyte * count)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(base), ctypes.c_size_t(count * PAGE_BYTES), found) == 0
    return sum(each & 1 for each in found) * PAGE_BYTES


def pool_file(pool: KVPool) -> int:
    return os.fstat(pool._file).st_blocks * 512


def test_a_pool_gives_its_memory_back_in_every_mapping_and_takes_it_again() -> None:
    pool = KVPool(LAYOUT, 64, 4)
    pool.k[0].fill_(3.0)
    pool.aux.fill_(9)
    with mmap.mmap(pool._file, pool.arena_bytes) as of_peer:
        assert of_peer[:4] == bytes(pool.k[0].view(torch.uint8).flatten()[:4].tolist())
        used, base = pool_file(pool), pool.arena_base
        assert used >= pool.k[0].nbytes
        assert pool.give_back() == used and pool_file(pool) == 0
        assert of_peer[:4] == bytes(4) and not pool.k[0].any() and not pool.aux.any() and pool.arena_base == base
        of_peer[0] = 7  # a peer writes where it always did
        assert pool.k[0].view(torch.uint8).flatten()[0] == 7 and pool_file(pool) > 0


class PinningTransport(ShmTransport):
    pins = True
    way = "mooncake_rdma"


def test_a_pool_that_an_adapter_writes_to_by_itself_stays_and_says_why() -> None:
    free, pinned = KVPool(LAYOUT, 64, 4), KVPool(LAYOUT, 64, 4)
    register_memory(free, [ShmTransport()])
    register_memory(pinned, [ShmTransport(), PinningTransport()])
    for pool in (free, pinned):
        pool.k[0].fill_(3.0)
    given, keeps = give_back_pools([free, pinned])
    assert given >= free.k[0].nbytes and keeps == "KV pages: mooncake_rdma pins their memory"
    assert not free.k[0].any() and bool((pinned.k[0] == 3.0).all())


def test_only_whole_pages_of_a_range_go() -> None:
    tensor = torch.full((5 * PAGE_BYTES,), 7, dtype=torch.uint8)
    base = tensor.data_ptr()
    skipped = -base % PAGE_BYTES
    assert give_back_range(base + 1, PAGE_BYTES - 2) == 0
    assert give_back_range(base, tensor.nbytes) >= 4 * PAGE_BYTES - PAGE_BYTES
    edges = [*range(skipped), *range((base + tensor.nbytes) // PAGE_BYTES * PAGE_BYTES - base, tensor.nbytes)]
    assert all(tensor[at] == 7 for at in edges), "bytes beside the pages are somebody else's"
    assert not tensor[skipped : skipped + 3 * PAGE_BYTES].any()


def test_weights_leave_memory_at_their_addresses() -> None:
    model = make_model()
    places = [(tensor.data_ptr(), tensor.nbytes) for tensor in model.weights]
    asleep = SleepingWeights(model)
    assert asleep.num_bytes > 0.9 * (model.weights[0].nbytes + model.weights[1].nbytes + 3 * model.weights[0].nbytes)
    assert [(tensor.data_ptr(), tensor.nbytes) for tensor in model.weights] == places
    for tensor in model.weights:
        first = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
        assert resident(first, tensor.nbytes - 2 * PAGE_BYTES) == 0
    assert asleep.why_other(make_model()) == ""


def change_bit(model: Model) -> None:
    model.weights[0].view(torch.int32)[123, 4] ^= 1


def change_tail(model: Model) -> None:
    model.small[-1] += 1


def swap_parts(model: Model) -> None:
    model.weights[1] = model.weights[1].roll(20_000, 0)


def change_dtype(model: Model) -> None:
    model.weights[1] = model.weights[1].to(torch.float16)


def forget(model: Model) -> None:
    model.weights[2] = torch.zeros_like(model.weights[2])


@pytest.mark.parametrize("plant", [change_bit, change_tail, swap_parts, change_dtype, forget])
def test_other_weights_than_those_that_left_are_found_by_the_name_of_the_tensor(plant: Any) -> None:
    asleep, other = SleepingWeights(make_model()), make_model()
    assert asleep.why_other(other) == ""
    plant(other)
    changed = [name for name, digest in digests_of(make_model()).items() if digests_of(other)[name] != digest]
    assert len(changed) == 1 and asleep.why_other(other) == f"{changed[0]} has other numbers than before the sleep"


def test_who_cannot_sleep_says_so() -> None:
    class Runner:
        model = make_model()

        def change_model(self, model: Any) -> None: ...

    spec: Any = None
    on_gpu = RankWeights(WeightsSource("/m", spec, lambda path, found: None), Runner())
    assert on_gpu.why_no_sleep(1) == on_gpu.why_no_sleep(2) == ""
    on_gpu.no_sleep = ON_GPU
    assert on_gpu.why_no_sleep(1) == ON_GPU and NoLoader().why_no_sleep(1)
