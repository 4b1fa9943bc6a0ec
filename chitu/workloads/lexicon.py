"""Words of the synthetic tasks, and the combinations of them that training never sees. Used by `tiny`.

A held-out name has two words that are frequent in training but never occur together. Words are short, common and
different in their first letters if possible, because sorting them is one of the tasks.
"""

from __future__ import annotations

import zlib

_ADJECTIVES = """\
amber ancient bitter blue bold brave bright bronze calm clever cold copper crimson curious dark deep eager early empty
fancy fast fierce gentle giant golden grand green grey happy hidden hollow honest humble icy idle ivory jolly kind
late lazy little lonely loud lucky mighty misty modest narrow noble old orange pale patient plain polite proud purple
quick quiet rapid rare red royal rusty sandy secret sharp shy silent silver simple sleepy slow small smart snowy soft
stone strange sunny sweet tall tiny velvet violet warm wide wild wise wooden yellow
"""
_NOUNS = """\
acorn anchor apple arrow badger basket beacon bear bell bird boat bottle bridge bucket camel candle castle cedar
circle cloud comet crane crown desert dolphin dragon drum eagle engine falcon feather ferry finch flute forest
fountain fox garden giraffe glacier hammer harbor hawk heron hill horse island jacket jaguar kettle kite ladder lake
lamp lantern lemon leopard lion lizard magnet maple meadow mirror moon mountain needle oak ocean orchid otter owl
panther parrot pebble pencil piano pigeon pillow planet pony prism puppet rabbit raven ribbon river rocket saddle
sailor salmon shadow shell spider squirrel statue tiger tower trumpet tulip turtle valley violin wagon walnut whale
willow window wizard wolf zebra
"""

ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())

_SHARE = 4
"""One combination in this many is held out."""


def is_held_out(text: str) -> bool:
    """Return whether training never draws this name, value or task; the same on every machine (CRC-32 of the text)."""
    return zlib.crc32(text.encode()) % _SHARE == 0
