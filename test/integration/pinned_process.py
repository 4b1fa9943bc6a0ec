"""D of the tests of `shm` between GPUs: `python pinned_process.py`. A pool that counts as device memory, segments in
host memory, and a device (twin) that scatters them.

Prints its `RankMemory` (hex), then takes the messages of P's transport (`bench/transfer.py`), and answers other lines
on stdin with a line: `row SLOT`, `crc REGION`, `pinned`. Ends at end of file.
"""

from __future__ import annotations

import sys

from pin_twin import DeviceBlocks, arena_twin, pinned_twin
from transport_process import LAYOUT, new_pool, page_crcs

from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.transports.local import register_memory
from chitu.kv_transfer.transports.segments import DeviceCopier, Scatterer, StagingArea
from chitu.kv_transfer.transports.staged import StagedTransport, StagingEnd
from chitu.protocol import encode
from chitu.tools.bench.transfer import lines_of

SEGMENT_BYTES, NUM_SEGMENTS = 1 << 20, 4


def main() -> None:
    pool = new_pool()
    inner, _ = pinned_twin(pool)
    arena, driver = arena_twin(SEGMENT_BYTES * NUM_SEGMENTS, pool)
    area = StagingArea(arena.base, SEGMENT_BYTES, NUM_SEGMENTS, arena.base, arena.nbytes)
    copier = DeviceCopier(DeviceBlocks(driver), [arena])
    scatterer = Scatterer(pool, area, copier, [0])
    transport = StagedTransport(inner, StagingEnd("auto", pool, copier, area, 0, scatterer, arena, is_pinned_late=True))
    print(encode(rank_memory(pool, 0, register_memory(pool, [transport]))).hex(), flush=True)
    for line in lines_of(transport, sys.stdin):
        word, *numbers = line.split()
        values = [int(number) for number in numbers]
        if word == "row":
            print(int(pool.aux[values[0]].long().sum()), flush=True)
        elif word == "crc":
            print(*page_crcs(pool, values[0]), flush=True)
        else:
            print(driver.num_pinned, flush=True)
    transport.close()
    assert driver.num_pinned == 0 and LAYOUT.num_layers == len(pool.k)


if __name__ == "__main__":
    main()
