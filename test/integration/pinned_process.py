"""D of the tests of `shm` between GPUs: `python pinned_process.py`. A pool that counts as device memory, segments in
host memory, a device (twin) that scatters them.

Prints its `RankMemory` (hex), then answers a line on stdin with a line: `scatter SEGMENT FIRST END PAGE...` (layers),
`row SEGMENT SLOT`, `crc REGION`, `pinned`. Ends at end of file.
"""

from __future__ import annotations

import sys

import msgspec
from pin_twin import DeviceBlocks, arena_twin, pinned_twin
from transport_process import LAYOUT, new_pool, page_crcs

from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.register_memory import register_memory
from chitu.kv_transfer.staging.area import StagingArea
from chitu.kv_transfer.staging.copier import DeviceCopier
from chitu.kv_transfer.staging.packing import pack_pages, pack_row, turned
from chitu.kv_transfer.transports.transport import Transport
from chitu.protocol import encode

SEGMENT_BYTES, NUM_SEGMENTS = 1 << 20, 4


def main() -> None:
    pool = new_pool()
    transport, _ = pinned_twin(pool)
    arena, driver = arena_twin(SEGMENT_BYTES * NUM_SEGMENTS, pool)
    area = StagingArea(arena.base, SEGMENT_BYTES, NUM_SEGMENTS, arena.base, arena.nbytes)
    copier = DeviceCopier(DeviceBlocks(driver), [arena])
    transports: list[Transport] = [transport]
    sessions = register_memory(pool, transports, area)
    memory = msgspec.structs.replace(rank_memory(pool, 0, sessions), staging=area.memory(is_required=True))
    print(encode(memory).hex(), flush=True)
    for line in sys.stdin:
        word, *numbers = line.split()
        values = [int(number) for number in numbers]
        answer = "ok"
        if word == "scatter":
            segment, first, end, *pages = values
            copier.copy(turned(pack_pages(pool, pages, range(first, end), area.address(segment))))
        elif word == "row":
            copier.copy(turned(pack_row(pool, values[1], area.address(values[0]))))
            answer = str(int(pool.aux[values[1]].long().sum()))
        elif word == "crc":
            answer = " ".join(map(str, page_crcs(pool, values[0])))
        elif word == "pinned":
            answer = str(driver.num_pinned)
        print(answer, flush=True)
    transport.close()
    arena.close()
    assert driver.num_pinned == 0 and LAYOUT.num_layers == len(pool.k)


if __name__ == "__main__":
    main()
