"""A model's text becomes reasoning, content and calls, for any cut; text that is no call stays content, unchanged."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from call_texts import ADD, ARGUMENTS, BOTH, NAMES, THINK, Parser, plan, read
from hypothesis import given
from hypothesis import strategies as st

from chitu.http.answer.choice import ChoiceDecoder, Delta
from chitu.http.ask.parsed import OutputOptions
from chitu.http.messages.call_formats import (
    HermesParser,
    Llama4Parser,
    LlamaParser,
    MistralParser,
)
from chitu.http.messages.call_objects import MessageDelta, joined
from chitu.http.messages.call_parser import MAX_HEAD_CHARS, PIECE_CHARS, CallParser
from chitu.http.messages.message_parser import (
    MAX_SPACE_CHARS,
    MessagePlan,
)

CALLS: list[Any] = [
    pytest.param(
        HermesParser, f'Hi.\n<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>', "Hi.", BOTH[:1]
    ),
    pytest.param(
        HermesParser,
        f'<tool_call>{{"name":"add","arguments":{ADD}}}</tool_call>\n<tool_call>\n{{"arguments": {{}}, '
        '"name": "look"}\n</tool_call>\n',
        "",
        BOTH,
    ),
    pytest.param(
        HermesParser, f'<tool_call>{{"name": "add", "arguments": {ADD}}} and', "and", BOTH[:1], id="no end mark"
    ),
    pytest.param(LlamaParser, f'{{"name": "add", "parameters": {ADD}}}', "", BOTH[:1]),
    pytest.param(
        LlamaParser,
        f'<|python_tag|>{{"name": "add", "parameters": {ADD}}}; {{"name": "look", "parameters": {{}}}}',
        "",
        BOTH,
    ),
    pytest.param(
        Llama4Parser,
        f'<|python_start|>Well.<|python_end|>{{"name": "add", "parameters": {ADD}}}'
        '{"name": "look", "parameters": {}}',
        "Well.",
        BOTH,
    ),
    pytest.param(
        Llama4Parser,
        f'<|python_start|>{{"name": "add", "parameters": {ADD}}}<|python_end|>Done.<|python_start|>',
        "Done.",
        BOTH[:1],
    ),
    pytest.param(
        MistralParser,
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {ADD}, "id": "123456789"}}, {{"name": "look", '
        '"arguments": {}}]',
        "",
        BOTH,
    ),
    pytest.param(MistralParser, f"Hi.[TOOL_CALLS]add{ADD}[TOOL_CALLS]look{{}}", "Hi.", BOTH),
    pytest.param(
        MistralParser,
        f"[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{ADD}[TOOL_CALLS]look[ARGS] {{}}",
        "",
        BOTH,
        id="with ids",
    ),
]


@pytest.mark.parametrize(("calls", "text", "content", "expected"), CALLS)
def test_calls_are_read_however_the_text_is_cut(
    calls: Parser, text: str, content: str, expected: list[tuple[str, str]]
) -> None:
    for cut in (1, 2, 3, 5, 17, len(text)):
        assert read(plan(calls), text, cut) == (content, "", expected)


def bare(text: str) -> str:
    """Return text without the marks of all formats that are read here."""
    return re.sub(r"</?tool_call>|\[(?:TOOL_CALLS|ARGS|CALL_ID)\]|<\|python_(?:tag|start|end)\|>", "", text)


ARGUED = [
    ('"{\\"a\\": 1}"', '{"a": 1}'),
    ('"{\\"a\\": \\"x\ny\\"}"', '{"a": "x\\ny"}'),
    ('```json\n{"a": 1}\n```', '{"a": 1}'),
    ('```{"a": {}}```', '{"a": {}}'),
    (' "" ', "{}"),
    *((nothing, "{}") for nothing in ("", "\n", "null", " None\n", "[]", "[]\n", '"null"')),
]


@pytest.mark.parametrize(("written", "arguments"), ARGUED)
@pytest.mark.parametrize("head", ["look[ARGS]", "look[CALL_ID]123456789[ARGS]"])
def test_what_follows_args_is_what_the_model_plainly_means(head: str, written: str, arguments: str) -> None:
    one = f"[TOOL_CALLS]{head}{written}"
    for text, calls in ((one, 1), (one * 2, 2)):
        for cut in (1, 2, 3, 7, len(text)):
            assert read(plan(MistralParser), text, cut) == ("", "", [("look", arguments)] * calls), text
    for text in (one.replace("look", "other"), f"[TOOL_CALLS]{head}None of [x]", f'[TOOL_CALLS]{head}"no" object'):
        for cut in (1, 5, len(text)):
            assert read(plan(MistralParser), text, cut) == (bare(text), "", [])


@pytest.mark.parametrize(
    ("calls", "begin", "end"),
    [
        (HermesParser, "<tool_call>\n", "\n</tool_call>"),
        (HermesParser, "<tool_call>\n```\n", "\n```\n</tool_call>"),
        (MistralParser, "[TOOL_CALLS][", "]"),
    ],
)
def test_one_object_closed_too_many_is_no_content(calls: type[CallParser], begin: str, end: str) -> None:
    one = f'{begin}{{"name": "add", "arguments": {{"a": 1}}}}'
    for brace, is_swallowed in (("}", True), (" }", True), ("}}", False)):
        text = one + brace + end
        for cut in (1, 2, 5, len(text)):
            found, _, called = read(plan(calls), text, cut)
            assert called == [("add", '{"a": 1}')] and (found == "") == is_swallowed, text


MARKED = [
    (HermesParser, "<tool_call>\n", "\n</tool_call>"),
    (LlamaParser, "", ""),
    (LlamaParser, "<|python_tag|>", ""),
    (Llama4Parser, "", ""),
    (Llama4Parser, "<|python_start|>", "<|python_end|>"),
    (MistralParser, "[TOOL_CALLS]", ""),
    (MistralParser, "[TOOL_CALLS] [", "]"),
]
ARGUED_IN_PYTHON = """{"a": [true, null, "it's \\\\"x\\\\""], "b": 1, "c": []}"""
SPELLINGS = [
    ('{"type": "function", "name": "add", "parameters": {"a": 1}}', '{"a": 1}'),
    ('{"id": "call_1", "type": "function", "name": "add", "arguments": {"a": 1}}', '{"a": 1}'),
    ('{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}', '{"a": 1}'),
    ('{"function": {"name": "add", "parameters": {"a": 1}}, "type": "function"}', '{"a": 1}'),
    ('{"type": "function", "function": "add", "parameters": {"a": 1}}', '{"a": 1}'),
    ('{"parameters": {"a": 1}, "name": "add"}', '{"a": 1}'),
    ('{"name": "add", "parameters": {"a": 1}, "type": "function"}', '{"a": 1}'),
    ('{"name": "add", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
    ('{"name": "add"}', "{}"),
    ('{"type": "function", "name": "add"}', "{}"),
    ('{"name": "add", "parameters": null}', "{}"),
    ('{"name": "add", "arguments": ""}', "{}"),
    ('{"name": "add", "arguments": []}', "{}"),
    ('{"name": "add", "arguments": "null"}', "{}"),
    ('{"id": 0, "name": "add", "arguments": {"a": 1}}', '{"a": 1}'),
    ('{"id": null, "type": null, "name": "add", "arguments": {"a": 1}}', '{"a": 1}'),
    ('{"type" : null , "function": {"name": "add"}}', "{}"),
    ('{"name": "a\\u0064d", "arguments": {}}', "{}"),
    ('{"name": "add", "arguments": {"a": 1e999, "a": -0.0}}', '{"a": 1e999, "a": -0.0}'),
    ('{"name": "add", "arguments": {"a": "x\ny\tz"}}', '{"a": "x\\ny\\tz"}'),
    ('{"name": "add", "arguments": {"a": "\x00\\\n"}}', '{"a": "\\u0000\\n"}'),
    ('{"name": "add", "arguments": {"a": "it\\\'s \\d"}}', '{"a": "it\'s \\\\d"}'),
    ('{"name": "add", "arguments": {"a": "\\ud83d\\ude00 \\ud83d"}}', '{"a": "\\ud83d\\ude00 \\ufffd"}'),
    ('{"name": "add", "arguments": {"a": [True, None,], "b": "True,]"},}', '{"a": [true, null], "b": "True,]"}'),
    ('{"name": "add", "arguments": "{\\"a\\": \\"x\\ny\\"}"}', '{"a": "x\\ny"}'),
]


@pytest.mark.parametrize(("calls", "begin", "end"), MARKED)
@pytest.mark.parametrize(("text", "arguments"), SPELLINGS)
def test_what_the_model_plainly_means_is_a_call(
    calls: type[CallParser], begin: str, end: str, text: str, arguments: str
) -> None:
    one = [("add", arguments)]
    wholes = [(text, one), (text + ";", one), (f"{text}\n, {text}", one * 2)]
    if not begin.endswith("["):
        wholes += [(f"```json\n{text}\n```\n", one), (f"[{text}]", one), (f"``` [{text}, {text}]```", one * 2)]
    for whole, expected in wholes:
        whole = begin + whole + end
        for cut in (1, 2, 7, len(whole)):
            assert read(plan(calls), whole, cut) == ("", "", expected), whole


def written_raw(value: Any) -> str:
    """Return JSON in which line breaks and tabs are not escaped."""
    text = json.dumps(value)
    for escaped, raw in (("\\n", "\n"), ("\\t", "\t"), ("\\u0001", "\x01")):
        text = re.sub(r"(?<!\\)((?:\\\\)*)" + re.escape(escaped), lambda found, raw=raw: found[1] + raw, text)
    return text


@st.composite
def written_calls(draw: st.DrawFn) -> tuple[type[CallParser], str, list[tuple[str, Any]]]:
    """Return a parser, a text with calls, and these: names and decoded arguments."""
    calls, begin, end = draw(st.sampled_from(MARKED))
    is_array = begin.endswith("[")
    texts, expected = [], []
    for _ in range(draw(st.integers(1, 3))):
        name, value = draw(st.sampled_from(sorted(NAMES))), draw(ARGUMENTS)
        dump = draw(st.sampled_from((json.dumps, written_raw, lambda v: json.dumps(v, indent=2))))
        given = json.dumps(dump(value)) if draw(st.integers(0, 3)) == 0 else dump(value)
        key = draw(st.sampled_from(("arguments", "parameters")))
        members = [f'"name": "{name}"', f'"{key}": {given}']
        if draw(st.booleans()):
            members.reverse()
        inner = ", ".join(members)
        if draw(st.booleans()):
            inner = f'"function": {{{inner}}}'
        texts.append(f'{{"type": "function", {inner}}}' if draw(st.booleans()) else f"{{{inner}}}")
        expected.append((name, json.loads(json.dumps(value).replace('\\ud83d"', '\\ufffd"'))))
    if calls is HermesParser:
        whole = "\n".join(begin + text + end for text in texts)
    elif draw(st.booleans()) and not is_array:
        whole = f"{begin}[{', '.join(texts)}]"
    else:
        whole = begin + (", " if is_array else "; ").join(texts) + end
    return calls, whole, expected


@given(written_calls(), st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(0, 2000))
def test_a_stream_of_calls_is_the_whole_answer_however_it_is_cut(
    written: tuple[type[CallParser], str, list[tuple[str, Any]]], sizes: list[int], end: int
) -> None:
    calls, text, expected = written
    content, _, found = read(plan(calls), text, len(text))
    assert content == "" and [(name, json.loads(arguments)) for name, arguments in found] == expected
    for shown in (text, text[:end]):  # the second may be cut off by `max_tokens`
        parser, at, streamed = plan(calls).parser(), 0, []
        for size in itertools.cycle(sizes):
            streamed.append(parser.push(shown[at : at + size]))
            at += size
            if at >= len(shown):
                break
        message = joined([*streamed, parser.finish(False)])
        others = joined([(whole := plan(calls).parser()).push(shown), whole.finish(False)])
        assert without_ids(message) == without_ids(others)
        for call in message.calls if isinstance(message, MessageDelta) else ():
            assert isinstance(json.loads(call.arguments), dict)
        if isinstance(message, str):
            assert bare(message) == bare(shown)


def without_ids(message: str | MessageDelta) -> Any:
    return (
        message if isinstance(message, str) else message._replace(calls=[(c.name, c.arguments) for c in message.calls])
    )


def test_a_call_comes_when_it_is_complete_and_only_the_beginning_of_a_mark_is_held() -> None:
    parser = plan(HermesParser).parser()
    assert parser.push("a < b") == "a < b"
    assert parser.push(" and <tool") == " and "
    assert parser.push("box> \n") == "<toolbox> "
    assert parser.push('\n<tool_call>\n{"name": "add", "argum') == "\n"  # of two line ends one belongs to the mark
    assert not any(parser.push(piece) for piece in ('ents": {"a"', ': "x', "y", '"}'))
    call = parser.push("}")
    assert isinstance(call, MessageDelta) and call.content == ""
    assert [(call.name, call.arguments) for call in call.calls] == [("add", '{"a": "xy"}')]
    assert not any(parser.push(piece) for piece in ("\n</tool", "_call>"))
    assert not parser.finish()


NO_CALLS = [
    pytest.param(LlamaParser, '{"answer": 5}'),
    pytest.param(LlamaParser, '  {"name": "other", "parameters": {}}'),
    pytest.param(LlamaParser, 'Say {"name": "add", "parameters": {}}'),
    pytest.param(LlamaParser, " \n "),
    pytest.param(HermesParser, '<tool_call>\n{"name": "other", "arguments": {"a": 1}}\n</tool_call> so'),
    pytest.param(HermesParser, '<tool_call>\n{"name": "add", "argum'),
    pytest.param(HermesParser, "<tool_call><tool_call>{'name': 'other'}</tool_call>"),
    pytest.param(HermesParser, "And </tool_call> alone."),
    pytest.param(HermesParser, '<tool_call>{"arguments": {"a": 1}, "name": ["add"]}</tool_call>'),
    pytest.param(HermesParser, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    pytest.param(HermesParser, "a <tool_cal"),
    pytest.param(HermesParser, "<tool_call>" + " " * MAX_HEAD_CHARS + "x"),
    pytest.param(MistralParser, "[TOOL_CALLS] I would rather not"),
    pytest.param(MistralParser, '[TOOL_CALLS] [{"tool": "add"}]'),
    pytest.param(MistralParser, "[TOOL_CALLS]"),
]


@pytest.mark.parametrize(("calls", "text"), NO_CALLS)
def test_what_is_no_call_of_an_offered_tool_is_content_without_its_marks(calls: Parser, text: str) -> None:
    for cut in (1, 4, len(text)):
        assert read(plan(calls), text, cut) == (bare(text), "", [])


@pytest.mark.parametrize(
    "text",
    [
        '{"answer"',
        '{"a"',
        '{"x',
        "[1",
        "```python\nd",
        '```json\n{"answer"',
        '{"name": "Bob"',
        '{"name": "B',
        '{"name": 5',
        '{"type": "o',
        '{"type": "function", "of',
        '{"type": "function", "name": "x',
        '{"function": {"x',
        '{"id": "7"}',
        '[{"id": 7}',
        '{"id": 7, "x',
        '{"id": t',
        '{"type": 7',
        '{"type": no',
        "x",
    ],
)
def test_an_answer_in_json_of_a_model_that_calls_in_json_streams_at_once(text: str) -> None:
    parser = plan(LlamaParser).parser()
    assert "".join(str(parser.push(letter)) for letter in text) == text


BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": x</tool_call> Sorry.'


def test_broken_calls_and_those_that_are_cut_off_are_content() -> None:
    for text in (BROKEN, BROKEN.replace("x<", '"x"y"}}<')):
        for cut in (1, 7, len(text)):
            assert read(plan(HermesParser), text, cut) == (bare(text), "", [])
    for end in range(len(BROKEN) - len("tool_call> Sorry.")):  # cut off by `max_tokens`
        for is_whole in (True, False):
            parser = plan(HermesParser).parser()
            assert joined([parser.push(BROKEN[:end]), parser.finish(is_whole)]) == bare(BROKEN[:end])
    for is_whole in (True, False):  # a name alone is a call only if the model ended there
        for text in ("[TOOL_CALLS]look", "[TOOL_CALLS]look[ARGS]", "[TOOL_CALLS]look[CALL_ID]123456789"):
            parser = plan(MistralParser).parser()
            message = joined([parser.push(text), parser.finish(is_whole)])
            assert without_ids(message) == (MessageDelta(calls=[("look", "{}")]) if is_whole else bare(text))


LACKING = [
    (HermesParser, '<tool_call>\n{"name": "add", "arguments": {"a": 1}', "\n</tool_call>"),
    (HermesParser, '<tool_call>\n{"function": {"name": "add", "arguments": {"a": 1}', "\n</tool_call>"),
    (HermesParser, '<tool_call>\n{"name": "add", "arguments": {"a": 1}', '\n<tool_call>\n{"name": "look"}'),
    (HermesParser, '<tool_call>\n{"name": "add", "arguments": {"a": 1', "\n</tool_call>"),
    (HermesParser, '<tool_call>\n{"name": "add", "arguments": {"a": 1}', ""),
    (MistralParser, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}', "]"),
    (MistralParser, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}', ""),
    (LlamaParser, '{"name": "add", "parameters": {"a": 1}', ""),
    (MistralParser, '[TOOL_CALLS]add[ARGS]{"a": 1', "[TOOL_CALLS]look[ARGS]{}"),
]


@pytest.mark.parametrize(("calls", "begin", "end"), LACKING)
def test_a_call_that_lacks_only_brackets_at_its_end_is_one(calls: type[CallParser], begin: str, end: str) -> None:
    for text in (begin + end, begin.replace('"', "'") + end):
        for cut in (1, 3, len(text)):
            content, _, found = read(plan(calls), text, cut)
            assert (content, found) == ("", [("add", '{"a": 1}'), *([("look", "{}")] if "look" in end else [])]), text
    parser = plan(calls).parser()
    if not end:  # cut off by `max_tokens`, so more may have come
        assert joined([parser.push(begin), parser.finish(False)]) == bare(begin)


def test_an_enforced_call_is_read_only_where_the_grammar_has_it() -> None:
    call = '{"name": "add", "parameters": {}}'
    for begin, is_call in (("", True), ("[", False), ("```json\n", False)):
        how = plan(LlamaParser)._replace(is_enforced=True)
        assert read(how, begin + call) == (("", "", [("add", "{}")]) if is_call else (begin + call, "", []))


PIECES = [
    *("<|python_start|>", "<|python_end|>"),
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool_", "add", "[ARGS]", "<think>", "\\"),
    *("null", "```", '"{}"', "{}"),
    *("}", "{", "[", "]", ";", ",", "x", "<", '{"name": "add", ', '"arguments": {', '"parameters": ', '"', " ", "\n"),
]


@pytest.mark.parametrize("calls", [HermesParser, LlamaParser, Llama4Parser, MistralParser])
@given(
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.integers(1, 9),
    st.booleans(),
)
def test_no_text_breaks_a_parser_and_the_cut_does_not_matter(
    calls: type[CallParser], text: str, cut: int, parallel: bool
) -> None:
    how = plan(calls, parallel, THINK)
    assert read(how, text, cut) == read(how, text, len(text) or 1)
    content, reasoning, found = read(how, text, cut)
    if not found and not reasoning and "think" not in text:
        assert bare(content) == bare(text)
    assert parallel or len(found) <= 1
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in found)


def test_a_long_text_is_read_in_one_pass() -> None:
    class Counted(HermesParser):
        read = 0

        def _in_text(self, text: str) -> str:
            Counted.read += len(text)
            return super()._in_text(text)

    parser = Counted(NAMES, True)
    text = "<tool_call>x" * 4000
    shown = [*parser.push(text), *parser.finish()]
    assert "".join(map(str, shown)) == "x" * 4000
    # A state passes on what it does not consume, so each mark costs at most a piece, however long the text is.
    assert Counted.read <= len(text) * PIECE_CHARS / len("<tool_call>x")
    one_by_one = Counted(NAMES, True)
    Counted.read = 0
    for letter in "a<tool_call>" * 2000:
        one_by_one.push(letter)
    assert Counted.read < 14 * 24_000


THOUGHTS = [
    pytest.param("<think>\nHm.\n</think>\n\nYes.", False, "Yes.", "Hm."),
    pytest.param("\n<think>Hm.</think>Yes.", False, "Yes.", "Hm."),
    pytest.param("\nHm.\n</think>\n\nYes.", True, "Yes.", "Hm."),
    pytest.param("No <think> here", False, "No <think> here", ""),
    pytest.param("<think>\nunended\n</thi", False, "", "unended\n</thi"),
    pytest.param("<thin", False, "<thin", ""),
    pytest.param("<think>\n\n</think>\n\n", False, "", ""),
    pytest.param(" " * MAX_SPACE_CHARS + "<think>a</think>", False, " " * MAX_SPACE_CHARS + "<think>a</think>", ""),
]


@pytest.mark.parametrize(("text", "inside", "content", "reasoning"), THOUGHTS)
def test_reasoning_is_split_from_the_answer(text: str, inside: bool, content: str, reasoning: str) -> None:
    for cut in (1, 2, 5, len(text)):
        assert read(plan(None, marks=THINK, inside=inside), text, cut) == (content, reasoning, [])


def test_reasoning_comes_before_calls_and_may_be_left_out() -> None:
    text = '<think>\nadd it: <tool_call>\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    how = plan(HermesParser, marks=THINK)
    assert read(how, text, 3) == ("", "add it: <tool_call>", [("add", "{}")])
    assert read(how._replace(shows_reasoning=False), text, 3) == ("", "", [("add", "{}")])


OPEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
OPEN: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("hm\n" + OPEN_CALL, "hm", [("add", '{"a": 1}')]),
    ("hm\n" + OPEN_CALL + "\n\n", "hm", [("add", '{"a": 1}')]),
    (OPEN_CALL + "\n" + OPEN_CALL, "", [("add", '{"a": 1}')] * 2),
    (OPEN_CALL.replace("add", "look") + " So: " + OPEN_CALL, "%s So: ", [("add", '{"a": 1}')]),
    ("hm " + OPEN_CALL.removesuffix("\n</tool_call>"), "hm ", [("add", '{"a": 1}')]),
    ("hm " + OPEN_CALL + " Or not?", "=", []),
    ("hm " + OPEN_CALL.replace("add", "other"), "=", []),
    ("hm " + OPEN_CALL[:40], "=", []),
    ("a <tool_call> is a mark, <tool_ca", "=", []),
    ("<tool_call>" * 9 + "x" + OPEN_CALL, "<tool_call>" * 9 + "x", [("add", '{"a": 1}')]),
]


@pytest.mark.parametrize("begin", ["", "<think>"])
@pytest.mark.parametrize(("text", "reasoning", "calls"), OPEN)
def test_calls_at_the_end_of_a_reasoning_that_was_never_closed_are_calls(
    begin: str, text: str, reasoning: str, calls: list[tuple[str, str]]
) -> None:
    how = plan(HermesParser, marks=THINK, inside=not begin)
    expected = reasoning.replace("=", text).replace("%s", OPEN_CALL.replace("add", "look"))
    for cut in (1, 2, 7, len(begin + text)):
        assert read(how, begin + text, cut) == ("", expected, calls)
        assert read(how._replace(shows_reasoning=False), begin + text, cut) == ("", "", calls)
        assert read(how, f"{begin}{text}</think>\n\nYes.", cut) == ("Yes.", text.removesuffix("\n"), [])
    for reason in ("stop", "length"):
        decoder, ids, message = decode(how, begin + text, reason, 3)
        assert decoder.finish_reason == ("tool_calls" if calls and reason == "stop" else reason)
        assert ids == [*map(ord, begin + text), 0]
        if reason == "length":  # more would have come
            assert message == MessageDelta(reasoning=text + "\0")


def test_reasoning_is_shown_at_once_up_to_a_mark_and_no_draft_is_read_for_ever() -> None:
    parser = plan(HermesParser, marks=THINK, inside=True).parser()
    assert parser.push("I may call <tool") == MessageDelta(reasoning="I may call ")
    assert parser.push("box>") == MessageDelta(reasoning="<toolbox>")
    assert parser.push(' <tool_call>{"name": "ad') == MessageDelta(reasoning=" ")
    assert parser.push('just"} <') == MessageDelta(reasoning='<tool_call>{"name": "adjust"} ')
    text = "<tool_call>" * 40_000
    parser = plan(HermesParser, marks=THINK, inside=True).parser()
    message = joined([*(parser.push(text[at : at + 4096]) for at in range(0, len(text), 4096)), parser.finish()])
    assert message == MessageDelta(reasoning=text)


class Letters:
    """A detokenizer in which a token is a letter."""

    def push(self, token_ids: list[int], /) -> str:
        return "".join(map(chr, token_ids))

    def finish(self) -> str:
        return ""


def decode(
    how: MessagePlan, text: str, reason: str, at_once: int
) -> tuple[ChoiceDecoder, list[int], str | MessageDelta]:
    options = OutputOptions(1, True, False, (), False, True, True)
    decoder = ChoiceDecoder(Letters(), None, options, frozenset({0}), how.parser())
    tokens, ids, shown = [*map(ord, text), 0], [], []
    for at in range(0, len(tokens), at_once):
        piece = tokens[at : at + at_once]
        for delta in decoder.feed(piece, reason if at + at_once >= len(tokens) else None):
            ids += delta.token_ids
            shown.append(delta.text)
        if decoder.finish_reason is not None:
            break
    return decoder, ids, joined(shown)


@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_tokens_up_to_the_end_of_a_reasoning_are_counted(at_once: int, reason: str) -> None:
    for text, inside, expected in (
        ("<think>ab</think>", False, 17),
        ("<think>ab</think>\n\nYes.", False, 17),
        ("ab</think>Yes.", True, 10),
        ("</think>Yes.", True, 8),
        ("<think>abc", False, 10),
        ("Yes, <think>ab</think>", False, 0),
        ("", True, 0),
    ):
        tokens = [*map(ord, text), *([0] if reason == "stop" else [])]
        how = plan(None, marks=THINK, inside=inside)
        options = OutputOptions(1, True, False, (), False, True, True)
        decoder = ChoiceDecoder(Letters(), None, options, frozenset({0}), how.parser())
        for at in range(0, len(tokens), at_once):
            decoder.feed(tokens[at : at + at_once], reason if at + at_once >= len(tokens) else None)
        whole = ChoiceDecoder(Letters(), None, options, frozenset({0}), how.parser())
        whole.whole(tokens, reason)
        counted = [(one.num_reasoning_tokens, one.num_tokens) for one in (decoder, whole)]
        assert counted == [(expected, len(tokens))] * 2, (text, inside)


@pytest.mark.parametrize("text", ["<think>ab</think>Yes.", "<think>ab</think>", "<think>a", "Yes.<thi", ""])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stream_with_reasoning_has_the_same_deltas_however_the_tokens_come(text: str, reason: str) -> None:
    def deltas(at_once: int) -> list[Any]:
        decoder = ChoiceDecoder(
            Letters(),
            None,
            OutputOptions(1, True, False, (), False, True, True),
            frozenset({0}),
            plan(None, marks=THINK).parser(),
        )
        tokens, found = [*map(ord, text), *([0] if reason == "stop" else [])], []
        for at in range(0, max(1, len(tokens)), at_once):
            found += decoder.feed(tokens[at : at + at_once], reason if at + at_once >= len(tokens) else None)
        return found

    assert deltas(1) == deltas(3) == deltas(1000)


def test_a_call_in_double_brackets_is_one() -> None:
    text = '<tool_call>\n{{"name": "add", "arguments": {"a": "}}"}}}\n</tool_call>'
    assert read(plan(HermesParser), text) == ("", "", [("add", '{"a": "}}"}')])


ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_a_choice_with_calls_ends_with_their_reason_and_all_its_tokens(at_once: int) -> None:
    for reason, expected in (("stop", "tool_calls"), ("length", "length")):
        decoder, ids, message = decode(plan(HermesParser), ONE, reason, at_once)
        assert decoder.finish_reason == expected and ids == [*map(ord, ONE), 0] and decoder.num_tokens == len(ids)
        assert isinstance(message, MessageDelta) and message.calls[0].arguments == '{"a": 1}'
    decoder, _, message = decode(plan(HermesParser), "no call", "stop", at_once)
    assert decoder.finish_reason == "stop" and message == "no call"
    whole = ChoiceDecoder(Letters(), None, OutputOptions(1, False, False, (), False, True, True), frozenset({0}))
    assert whole.whole([*map(ord, ONE), 0], "stop") == Delta(ONE, [*map(ord, ONE), 0])


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_without_parallel_calls_the_choice_ends_behind_the_first(at_once: int) -> None:
    decoder, ids, message = decode(plan(HermesParser, parallel=False), ONE + ONE, "stop", at_once)
    assert (decoder.finish_reason == "tool_calls" and decoder.num_tokens == len(ids) <= len(ONE) + 1) or at_once == 1000
    assert isinstance(message, MessageDelta) and [call.name for call in message.calls] == ["add"]
