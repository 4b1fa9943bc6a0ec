"""Tokens -> text -> events: deltas equal the whole text however the tokens are cut, and events are valid JSON."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chitu.http.choice import ChoiceDecoder, Delta
from chitu.http.sampling_fields import OutputOptions
from chitu.http.sse import ChatFormat, CompletionFormat, FinishedChoice, UsageCount
from chitu.tokenizer import StopScanner

EOS = 256


class ByteDetokenizer:
    """A detokenizer in which a token is a byte; text appears with the last byte of a character."""

    def __init__(self) -> None:
        self._pending = b""

    def push(self, token_ids: list[int], /) -> str:
        self._pending += bytes(token for token in token_ids if token < 256)
        for end in range(len(self._pending), -1, -1):
            try:
                text = self._pending[:end].decode()
            except UnicodeDecodeError:
                continue
            self._pending = self._pending[end:]
            return text
        return ""

    def finish(self) -> str:
        return self._pending.decode(errors="replace")


def decoder(stops: tuple[str, ...], include_stop: bool) -> ChoiceDecoder:
    options = OutputOptions(1, True, False, stops, include_stop, True, True)
    scanner = StopScanner(stops, include_stop) if stops else None
    return ChoiceDecoder(ByteDetokenizer(), scanner, options, frozenset({EOS}))


@given(
    st.text("abcö😀", max_size=30),
    st.lists(st.text("abcö😀", min_size=1, max_size=3), max_size=2),
    st.booleans(),
    st.lists(st.integers(1, 5), min_size=40, max_size=40),
    st.sampled_from(["length", "stop"]),
)
def test_deltas_equal_the_whole_text_however_they_are_cut(
    text: str, stops: list[str], include_stop: bool, cuts: list[int], reason: str
) -> None:
    tokens = [*text.encode(), EOS] if reason == "stop" else list(text.encode())
    at_once = (whole := decoder(tuple(stops), include_stop)).whole(list(tokens), reason)

    def streamed(cuts: list[int]) -> tuple[ChoiceDecoder, list[Delta]]:
        streaming, deltas, at = decoder(tuple(stops), include_stop), [], 0
        for cut in cuts:
            part, at = tokens[at : at + cut], at + cut
            deltas += streaming.feed(part, reason if at >= len(tokens) else None)
            if streaming.finish_reason is not None:
                break
        return streaming, deltas

    streaming, deltas = streamed(cuts * 4)
    assert deltas == streamed([1] * 160)[1], "a client goes on behind event n of a stream that was cut otherwise"
    ids = [token for delta in deltas for token in delta.token_ids]
    assert "".join([str(delta.text) for delta in deltas]) == at_once.text
    assert ids == at_once.token_ids and streaming.num_tokens == whole.num_tokens == len(ids)
    assert streaming.finish_reason == whole.finish_reason
    if not any(stop in text for stop in stops):
        assert at_once.text == text and len(ids) == len(tokens)
    else:
        assert whole.finish_reason == "stop" and len(at_once.text) <= len(text)
        assert include_stop or not any(stop in at_once.text for stop in stops)


@given(st.text(max_size=20))
def test_events_are_json_whatever_the_text(text: str) -> None:
    for make in (CompletionFormat, ChatFormat):
        form = make("id", 1, 'm"odel', True)
        events = [form.delta(1, text, None), form.delta(1, text, [1, 2]), form.last(0, text, "stop", [])]
        events += [form.opening(1), form.usage(UsageCount(1, 2, 0))]
        for event in filter(None, events):
            assert event.startswith(b"data: ") and event.endswith(b"\n\n")
            body = json.loads(event[6:])
            assert body["model"] == 'm"odel' and "usage" in body
        body = json.loads(b"".join(form.full([FinishedChoice(text, "stop", None)], UsageCount(1, 2, 0))))
        choice = body["choices"][0]
        assert (choice["text"] if make is CompletionFormat else choice["message"]["content"]) == text
        counts: dict[str, Any] = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        counts["prompt_tokens_details"] = {"cached_tokens": 0}
        assert body["usage"] == {**counts, "completion_tokens_details": {"reasoning_tokens": 0}}
