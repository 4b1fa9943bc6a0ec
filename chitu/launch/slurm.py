"""Expansion of Slurm's node lists without Slurm's tools: `python -m chitu.launch.slurm 'gpu[01-03,7]'` prints a name a
line. Pure.

Called by the Slurm scripts if `scontrol show hostnames` is missing, as inside a container.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from chitu.errors import ConfigError


def expand_nodelist(text: str) -> list[str]:
    """Expand `pd-node[0-1,3],login` to pd-node0, pd-node1, pd-node3, login. Raise ConfigError for anything else."""
    names = [name for item in _split(text.strip()) for name in _expand(item, text)]
    if not all(names):
        raise ConfigError(f"the node list {text!r} has an empty entry")
    return names


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    return re.split(r",(?![^\[]*\])", text)


def _expand(item: str, text: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]+)\](.*)", item)
    if match is None:
        if "[" in item or "]" in item:
            raise ConfigError(f"the node list {text!r} has a bracket without its other half")
        yield item
        return
    prefix, ranges, rest = match.groups()
    for piece in ranges.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if bounds is None:
            raise ConfigError(f"the node list {text!r} has {piece!r} where a number or a range should be")
        first, last = bounds[1], bounds[2] or bounds[1]
        for number in range(int(first), int(last) + 1):
            for tail in _expand(rest, text):  # a[0-1]b[2-3]
                yield f"{prefix}{number:0{len(first)}}{tail}"


def main(argv: list[str]) -> int:
    try:
        print("\n".join(expand_nodelist(",".join(argv))))
    except ConfigError as error:
        print(f"chitu: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
