"""Which display a stream gets."""

from __future__ import annotations

import io
import os

import pytest

from chitu.launch.display import PlainDisplay, RichDisplay, make_display


@pytest.mark.parametrize(("term", "kind"), [("xterm", RichDisplay), ("dumb", PlainDisplay)])
def test_only_a_terminal_that_can_redraw_is_redrawn(term: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    ours, theirs = os.openpty()
    with open(ours, "rb"), open(theirs, "w") as terminal:
        display = make_display(terminal)
        display.close()
    assert isinstance(display, kind)
    assert isinstance(make_display(io.StringIO()), PlainDisplay)
