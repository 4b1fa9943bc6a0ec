"""Calls with one damaged mark, in every format: a call with the right arguments, or text without marks."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.http.messages.array_calls import (
    ApertusParser,
    CommandParser,
    GraniteParser,
    NemotronParser,
    PhiParser,
    ToolCallsParser,
)
from chitu.http.messages.call_formats import (
    HermesParser,
    Llama4Parser,
    LlamaParser,
    MistralParser,
    NamedMistralParser,
)
from chitu.http.messages.call_objects import MessageDelta, joined
from chitu.http.messages.call_parser import CallParser
from chitu.http.messages.code_calls import LfmParser
from chitu.http.messages.dsml_calls import DSML, DSMLParser
from chitu.http.messages.gemma_calls import GemmaParser
from chitu.http.messages.harmony import HarmonyParser
from chitu.http.messages.message_parser import HARMONY, MARKS, MessagePlan
from chitu.http.messages.pythonic_calls import PythonicParser
from chitu.http.messages.section_calls import DeepSeekParser, FencedDeepSeekParser, KimiParser
from chitu.http.messages.tagged_calls import CompactGLMParser, GLMParser, MiniMaxParser, QwenCoderParser

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["city"],
}
NAMES = {"get_w": WEATHER, "look": {"type": "object", "properties": {"at": {"type": "string"}}}}
W, L = {"city": "Rome", "n": 3, "tags": ["a"]}, {"at": "it"}
JSON_W, JSON_L = json.dumps(W), json.dumps(L)
RIGHT = [("get_w", W), ("look", L)]


_TAG_OF = re.compile(r'<\w+(?:=| name=)"?(\w+)"?>')
"""A tag with a name."""


class Form(NamedTuple):
    calls: type[CallParser]
    parts: list[str]
    """Two calls. Every second part is a mark."""
    gone: tuple[str, ...]
    """What no content may have."""


QUOTE = '<|"|>'
OBJECTS = f'[{{"name": "get_w", "arguments": {JSON_W}}}, {{"name": "look", "arguments": {JSON_L}}}]'
ACTIONS = (
    f'[\n    {{"tool_call_id": "0", "tool_name": "get_w", "parameters": {JSON_W}}},\n'
    f'    {{"tool_call_id": "1", "tool_name": "look", "parameters": {JSON_L}}}\n]'
)
PYTHON = "[get_w(city='Rome', n=3, tags=['a']), look(at='it')]"


def array(calls: type[CallParser], begin: str, end: str, body: str = OBJECTS) -> Form:
    return Form(calls, ["", begin, body, end], tuple(mark for mark in (begin, end) if mark))


def dsml(name: str, fields: list[tuple[str, str, str]]) -> list[str]:
    made = [f'<{DSML}invoke name="', name, '">', "\n"]
    for key, is_text, value in fields:
        made += [f'<{DSML}parameter name="', key, f'" string="{is_text}">', value, f"</{DSML}parameter>", "\n"]
    return [*made, f"</{DSML}invoke>", "\n"]


def tagged(begin: str, head: str, opening: str, closing: str, close: str, end: str, line: str = "\n") -> list[str]:
    def one(name: str, fields: dict[str, str]) -> list[str]:
        made = ["", begin, line, head % name, line] if head else ["", begin, name + line]
        for key, value in fields.items():
            if head:
                made += [opening % key, value if "name" in opening else f"\n{value}\n", closing, "\n"]
            else:
                made += ["<arg_key>", key, "</arg_key>", line, "<arg_value>", value, "</arg_value>", line]
        return [*made, close, line, end, "\n"] if close else [*made, end, "\n"]

    return [*one("get_w", {"city": "Rome", "n": "3", "tags": '["a"]'}), *one("look", {"at": "it"})[1:]]


QWEN = tagged("<tool_call>", "<function=%s>", "<parameter=%s>", "</parameter>", "</function>", "</tool_call>")
MINIMAX = tagged(
    "<minimax:tool_call>",
    '<invoke name="%s">',
    '<parameter name="%s">',
    "</parameter>",
    "</invoke>",
    "</minimax:tool_call>",
)
KIMI = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
TAGS = ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>")
MINIMAX_TAGS = ("<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=", "</invoke>", "<parameter name=")
FORMS = [
    Form(
        HermesParser,
        [
            *("", "<tool_call>", f'\n{{"name": "get_w", "arguments": {JSON_W}}}\n', "</tool_call>", "\n"),
            *("<tool_call>", f'\n{{"name": "look", "arguments": {JSON_L}}}\n', "</tool_call>"),
        ],
        TAGS[:2],
    ),
    Form(QwenCoderParser, QWEN, TAGS),
    Form(MiniMaxParser, MINIMAX, MINIMAX_TAGS),
    Form(GLMParser, tagged("<tool_call>", "", "", "", "", "</tool_call>"), GLM),
    Form(CompactGLMParser, tagged("<tool_call>", "", "", "", "", "</tool_call>", ""), GLM),
    Form(
        KimiParser,
        [
            *("", KIMI[0], "", KIMI[1], "functions.get_w:0", KIMI[2], JSON_W, KIMI[3], ""),
            *(KIMI[1], "functions.look:1", KIMI[2], JSON_L, KIMI[3], "", "<|tool_calls_section_end|>"),
        ],
        (*KIMI, "<|tool_calls_section_end|>"),
    ),
    Form(
        DeepSeekParser,
        [
            *("", DEEPSEEK[0], "", DEEPSEEK[1], "get_w", DEEPSEEK[2], JSON_W, DEEPSEEK[3], ""),
            *(DEEPSEEK[1], "look", DEEPSEEK[2], JSON_L, DEEPSEEK[3], "", "<｜tool▁calls▁end｜>"),
        ],
        (*DEEPSEEK, "<｜tool▁calls▁end｜>"),
    ),
    Form(
        FencedDeepSeekParser,
        [
            *("", DEEPSEEK[0], "", DEEPSEEK[1], "function", DEEPSEEK[2], f"get_w\n```json\n{JSON_W}\n```", DEEPSEEK[3]),
            *("\n", DEEPSEEK[1], "function", DEEPSEEK[2], f"look\n```json\n{JSON_L}\n```", DEEPSEEK[3]),
            *("", "<｜tool▁calls▁end｜>"),
        ],
        (*DEEPSEEK, "<｜tool▁calls▁end｜>"),
    ),
    Form(
        MistralParser,
        [
            "",
            "[TOOL_CALLS]",
            f' [{{"name": "get_w", "arguments": {JSON_W}}}, {{"name": "look", "arguments": {JSON_L}}}]',
        ],
        ("[TOOL_CALLS]",),
    ),
    Form(
        NamedMistralParser,
        [
            *("", "[TOOL_CALLS]", "get_w", "[ARGS]", JSON_W, "[TOOL_CALLS]", "look", "[ARGS]", JSON_L),
        ],
        ("[TOOL_CALLS]",),
    ),
    Form(
        LlamaParser,
        [
            "",
            "<|python_tag|>",
            f'{{"name": "get_w", "parameters": {JSON_W}}}; {{"name": "look", "parameters": {JSON_L}}}',
        ],
        ("<|python_tag|>",),
    ),
    Form(
        Llama4Parser,
        [
            *("", "<|python_start|>", "", "<|python_end|>"),
            f'{{"name": "get_w", "parameters": {JSON_W}}}{{"name": "look", "parameters": {JSON_L}}}',
        ],
        ("<|python_start|>", "<|python_end|>"),
    ),
    Form(
        PythonicParser,
        ["", "<|python_start|>", '[get_w(city="Rome", n=3, tags=["a"]), look(at="it")]', "<|python_end|>"],
        ("<|python_start|>", "<|python_end|>"),
    ),
    array(GraniteParser, "<|tool_call|>", ""),
    array(PhiParser, "<|tool_call|>", "<|/tool_call|>"),
    array(NemotronParser, "<TOOLCALL>", "</TOOLCALL>"),
    array(ToolCallsParser, "<tool_calls>", "</tool_calls>"),
    array(ApertusParser, "<|tools_prefix|>", "<|tools_suffix|>", f'[{{"get_w": {JSON_W}}}, {{"look": {JSON_L}}}]'),
    array(CommandParser, "<|START_ACTION|>", "<|END_ACTION|>", ACTIONS),
    array(
        LfmParser, "<|tool_call_start|>", "<|tool_call_end|>", "[get_w(city='Rome', n=3, tags=['a']), look(at='it')]"
    ),
    Form(
        GemmaParser,
        [
            *("", "<|tool_call>", "call:get_w{city:", QUOTE, "Rome", QUOTE, ",n:3,tags:[", QUOTE, "a", QUOTE, "]}"),
            *("<tool_call|>", "", "<|tool_call>", "call:look{at:", QUOTE, "it", QUOTE, "}", "<tool_call|>"),
        ],
        ("<|tool_call>", "<tool_call|>", QUOTE),
    ),
    Form(
        DSMLParser,
        [
            *("", f"<{DSML}function_calls>", "\n"),
            *dsml("get_w", [("city", "true", "Rome"), ("n", "false", "3"), ("tags", "false", '["a"]')]),
            *dsml("look", [("at", "true", "it")]),
            f"</{DSML}function_calls>",
        ],
        (DSML,),
    ),
    Form(
        HarmonyParser,
        [
            *("", "<|channel|>", "analysis", "<|message|>", "Hm.", "<|end|>", "", "<|start|>", "assistant"),
            *("<|channel|>", "commentary to=functions.get_w ", "<|constrain|>", "json", "<|message|>", JSON_W),
            *("<|call|>", "", "<|start|>", "assistant to=functions.look", "<|channel|>", "commentary json"),
            *("<|message|>", JSON_L, "<|call|>"),
        ],
        CHANNELS,
    ),
]


def damaged(form: Form) -> Iterator[str]:
    """Yield the text with each mark left out, twice there, cut or misspelled."""
    for at in range(1, len(form.parts), 2):
        mark = form.parts[at]
        spoiled = ["", mark * 2, mark + "\n" + mark]
        spoiled += [mark[:size] for size in range(1, len(mark))]
        spoiled += [mark[:i] + mark[i + 1 :] for i in range(len(mark))]
        spoiled += [mark[:i] + mark[i + 1] + mark[i] + mark[i + 2 :] for i in range(len(mark) - 1)]
        for each in dict.fromkeys(spoiled):
            named, right = _TAG_OF.match(each), _TAG_OF.match(mark)
            if named is not None and right is not None and named[1] != right[1]:
                continue  # the tag of another name
            yield "".join([*form.parts[:at], each, *form.parts[at + 1 :]])


def read(calls: type[CallParser], text: str, sizes: list[int], is_whole: bool = True) -> MessageDelta:
    marks = HARMONY if calls is HarmonyParser else None
    return read_as(MessagePlan(marks, False, True, calls, NAMES, True), text, sizes, is_whole)


def read_as(how: MessagePlan, text: str, sizes: list[int], is_whole: bool = True) -> MessageDelta:
    reader, at, found = how.parser(), 0, []
    for size in itertools.cycle(sizes):
        if at >= len(text):
            break
        found.append(reader.push(text[at : at + size]))
        at += size
    message = joined([*found, reader.finish(is_whole)])
    return MessageDelta(message) if isinstance(message, str) else message


def told(message: MessageDelta) -> tuple[str, str, list[tuple[str, str]], object]:
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.calls], message.order


@pytest.mark.parametrize("form", FORMS, ids=[form.calls.__name__ for form in FORMS])
def test_calls_without_damage_are_read(form: Form) -> None:
    message = read(form.calls, "".join(form.parts), [7])
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == RIGHT and not message.content.strip()


@pytest.mark.parametrize("form", FORMS[:-1], ids=[form.calls.__name__ for form in FORMS[:-1]])
def test_calls_behind_a_reasoning_that_was_never_closed_are_calls_and_drafts_are_none(form: Form) -> None:
    calls = "".join(form.parts)
    how = MessagePlan(MARKS[0], True, True, form.calls, NAMES, True)
    for text, behind, right in (("Hm. " + calls, "", RIGHT), ("Hm. " + calls, "</think>Yes.", []), (calls, " So.", [])):
        for size in (1, 3, 999):
            message = read_as(how, text + behind, [size])
            assert [(call.name, json.loads(call.arguments)) for call in message.calls] == right, behind
            assert message.content.strip() == ("Yes." if "Yes" in behind else "")
            if right:
                assert message.reasoning.strip() == "Hm."
            else:
                assert message.reasoning == (text if "Yes" in behind else text + behind).removesuffix("\n")


@pytest.mark.parametrize("form", FORMS, ids=[form.calls.__name__ for form in FORMS])
@given(data=st.data())
def test_a_call_with_a_damaged_mark_is_right_or_text_without_marks(form: Form, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(list(damaged(form))))
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    check(form, text, sizes)


def check(form: Form, text: str, sizes: list[int]) -> None:
    whole = read(form.calls, text, [len(text)])
    for call in whole.calls:
        assert (call.name, json.loads(call.arguments)) in RIGHT, text
    for mark in form.gone:
        assert mark not in whole.content and mark not in whole.reasoning, text
    for how in ([1], [3], sizes):
        assert told(read(form.calls, text, how)) == told(whole), text
    cut = read(form.calls, text, [len(text)], False)
    assert told(read(form.calls, text, sizes, False)) == told(cut), text
