"""Logprobs in OpenAI's formats: they come with the tokens whose text goes out, byte for byte, for any cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_openai_output import EOS, ByteDetokenizer, decoder

from chitu.errors import BadFrame, Internal
from chitu.http.token_logprobs import (
    LOWEST,
    ChatLogprobs,
    ChoiceLogprobs,
    CompletionLogprobs,
    chat_texts,
    completion_texts,
)
from chitu.protocol import pack_logprobs, prompt_lines, unpack_logprobs


def bytes_of(token: int) -> bytes | None:
    """Return the bytes of a token: one byte, the text of eos, or None for ids beyond eos, which no tokenizer has."""
    return bytes([token]) if token < EOS else b"<eos>" if token == EOS else None


def packed(tokens: list[int]) -> list[bytes]:
    """Pack a logprob of each token, which encodes its place, with one more candidate."""
    return [pack_logprobs(-1.0 - place, [(65, -0.25), (token, -1.0 - place)]) for place, token in enumerate(tokens)]


def completion() -> CompletionLogprobs:
    return CompletionLogprobs(completion_texts(bytes_of), ByteDetokenizer())


def chat() -> ChatLogprobs:
    return ChatLogprobs(chat_texts(bytes_of))


@given(
    st.text("abcö😀", max_size=20),
    st.lists(st.text("abcö", min_size=1, max_size=3), max_size=2),
    st.lists(st.integers(1, 5), min_size=40, max_size=40),
    st.booleans(),
)
def test_a_stream_has_the_logprobs_of_its_text_and_all_of_them(
    text: str, stops: list[str], cuts: list[int], is_chat: bool
) -> None:
    tokens, shown = [*text.encode(), EOS], decoder(tuple(stops), False)
    logprobs: ChoiceLogprobs = chat() if is_chat else completion()
    events: list[dict[str, Any]] = []
    pieces, at = [], 0
    for cut in cuts * 4:
        part = tokens[at : at + cut]
        logprobs.push(part, packed(tokens)[at : at + cut])
        at += cut
        for delta in shown.feed(part, "stop" if at >= len(tokens) else None):
            pieces.append(delta.text)
            events.append(json.loads(logprobs.of(len(delta.token_ids))))
        if shown.finish_reason is not None:
            break
    num_tokens = shown.num_tokens
    expected = [-1.0 - place for place in range(num_tokens)]
    if is_chat:
        entries = [entry for event in events for entry in event["content"]]
        assert [entry["logprob"] for entry in entries] == expected
        whole = b"".join(bytes(entry["bytes"]) for entry in entries[:num_tokens])
        assert whole == (text.encode() + b"<eos>")[: len(whole)]
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
        return
    assert [number for event in events for number in event["token_logprobs"]] == expected
    offsets = [offset for event in events for offset in event["text_offset"]]
    encoded = text.encode()
    assert offsets == [len(encoded[:place].decode(errors="ignore")) for place in range(num_tokens)]
    if not stops:
        assert "".join(pieces) == text and num_tokens == len(tokens)


def test_a_part_of_a_character_is_shown_as_bytes_and_what_no_tokenizer_has_by_its_id() -> None:
    tokens = [*"é".encode(), EOS, EOS + 1]
    one, other = completion(), chat()
    for form in (one, other):
        form.push(tokens, packed(tokens))
        form.show(len(tokens))
    plain = json.loads(one.take())
    assert plain["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "<eos>", "token_id:257"]
    assert plain["top_logprobs"][0] == {"A": -0.25, "bytes:\\xc3": -1.0}
    content = json.loads(other.take())["content"]
    assert [(entry["token"], entry["bytes"]) for entry in content] == [
        *[("\\xc3", [0xC3]), ("\\xa9", [0xA9])],
        *[("<eos>", list(b"<eos>")), ("token_id:257", None)],
    ]
    assert json.loads(other.take()) == {"content": [], "refusal": None}, "it is taken once"


def test_the_token_itself_is_among_the_candidates_of_a_completion_once() -> None:
    form = completion()
    form.push([67, 66], [pack_logprobs(-3.0, [(65, -0.5), (66, -1.0)]), pack_logprobs(-1.0, [(65, -0.5), (66, -1.0)])])
    form.push([68], [pack_logprobs(float("-inf"))])
    form.show(3)
    assert json.loads(form.take())["top_logprobs"] == [
        {"A": -0.5, "B": -1.0, "C": -3.0},
        {"A": -0.5, "B": -1.0},
        {"D": LOWEST},
    ]


def test_tokens_without_their_logprobs_are_an_error_and_no_shifted_answer() -> None:
    form = chat()
    form.push([65, 66], packed([65]))
    with pytest.raises(Internal):
        form.show(2)
    with pytest.raises(BadFrame):
        unpack_logprobs(bytes(8))


def test_the_lines_of_a_prompt_are_as_many_as_its_tokens_but_one() -> None:
    assert prompt_lines(1, b"") == [None]
    lines = packed([5, 6, 7])
    assert prompt_lines(4, b"".join(lines)) == [None, *lines]
    for num_tokens, data in ((4, b"".join(lines)[:-1]), (1, lines[0])):
        with pytest.raises(BadFrame):
            prompt_lines(num_tokens, data)
