"""Stop strings: what is held back, what ends the text, and that the cuts between deltas do not matter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.errors import InvalidRequest
from chitu.tokenizer import StopScanner


def feed(stops: list[str], deltas: list[str], include_stop: bool = False) -> tuple[list[str], bool]:
    """Return what was emitted at each push and at the end, and whether a stop string was hit."""
    scanner = StopScanner(stops, include_stop)
    out = []
    for delta in deltas:
        text, hit = scanner.push(delta)
        out.append(text)
        if hit:
            return out, True
    return [*out, scanner.finish()], False


def test_text_before_the_stop_is_emitted_and_the_stop_is_not() -> None:
    assert feed(["END"], ["one END two"]) == (["one "], True)


def test_include_stop_ends_the_text_after_the_stop() -> None:
    assert feed(["END"], ["one END two"], include_stop=True) == (["one END"], True)


def test_a_stop_split_over_deltas_is_found_and_its_start_never_emitted() -> None:
    assert feed(["END"], ["one E", "N", "D two"]) == (["one ", "", ""], True)


def test_text_that_only_began_like_a_stop_is_emitted_as_soon_as_it_differs() -> None:
    assert feed(["END"], ["one E", "N", "d two"]) == (["one ", "", "ENd two", ""], False)


def test_only_the_longest_possible_start_is_held_back() -> None:
    assert feed(["aab"], ["xaaa"]) == (["xa", "aa"], False)


def test_the_stop_that_begins_earliest_wins() -> None:
    assert feed(["two", "one"], ["zero one two"]) == (["zero "], True)


def test_of_two_overlapping_stops_the_one_complete_first_wins() -> None:
    assert feed(["abcd", "bc"], ["abcd"]) == (["a"], True)
    assert feed(["abcd", "bc"], list("abcd")) == (["", "", "a"], True)


def test_of_two_stops_complete_at_once_the_longer_wins() -> None:
    assert feed(["c", "abc"], ["xabc"]) == (["x"], True)


def test_a_token_that_is_not_in_the_text_is_found_in_a_stop_string_and_nowhere_else() -> None:
    for include, shown in ((False, ["a", "", "b", ""]), (True, ["a", "", "b", "\n<e><ee>"])):
        scanner = StopScanner(["never", "\n<e><ee>", "<ee>x"], include, {"<e>": 5, "<ee>": 6})
        e, ee = scanner.marks[5], scanner.marks[6]
        assert [scanner.push(text) for text in ("a" + e, "\n" + ee, "b\n" + e)] == [
            ("a", False),
            ("\n", False),
            ("b", False),
        ]
        assert scanner.push(ee) == (shown[3], True)
    scanner = StopScanner(["<e>", "e>b"], False, {"<e>": 5})
    assert scanner.push("a<e") == ("a", False) and scanner.push(">") == ("", True)  # spelled by other tokens
    scanner = StopScanner(["e>b", "<e>c"], False, {"<e>": 5})
    assert scanner.push(scanner.marks[5] + "b") == ("b", False) and not scanner.finish()


def test_after_a_hit_nothing_comes_out_any_more() -> None:
    scanner = StopScanner(["."])
    assert scanner.push("a.b") == ("a", True)
    assert scanner.push("c") == ("", True)
    assert scanner.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        StopScanner(["a", ""])


def first_hit(stops: list[str], text: str) -> tuple[int, int] | None:
    """Return (end, start) of the hit, found by looking at every prefix of the text in turn."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return end, min(starts)
    return None


alphabet = st.text("ab🙂", max_size=12)


@given(
    st.lists(st.text("ab🙂", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(alphabet, max_size=8),
    st.booleans(),
)
def test_the_text_is_that_of_the_first_hit_however_it_is_cut(
    stops: list[str], deltas: list[str], include_stop: bool
) -> None:
    text = "".join(deltas)
    hit = first_hit(stops, text)
    expected = text if hit is None else text[: hit[0] if include_stop else hit[1]]
    out, stopped = feed(stops, deltas, include_stop)
    assert ("".join(out), stopped) == (expected, hit is not None)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), st.lists(st.text("ab", max_size=3)))
def test_what_is_held_back_could_always_become_a_stop(stops: list[str], deltas: list[str]) -> None:
    scanner = StopScanner(stops)
    emitted = text = ""
    for delta in deltas:
        out, hit = scanner.push(delta)
        if hit:
            return
        emitted += out
        text += delta
        held = text[len(emitted) :]
        assert text.startswith(emitted)
        assert not held or any(stop.startswith(held) and len(held) < len(stop) for stop in stops)
