"""Parts of a chat that are no text: placeholders in histories, an error in a question; and the texts of files."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import ChatBody
from chitu.http.ask.chat import chat_messages
from chitu.http.ask.parts import LeftOut, Reading, question_start, read_file
from chitu.http.table import BODIES

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
VIDEO = {"type": "video_url", "video_url": {"url": "https://x/y.mp4"}}
FILE = {"type": "file", "file": {"file_id": "file-1", "filename": "a.pdf"}}
TEXT = {"type": "text", "text": "Look:"}
CALL = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "done"}
ANSWER = {"role": "assistant", "content": "Yes."}
NEXT = {"role": "user", "content": "And now?"}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def shown(*messages: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the contents of messages in the prompt, and the warnings."""
    warnings: list[str] = []
    body = BODIES.decoder(ChatBody).decode(json.dumps({"messages": messages}).encode())
    return [message["content"] for message in chat_messages(body.messages, warnings)], warnings


@pytest.mark.parametrize(
    ("part", "placeholder"),
    [
        (IMAGE, "[image left out: this model takes text alone]"),
        ({**IMAGE, "image_url": None, "type": "input_image"}, "[image left out: this model takes text alone]"),
        (SOUND, "[sound left out: this model takes text alone]"),
        (VIDEO, "[video left out: this model takes text alone]"),
        (FILE, "[file a.pdf left out]"),
        ({"type": "hologram"}, "[hologram left out]"),
    ],
)
def test_a_part_that_is_no_text_is_a_placeholder_and_an_error_in_a_question_unless_it_is_an_image(
    part: dict[str, Any], placeholder: str
) -> None:
    says = f"this server serves text, so the prompt has a placeholder for {part['type']}"
    contents, warnings = shown(user(TEXT, part), ANSWER, NEXT)
    assert contents[0] == f"Look:\n{placeholder}" and warnings == [f"messages[0].content[1]: {says}"]
    of_tool = {**RESULT, "content": [part, TEXT]}
    contents, warnings = shown(NEXT, CALL, of_tool)
    assert contents[2] == f"{placeholder}\nLook:" and warnings == [f"messages[2].content[0]: {says}"]
    # Some agents send what a tool has read as a turn of the user behind its result.
    contents, warnings = shown(NEXT, CALL, RESULT, user(part))
    assert contents[3] == placeholder and warnings == [f"messages[3].content[0]: {says}"]
    for before in ([], [NEXT, ANSWER], [NEXT, CALL, RESULT, ANSWER, NEXT]):
        if "image" in part["type"]:  # the model cannot see it, whoever asks
            contents, warnings = shown(*before, user(TEXT, part))
            assert contents[-1] == f"Look:\n{placeholder}" and warnings == [
                f"messages[{len(before)}].content[1]: {says}"
            ]
            continue
        with pytest.raises(InvalidRequest, match="only 'text' parts are supported") as raised:
            shown(*before, user(TEXT, part))
        assert raised.value.param == f"messages[{len(before)}].content[1]"


def test_what_was_refused_and_files_with_text_are_text_of_the_prompt() -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    file = {"type": "file", "file": {"filename": "a.md", "file_data": "data:text/markdown;base64," + encoded("# ü")}}
    contents, warnings = shown(NEXT, refused, user(file))
    assert contents[1:] == ["I cannot.", "a.md\n# ü"] and not warnings


def encoded(text: str) -> str:
    return b64encode(text.encode()).decode()


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_a_file_has_its_text_in_every_spelling(text: str) -> None:
    for data in (
        encoded(text),
        f"data:;base64,{encoded(text)}",
        f"data:text/plain;charset=utf-8;base64,{encoded(text)}",
    ):
        assert read_file(data, None).text == (None if text.startswith("%PDF") else text)


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (None, ""),
        (b64encode(b"\xff\xd8").decode(), ""),
        ("%%%", ""),
        (encoded("%PDF-1.7"), ""),
        (encoded("a\0b"), ""),
        (encoded("<svg/>"), "image/svg+xml"),
        ("data:application/pdf;base64," + encoded("a"), ""),
    ],
)
def test_a_file_whose_bytes_are_no_text_is_named(data: Any, media_type: str) -> None:
    assert read_file(data, "a.bin", media_type) == Reading(None, "a.bin")


def test_a_question_is_what_stands_behind_the_last_answer_unless_it_answers_a_call() -> None:
    for roles, start in (
        ("user", 0),
        ("system user", 0),
        ("user assistant user", 2),
        ("user assistant user user", 2),
        ("user assistant", 2),
        ("user assistant tool", 3),
        ("user assistant tool user", 4),
        ("user assistant tool assistant user", 4),
        ("", 0),
    ):
        assert question_start(roles.split()) == start, roles


def test_a_warning_names_the_first_places_and_all_kinds() -> None:
    left, warnings = LeftOut(), []
    for i, kind in enumerate(["image", "b" * 100, "image", "{}", "image"]):
        left.placeholder(f"m[{i}]", kind)
    left.warn(warnings)
    assert warnings == [
        "m[0], m[1], m[2], m[3], ...: this server serves text, so the prompt has a placeholder for "
        f"{'b' * 40}, image, {{}}"
    ]
