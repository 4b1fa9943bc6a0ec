"""What the kernel reports of a range of our own memory (/proc/self/maps): whether it is host memory, and of which file.

Device memory has no readable mapping, so it is told apart without asking its driver.
"""

from __future__ import annotations

from typing import NamedTuple


class HostMapping(NamedTuple):
    is_shared: bool
    offset: int
    """Offset of the range's first byte in its file."""
    device: str
    """Device of the file, as `major:minor` in hex."""
    inode: int


def mapping_of(base: int, nbytes: int) -> HostMapping | None:
    """Return the mapping that `[base, base + nbytes)` begins in, or None if not all of it is readable host memory."""
    end = base
    first: HostMapping | None = None
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, mode, offset, device, inode = line.split(None, 5)[:5]
            low, high = (int(text, 16) for text in span.split("-"))
            if not low <= end < high or mode[0] != "r":
                continue
            if first is None:
                first = HostMapping(mode[3] == "s", int(offset, 16) + base - low, device, int(inode))
            end = high
            if end >= base + nbytes:
                return first
    return None
