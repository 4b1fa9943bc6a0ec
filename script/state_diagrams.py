"""Draw the diagrams in docs/protocol.md from their tables; a test fails if they are out of date.

Call `python script/state_diagrams.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from chitu.instance.sequences import SEQUENCE_TRANSITIONS
from chitu.kv_transfer.peers import REGISTRATION_TRANSITIONS
from chitu.kv_transfer.receiver import RECEIVER_TRANSITIONS
from chitu.kv_transfer.sender_table import SENDER_TRANSITIONS
from chitu.router.generation import GENERATION_TRANSITIONS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "protocol.md"
BEGIN = "<!-- drawn by script/state_diagrams.py -->\n"
END = "<!-- end -->\n"
TABLES = {
    "A room on P": SENDER_TRANSITIONS,
    "A room on D": RECEIVER_TRANSITIONS,
    "D's registration with a P": REGISTRATION_TRANSITIONS,
    "A request on its instance": SEQUENCE_TRANSITIONS,
    "A request on the router": GENERATION_TRANSITIONS,
}


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page with up-to-date diagrams."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    parts = [f"{title}:\n\n{diagram(table)}\n" for title, table in TABLES.items()]
    return before + BEGIN + "\n" + "".join(parts) + END + rest.partition(END)[2]


def diagram(transitions: Mapping[tuple[Enum, Enum], Enum] | Mapping[tuple[Enum | None, Enum], Enum]) -> str:
    """Return lines `FROM, FROM --EVENT, EVENT--> TO` in the table's order; sources that share their events share a
    line."""
    events: dict[tuple[str, str], list[str]] = {}
    for (source, event), target in transitions.items():
        events.setdefault((source.name if source is not None else "(unknown)", target.name), []).append(event.name)
    sources: dict[tuple[str, str], list[str]] = {}
    for (source_name, target_name), names in events.items():
        sources.setdefault((", ".join(sorted(names)), target_name), []).append(source_name)
    return "".join(f"    {', '.join(known)} --{names}--> {target}\n" for (names, target), known in sources.items())


if __name__ == "__main__":
    main()
