"""Formats of calls of single families: arrays between marks, Python between marks, Gemma's, DSML, Seed-OSS's."""

from __future__ import annotations

import itertools
import json
import re
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from draws import often
from hypothesis import given, settings
from hypothesis import strategies as st

from chitu.assets import TINY_MODEL_DIR
from chitu.errors import InvalidRequest
from chitu.grammars import GrammarCompiler
from chitu.grammars.marks import text_up_to
from chitu.grammars.tool_calls import tool_calls_lark
from chitu.http.ask.bodies import ChatBody
from chitu.http.ask.served_model import ServedModel
from chitu.http.ask.turns import ChatTurns
from chitu.http.messages.array_calls import (
    ActionParser,
    ApertusParser,
    CommandParser,
    CommandTextParser,
    FunctionCallParser,
    FunctoolsParser,
    GraniteParser,
    LinesParser,
    NemotronParser,
    PhiParser,
    ToolCallsParser,
)
from chitu.http.messages.call_formats import ArgumentsParser, LlamaParser, grammar_of_calls, text_of_calls
from chitu.http.messages.call_objects import MessageDelta, joined
from chitu.http.messages.call_parser import MAX_HEAD_CHARS, CallParser
from chitu.http.messages.code_calls import LfmParser, ToolCodeParser
from chitu.http.messages.dsml_calls import DSML as DSML_TOKEN
from chitu.http.messages.dsml_calls import DSMLParser, DSMLToolsParser
from chitu.http.messages.gemma_calls import FunctionGemmaParser, GemmaParser
from chitu.http.messages.message_parser import MessageFormat, MessagePlan, ReasoningMarks
from chitu.http.messages.pythonic_calls import PythonicParser
from chitu.http.messages.seed_calls import SeedParser
from chitu.http.table import BODIES
from chitu.protocol import ToolCalls
from chitu.tokenizer import Tokenizer
from chitu.tokenizer.chat_template import ChatTemplate

TINY = Tokenizer.load(TINY_MODEL_DIR)
WRITE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "lines": {"type": "array", "items": {"type": "integer"}},
        "options": {"type": "object"},
        "count": {"type": "integer"},
        "dry": {"type": "boolean"},
    },
    "required": ["path", "count"],
    "additionalProperties": False,
}
NAMES: dict[str, Any] = {"write": WRITE, "look.at": None}
ROLE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% for call in message.tool_calls %}"
END = "{% endfor %}{% endfor %}"
COMMA = "{{ '' if loop.last else ', ' }}"
OBJECT = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
ACTION = '"tool_name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
ITEMS = "{% for key, value in call.function.arguments | items %}"
GEMMA = (
    "{%- macro write(value) -%}{%- if value is string -%}{{ quote + value + quote }}{%- elif value is boolean -%}"
    "{{ 'true' if value else 'false' }}{%- elif value is mapping -%}{{ '{' }}{%- for key, inner in value | dictsort -%}"
    "{{ key }}:{{ write(inner) }}{{ '' if loop.last else ',' }}{%- endfor -%}{{ '}' }}{%- elif value is sequence -%}["
    "{%- for inner in value -%}{{ write(inner) }}{{ '' if loop.last else ',' }}{%- endfor -%}]{%- else -%}{{ value }}"
    "{%- endif -%}{%- endmacro -%}{% for call in message.tool_calls %}MARKcall:{{ call.function.name }}"
    "{{ write(call.function.arguments) }}CLOSE{% endfor %}"
)
DSML = (
    "{% set dsml = '｜DSML｜' %}<{{ dsml }}SECTION>\n{% for call in message.tool_calls %}"
    '<{{ dsml }}invoke name="{{ call.function.name }}">\n' + ITEMS + "{% if value is string %}"
    '<{{ dsml }}parameter name="{{ key }}" string="true">{{ value }}{% else %}'
    '<{{ dsml }}parameter name="{{ key }}" string="false">{{ value | tojson }}{% endif %}</{{ dsml }}parameter>\n'
    "{% endfor %}</{{ dsml }}invoke>\n{% endfor %}</{{ dsml }}SECTION>"
)
PYTHON = (
    "{{ call.function.name + '(' }}" + ITEMS + "{{ key }}="
    '{% if value is string %}{{ "\'" + value + "\'" }}{% elif value is mapping %}{{ value | tojson }}{% else %}'
    "{{ value | string }}{% endif %}" + COMMA + "{% endfor %})"
)
CALLS = "{% for call in message.tool_calls %}"
# The forms in which the models' own chat templates write calls; the rest of them is of no matter here.
TEMPLATES: dict[type[CallParser], str] = {
    GraniteParser: f"<|tool_call|>[{CALLS}{OBJECT}{COMMA}{{% endfor %}}]{{# <|start_of_role|> #}}",
    FunctionCallParser: f"{CALLS}<function_call> {OBJECT}{{% endfor %}}{{# 'arguments' #}}",
    PhiParser: f"<|tool_call|>[{CALLS}{OBJECT}{COMMA}{{% endfor %}}]<|/tool_call|>",
    FunctoolsParser: f"functools[{CALLS}{OBJECT}{COMMA}{{% endfor %}}]",
    NemotronParser: f"<TOOLCALL>[{CALLS}{OBJECT}{COMMA}{{% endfor %}}]</TOOLCALL>",
    ToolCallsParser: f"<tool_calls>[{CALLS}{OBJECT}{COMMA}{{% endfor %}}]</tool_calls>",
    LinesParser: f"<tool_calls>\n{CALLS}{OBJECT}\n{{% endfor %}}</tool_calls>",
    ApertusParser: f'<|tools_prefix|>[{CALLS}{{"{{{{ call.function.name }}}}": '
    f"{{{{ call.function.arguments | tojson }}}}}}{COMMA}{{% endfor %}}]<|tools_suffix|>",
    ActionParser: f"Action:\n```json\n[\n{CALLS}    {{{ACTION}{COMMA}\n{{% endfor %}}]```",
    CommandParser: f'<|START_ACTION|>[\n{CALLS}    {{"tool_call_id": "{{{{ loop.index0 }}}}", {ACTION}{COMMA}\n'
    "{% endfor %}]<|END_ACTION|>",
    CommandTextParser: f'<|START_ACTION|>[\n{CALLS}    {{"tool_call_id": "{{{{ loop.index0 }}}}", {ACTION}{COMMA}\n'
    "{% endfor %}]<|END_ACTION|>{# <|START_TEXT|> #}",
    LfmParser: f"<|tool_call_start|>[{CALLS}{PYTHON}{COMMA}{{% endfor %}}]<|tool_call_end|>",
    ToolCodeParser: f"```tool_code\n{CALLS}{PYTHON}\n{{% endfor %}}```{{# <start_of_turn> #}}",
    GemmaParser: "{% set quote = '<|\"|>' %}" + GEMMA.replace("MARK", "<|tool_call>").replace("CLOSE", "<tool_call|>"),
    FunctionGemmaParser: "{% set quote = '<escape>' %}"
    + GEMMA.replace("MARK", "<start_function_call>").replace("CLOSE", "<end_function_call>"),
    DSMLParser: DSML.replace("SECTION", "function_calls"),
    DSMLToolsParser: DSML.replace("SECTION", "tool_calls"),
    SeedParser: f"{CALLS}\n<seed:tool_call>\n<function={{{{ call.function.name }}}}>\n{ITEMS}<parameter={{{{ key }}}}>"
    "{{ value if value is string else value | string }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>"
    "{% endfor %}",
}
PARSERS = list(TEMPLATES)
each = pytest.mark.parametrize("calls", PARSERS)


def plan(calls: type[CallParser], parallel: bool = True, marks: ReasoningMarks | None = None) -> MessagePlan:
    return MessagePlan(marks, False, True, calls, NAMES, parallel)


def message_of(how: MessagePlan, text: str, sizes: list[int], is_whole: bool = True) -> MessageDelta:
    parser, at, found = how.parser(), 0, []
    for size in itertools.cycle(sizes):
        if at >= len(text):
            break
        found.append(parser.push(text[at : at + size]))
        at += size
    message = joined([*found, parser.finish(is_whole)])
    return MessageDelta(message) if isinstance(message, str) else message


def read(how: MessagePlan, text: str, sizes: list[int], is_whole: bool = True) -> tuple[str, list[tuple[str, Any]]]:
    message = message_of(how, text, sizes, is_whole)
    return message.content, [(call.name, json.loads(call.arguments)) for call in message.calls]


def rendered(calls: type[CallParser], made: list[tuple[str, dict[str, Any]]]) -> str:
    template = ChatTemplate({"default": "{% set message = messages[0] %}" + TEMPLATES[calls]}, {})
    turns = [{"function": {"name": name, "arguments": arguments}} for name, arguments in made]
    return template.render([{"role": "assistant", "content": "", "tool_calls": turns}], None, False, {})


MARKS = sorted({mark for calls in PARSERS for mark in (*calls.needed, calls.trigger)})
PLAIN = ["", "it's", '"x"', "{}", "[1, 2", "a, b=1", "1", "true", "\\n", "a\nb\t", "x:y", "é😀", "```", "</parameter>"]
TEXTS = st.text(max_size=12) | st.sampled_from([*PLAIN, *MARKS])
NO_QUOTES = TEXTS.map(lambda text: text.replace("'", "").replace("\\", "").replace("<|", "").replace("`", ""))
"""Texts that formats without escapes can have."""


def values(texts: st.SearchStrategy[str]) -> Any:
    numbers = st.lists(st.integers(), max_size=3)
    options = st.dictionaries(st.sampled_from("ab"), texts | st.integers() | st.booleans() | numbers, max_size=2)
    optional = {"lines": numbers, "options": options, "dry": st.booleans()}
    return st.fixed_dictionaries({"path": texts, "count": st.integers()}, optional=optional)


def writable(calls: type[CallParser]) -> Any:
    """Return arguments that the format's template can write without losing something."""
    if issubclass(calls, (LfmParser, ToolCodeParser)):
        return values(NO_QUOTES)
    if issubclass(calls, GemmaParser):
        return values(TEXTS.filter(lambda text: not re.search(calls.quote, text) and "<" not in text[-8:]))
    if issubclass(calls, SeedParser):  # Python's objects are no JSON
        texts = NO_QUOTES.filter(lambda text: not re.search(r"</?(parameter|function)", text))  # tags without a pair
        return values(texts).map(lambda given: {k: v for k, v in given.items() if k != "options"})
    return values(TEXTS.filter(lambda text: "｜DSML｜" not in text))


@each
@given(data=st.data())
@settings(max_examples=often(20))
def test_what_the_template_writes_is_read_as_these_calls_however_it_is_cut(
    calls: type[CallParser], data: st.DataObject
) -> None:
    one: Any = st.one_of(writable(calls).map(lambda value: ("write", value)), st.just(("look.at", {})))
    made = data.draw(st.lists(one, min_size=1, max_size=3))
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=9))
    text = rendered(calls, made)
    for how in ([len(text) + 9], sizes):
        content, found = read(plan(calls), "Well." + text, how)
        assert (content, found) == ("Well.", made), text
    assert read(plan(calls, parallel=False), text, sizes)[1] == made[:1]
    end = data.draw(st.integers(0, len(text)))
    for cut in (text[:end], text[end:]):  # by `max_tokens`, or nonsense
        whole, streamed = read(plan(calls), cut, [len(cut) + 1], False), read(plan(calls), cut, sizes, False)
        assert whole == streamed
        assert all(name in NAMES and isinstance(arguments, dict) for name, arguments in whole[1])


@each
@given(data=st.data())
@settings(max_examples=often(20))
def test_no_text_breaks_a_parser_and_the_cut_does_not_matter(calls: type[CallParser], data: st.DataObject) -> None:
    begin, end = calls.written("write")
    pieces = [*calls.marks, *calls.needed, begin, end, calls.end_mark, calls.section_end, "write", '"a": 1', "{", "}"]
    pieces += ["[", "]", "(", ")", ",", "'", '"', ":", " ", "\n", "x", "a=1", "call:", "```", '{"name": "write", ']
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=12)))
    is_whole, cut = data.draw(st.booleans()), data.draw(st.integers(1, 9))
    assert read(plan(calls), text, [cut], is_whole) == read(plan(calls), text, [len(text) + 1], is_whole)


FORMATS = [
    ("<start_of_turn>{{ call.name + '(' }}", PythonicParser, None),
    ('<start_of_turn>{"name": name, "parameters": object}', LlamaParser, None),
    ('<start_of_turn>{"name": name, "arguments": object}', ArgumentsParser, None),
    ("<|im_start|>List of tools: [", LfmParser, None),
    ("<|im_start|>List of tools: <|tool_list_start|>[ </think>", LfmParser, "</think>"),
    ("<|tool_call>call: <channel|>", GemmaParser, "<channel|>"),
    ("<|START_ACTION|><|END_THINKING|>", CommandParser, "<|END_THINKING|>"),
    ("<seed:tool_call><function= </seed:think>", SeedParser, "</seed:think>"),
    ("<|tools_prefix|><|inner_suffix|>", ApertusParser, "<|inner_suffix|>"),
    ("<start_of_turn>", None, None),
    ("<|tool_call|>", None, None),
]


def test_the_format_is_that_of_the_template_that_writes_it() -> None:
    for calls, text in TEMPLATES.items():
        assert MessageFormat.of(text).calls is calls
    for text, expected, close in FORMATS:
        found = MessageFormat.of(text)
        assert found.calls is expected and (found.reasoning.close if found.reasoning else None) == close, text


ONE = [("write", {"path": "a", "count": 1})]
ARGUMENTS = '{"path": "a", "count": 1}'
NAMED = f'{{"name": "write", "arguments": {ARGUMENTS}}}'
ACTED = f'{{"tool_name": "write", "parameters": {ARGUMENTS}}}'
DSML_CALL = '<｜DSML｜invoke name="write">\n{}</｜DSML｜invoke>\n'
DSML_BOTH = DSML_CALL.format(
    '<｜DSML｜parameter name="path" string="true">a</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="count" string="false">1</｜DSML｜parameter>\n'
)
SPELLINGS: list[tuple[type[CallParser], str]] = [
    (GraniteParser, f"<tool_call>[{NAMED}]"),
    (GraniteParser, f"<tool_call>[{NAMED}]</tool_call>"),
    (GraniteParser, f"<|tool_call|> [{NAMED}"),
    (GraniteParser, f"[{NAMED}]"),
    (GraniteParser, NAMED),
    (PhiParser, f"<|tool_call|>{NAMED}<|/tool_call|>"),
    (PhiParser, f'<|tool_call|>[{{"type": "function", "function": {NAMED}}}]<|/tool_call|>'),
    (PhiParser, f"functools[{NAMED}]"),
    (PhiParser, f"[{NAMED}]<|/tool_call|>"),
    (FunctoolsParser, f"functools[{NAMED}"),
    (FunctoolsParser, f"[{NAMED}]"),
    (NemotronParser, f"<TOOLCALL>{NAMED}</TOOLCALL></TOOLCALL>"),
    (ToolCallsParser, f"\n<tool_calls>{NAMED}\n</tool_calls>"),
    (ApertusParser, f'<|tools_prefix|>{{"write": {ARGUMENTS}}}<|tools_suffix|>'),
    (ApertusParser, f"<|tools_prefix|>[{NAMED}]<|tools_suffix|>"),
    (ApertusParser, f'<|tools_prefix|>[{{"write": {json.dumps(ARGUMENTS)}}}]'),
    (ActionParser, f"Action: ```json\n[{ACTED}]\n```"),
    (CommandParser, f"<|START_ACTION|>[{ACTED}]<|END_ACTION|>"),
    (CommandParser, f"<|START_ACTION|>{ACTED}"),
    (CommandParser, f"<|START_ACTION|>[{NAMED}]<|END_ACTION|><|START_RESPONSE|><|END_RESPONSE|>"),
    (LfmParser, "<|tool_call_start|>[write(path='a', count=1)]"),
    (LfmParser, '<|tool_call_start|>write(path="a", count=1)<|tool_call_end|>'),
    (LfmParser, '[write(path="a", count=1)]'),
    (LfmParser, '<|tool_call_start|><|tool_call_start|>[write(path="a", count=1)]]<|tool_call_end|>'),
    (LfmParser, '<|tool_call_start|>[write(path="a", count=1)]<|tool_call_end>'),
    (LfmParser, f"<|tool_call_start|>[{NAMED}]<|tool_call_end|>"),
    (ToolCodeParser, "```tool_code\nprint(write(path='a', count=1))\n```"),
    (ToolCodeParser, "\n```tool_code\n[write(path='a', count=1)]\n```\n"),
    (ToolCodeParser, "```tool_code\nwrite(path='a', count=1)"),
    (ToolCodeParser, "[write(path='a', count=1)]"),
    (GemmaParser, '<|tool_call>call:write{path:<|"|>a<|"|>,count:1}'),
    (GemmaParser, '<|tool_call>call:write{path:<|"|>a<|"|>,count:1}<tool_call|><|tool_response>'),
    (GemmaParser, f"<|tool_call>call:write{ARGUMENTS}<tool_call|>"),
    (GemmaParser, f"call:write{ARGUMENTS}<tool_call|>"),
    (GemmaParser, '<|tool_call>call:write{path:a<|"|>,count:1}<tool_call|>'),
    (GemmaParser, '<|tool_call>call:write{path:<|"|>a,count:1}<tool_call|>'),
    (GemmaParser, '<|tool_call>call:write{path:<|"|><|"|>a<|"|>,count:1}<tool_call|>'),
    (GemmaParser, "<|tool_call>call:write{path: a, count: 1}<tool_call|>"),
    (GemmaParser, '<|tool_call>call: write {<|"|>path<|"|>:<|"|>a<|"|>, count:<|"|>1<|"|>,}<tool_call|>'),
    (FunctionGemmaParser, "<start_function_call>call:write{path:<escape>a<escape>,count:<escape>1<escape>}"),
    (DSMLParser, f"\n\n<｜DSML｜function_calls>\n{DSML_BOTH}"),
    (DSMLParser, f"<｜DSML｜tool_calls>\n{DSML_BOTH}</｜DSML｜tool_calls>"),
    (DSMLParser, f"<｜DSML｜function_calls>{re.sub(' string=[^>]*', '', DSML_BOTH)}"),
    (DSMLParser, f"<｜DSML｜function_calls>{DSML_BOTH.replace('true', 'false')}"),
    (DSMLParser, f"<｜DSML｜function_calls>{DSML_BOTH.replace('false', 'true')}</｜DSML｜function_calls>"),
    (DSMLParser, f"<｜DSML｜function_calls>{DSML_CALL.format(ARGUMENTS)}</｜DSML｜function_calls>"),
    (DSMLParser, f"<｜DSML｜function_calls>{DSML_BOTH.replace('a</｜DSML｜parameter>', 'a')}</｜DSML｜function_calls>"),
    (DSMLParser, f"<｜DSML｜function_calls>{DSML_BOTH.replace('parameter>', 'parametr>')}</｜DSML｜function_calls>"),
    (DSMLParser, f"<｜DSML｜function_calls>{DSML_BOTH.replace('</｜DSML｜invoke>', '')}</｜DSML｜function_calls>"),
    (DSMLParser, f"<｜DSML｜function_calls><｜DSML｜function_calls>\n{DSML_BOTH}</｜DSML｜function_calls>"),
    (DSMLParser, DSML_BOTH),
    (DSMLParser, DSML_BOTH.replace("<｜DSML｜param", "<｜DSML｜<｜DSML｜param")),
    (DSMLToolsParser, f"<｜DSML｜tool_calls>\n{DSML_BOTH.removesuffix('</｜DSML｜invoke>')}"),
    (DSMLToolsParser, f"<｜DSML｜ calls>\n{DSML_BOTH.replace('<｜DSML｜', '<｜DSML｜ ')}</｜DSML｜ calls>"),
    (
        SeedParser,
        "<seed:tool_call><function=write><parameter=path>a</parameter><parameter=count>1</parameter></function>",
    ),
]


@pytest.mark.parametrize(("calls", "text"), SPELLINGS)
def test_what_the_model_plainly_means_is_a_call(calls: type[CallParser], text: str) -> None:
    for size in (1, 3, 7, len(text)):
        content, found = read(plan(calls), text, [size])
        assert (content.strip(), found) == ("", ONE), text


def test_a_tool_without_arguments_is_called() -> None:
    for calls, text in (
        (GemmaParser, "<|tool_call>call:look.at{}<tool_call|>"),
        (LfmParser, "<|tool_call_start|>[look.at()]<|tool_call_end|>"),
        (
            DSMLParser,
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look.at">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        ),
        (DSMLParser, '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look.at"/>\n</｜DSML｜function_calls>'),
        (ApertusParser, '<|tools_prefix|>[{"look.at": {}}]<|tools_suffix|>'),
        (CommandParser, '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "look.at"}]<|END_ACTION|>'),
        (GraniteParser, '<|tool_call|>[{"name": "look.at"}]'),
    ):
        for size in (1, 4, len(text)):
            assert read(plan(calls), text, [size]) == ("", [("look.at", {})]), text


@each
def test_calls_that_are_written_for_a_template_without_them_are_read_as_these(calls: type[CallParser]) -> None:
    made: list[Any] = [("write", {"path": "a, b", "count": 1, "lines": [1], "options": {"a": "b"}}), ("look.at", {})]
    functions = [{"name": name, "arguments": arguments} for name, arguments in made]
    for num in (1, 2):
        assert read(plan(calls), text_of_calls(calls, functions[:num]), [3]) == ("", made[:num])


def bare(calls: type[CallParser], text: str) -> str:
    """Return text without marks, which content need not have."""
    marks = sorted({*calls.marks, *calls.needed, calls.end_mark} - {"", "]"}, key=len, reverse=True)
    for mark in marks:
        text = text.replace(mark.strip(), "")
    text = re.sub(r"(?:(?:function|tool)_calls|invoke(?: name=[^>]*)?)>", "", text)
    return re.sub(r"</?｜?>?[^<>]*>", "", text).replace(">", "").strip()


@each
def test_what_is_no_call_of_an_offered_tool_is_content(calls: type[CallParser]) -> None:
    begin, end = calls.written("none")
    other = begin + (f"0{calls.behind_index('none')}" if calls.behind_index("none") else "")
    for text in (
        other + end + calls.section_end,
        calls.marks[0] + " and so on",
        calls.marks[0] + " " * MAX_HEAD_CHARS + "x" * 3000,
        "No mark of a call, [x] {y}.",
        '{"answer": 5}',
    ):
        for size in (1, 7, len(text)):
            content, found = read(plan(calls), text, [size])
            assert (bare(calls, content), found) == (bare(calls, text), []), text[:80]


@each
@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize("is_parallel", [False, True])
def test_an_enforced_call_follows_its_schema_and_is_read_as_it_was_written(
    calls: type[CallParser], is_required: bool, is_parallel: bool
) -> None:
    parameters = {
        "properties": {"s": {"type": "string"}, "x": {"type": "integer"}},
        "required": ["s", "x"],
        "additionalProperties": False,
    }
    tools: list[Any] = [{"function": {"name": "write", "parameters": parameters}}, {"function": {"name": "look.at"}}]
    grammar = grammar_of_calls(calls, tools, ["p"] * len(tools), is_parallel, is_required)
    matcher_of = GrammarCompiler(TINY, TINY.vocab_size).compile(grammar).matcher

    def allows(text: str) -> bool:
        matcher = matcher_of()
        for token in TINY.encode(text, add_special_tokens=False):
            if not matcher.mask()[token // 32] >> (token % 32) & 1:
                return False
            matcher.consume([token])
        return any(bool(matcher.mask()[eos // 32] >> (eos % 32) & 1) for eos in TINY.eos_token_ids)

    def call(name: str, **given: str) -> str:
        """Return a call, without what begins the section. Values are JSON."""
        form, (begin, end) = calls.fields, calls.written(name)
        begin = begin.removeprefix(calls.trigger + calls.section_begin) if calls.has_section else begin
        index = f"12{calls.behind_index(name)}" if calls.behind_index(name) else ""
        if form is None:
            return f"{begin}{index}{{{', '.join(f'{json.dumps(key)}: {value}' for key, value in given.items())}}}{end}"
        is_json = bool(form.separator)
        texts = [
            f"{form.begin}{key}{form.middle}{value if is_json else json.loads(value)}{form.end}"
            if value.startswith('"')
            else f"{form.begin}{key}{form.json_middle or form.middle}{value}{form.end}"
            for key, value in given.items()
        ]
        return begin + form.separator.join(texts) + end

    def section(*written: str) -> str:
        ahead, behind = calls.trigger + calls.section_begin, calls.section_end or calls.end_mark
        between = (calls.separator or "").join(written)
        return ahead + between + behind if calls.has_section else between

    write, look = call("write", s='"a, b"', x="3"), call("look.at")
    assert allows(section(write)) and allows(section(look)) and allows(section(write, look)) is is_parallel
    names = {"write": parameters, "look.at": None}
    enforced = plan(calls, is_parallel)._replace(is_enforced=True, names=names)
    expected = [("write", {"s": "a, b", "x": 3}), ("look.at", {})]
    for size in (1, 4, 999):
        content, found = read(enforced, section(write, look), [size])
        assert found == expected[: len(found)] and len(found) == (2 if is_parallel else 1) and content == ""
    for text in (
        section(call("write", s='"a"')),
        section(call("write", s='"a"', x='"three"')),
        section(call("write", s='"a"', x="1", more='"b"')),
        section(call("none")),
        calls.trigger + "x",
    ):
        assert not allows(text), text
    said = f"{calls.text_begin}Free text, <b>."
    assert allows(said) is not is_required
    assert allows("Well. " + section(write)) is not (is_required or bool(calls.text_begin))


def test_marks_are_written_as_their_tokens() -> None:
    for calls in PARSERS:
        marks = [mark for mark in calls.needed if mark in "".join((*calls.written("write"), calls.section_end))]
        ids = {mark: 40 + i for i, mark in enumerate(marks)}
        grammar = grammar_of_calls(calls, [{"function": {"name": "write"}}], ["p"], True, True)
        lark = tool_calls_lark(msgspec.json.decode(grammar.text, type=ToolCalls), ids, {})
        assert all(f"<[{token}]>" in lark for token in ids.values()), calls


@each
def test_a_long_call_is_read_in_one_pass(calls: type[CallParser]) -> None:
    made = [("write", {"path": "x" * 100_000, "count": 1})]
    assert read(plan(calls), rendered(calls, made), [2]) == ("", made)


def test_marks_around_the_text_of_command_are_no_content() -> None:
    text = "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hi <b>.<|END_RESPONSE|>"
    marks = MessageFormat.of("<|START_ACTION|><|END_THINKING|>").reasoning
    for how in (plan(CommandParser, marks=marks), plan(CommandTextParser, marks=marks)._replace(names=())):
        for shown in (text, text.replace("RESPONSE", "TEXT")):
            for size in (1, 5, len(text)):
                message = message_of(how, shown, [size])
                assert (message.content, message.reasoning, message.calls) == ("Hi <b>.", "Hm.", ())


def test_reasoning_of_each_family_is_split_from_its_calls() -> None:
    for form, opened, closed, call in (
        ("<|tool_call>call: <channel|>", "<|channel>thought\n", "\n<channel|>", rendered(GemmaParser, ONE)),
        ("<seed:tool_call><function= </seed:think>", "<seed:think>", "</seed:think>", rendered(SeedParser, ONE)),
        ("<|START_ACTION|><|END_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>", rendered(CommandParser, ONE)),
        ("<|tools_prefix|><|inner_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>", rendered(ApertusParser, ONE)),
    ):
        found = MessageFormat.of(form)
        assert found.calls is not None
        text = f"{opened}Hm, <b>.{closed}{call}"
        for size in (1, 3, len(text)):
            message = message_of(plan(found.calls, marks=found.reasoning), text, [size])
            assert (message.content, message.reasoning) == ("", "Hm, <b>.")
            assert [(call.name, json.loads(call.arguments)) for call in message.calls] == ONE


def test_quotes_that_lfm_does_not_escape_are_part_of_their_string() -> None:
    for raw in ("it's", "'tis", "a 'b' c", 'say "x"', "x = 'y' if z", "it's (so)"):
        text = f"<|tool_call_start|>[write(path='{raw}', count=1), look.at()]<|tool_call_end|>"
        for size in (1, 4, len(text)):
            _, found = read(plan(LfmParser), text, [size])
            assert found == [("write", {"path": raw, "count": 1}), ("look.at", {})], raw
    assert read(plan(LfmParser), '<|tool_call_start|>[write(path="\\"a\\"", count=1)]<|tool_call_end|>', [3])[1] == [
        ("write", {"path": '"a"', "count": 1})
    ]


def test_values_of_gemma_are_what_the_schema_says_and_what_the_model_plainly_means() -> None:
    names = {"f": {"properties": {"s": {"type": "string"}, "o": {"properties": {"z": {"type": "string"}}}, "n": {}}}}
    for written, expected in (
        ("s:5,n:5", {"s": "5", "n": 5}),
        ("s:Rome, Italy,n:None", {"s": "Rome, Italy", "n": None}),
        ("n:[a,1,true,-2.5e3,007]", {"n": ["a", 1, True, -2500.0, "007"]}),
        ("o:{z:7,y:7}", {"o": {"z": "7", "y": 7}}),
        ('s:"a\\n, b",n:{"k": ["v"]}', {"s": "a\n, b", "n": {"k": ["v"]}}),
        ('s:<|"|>a<tool_call|>, "b": {c}<|"|>', {"s": 'a<tool_call|>, "b": {c}'}),
        ("s:at 10:30, n:1", {"s": "at 10:30", "n": 1}),
    ):
        text = f"<|tool_call>call:f{{{written}}}<tool_call|>"
        for size in (1, 3, len(text)):
            how = MessagePlan(None, False, True, GemmaParser, names, True)
            assert read(how, text, [size]) == ("", [("f", expected)]), written
    for broken in ("s:", "s", "s:[1", ",", "s:1}}"):
        text = f"<|tool_call>call:write{{{broken}}}<tool_call|>"
        found = read(plan(GemmaParser), text, [5])
        assert found[1] == ([("write", {"s": 1})] if broken == "s:1}}" else []), broken
        assert bare(GemmaParser, found[0]) == ("" if found[1] else bare(GemmaParser, text)), broken


def test_a_mark_that_has_a_token_within_it_may_be_written_so() -> None:
    assert text_up_to("<a>", {"<a>": 7})[1] == "led: led_spelled | TEXT <[7]>"
    assert text_up_to("<=x>", {"=": 7, "?": 8})[1] == 'led: led_spelled | TEXT <[7]> "x>"'
    assert text_up_to("<a>", {"=": 7})[1] == "led: led_spelled"
    grammar = grammar_of_calls(DSMLParser, [{"function": {"name": "write"}}], ["p"], True, False)
    lark = tool_calls_lark(msgspec.json.decode(grammar.text, type=ToolCalls), {DSML_TOKEN: 7}, {})
    assert 'led: led_spelled | TEXT <[7]> "function_calls>"' in lark


def plan_of(source: str, tools: list[Any] | None) -> MessagePlan | None:
    template = ChatTemplate({"default": source}, {})
    tokenizer = SimpleNamespace(template_variables=template.variables)
    turns = ChatTurns(template.render, source, template.variables, MessageFormat.of(source).calls)
    model = SimpleNamespace(message_format=MessageFormat.of(source), tokenizer=tokenizer, turns=turns)
    body = BODIES.decoder(ChatBody).decode(b'{"messages": [{"role": "user", "content": "a"}]}')
    return ServedModel.message_plan(cast(ServedModel, model), body, "", tools)


def test_tools_are_refused_by_what_the_template_lacks() -> None:
    tools = [{"type": "function", "function": {"name": "write"}}]
    offered = plan_of("{{ tools }}<|START_ACTION|>", tools)
    assert offered is not None and offered.calls is CommandParser
    for source, told in (
        ("<|start_of_role|><|tool_call|>", "shows the model no tools"),
        ("{{ message.tools }}", "shows the model no tools"),
        ("{{ tools }}<call>", "unknown format"),
    ):
        with pytest.raises(InvalidRequest, match=told) as raised:
            plan_of(source, tools)
        assert raised.value.param == "tools"


def test_an_answer_without_tools_is_read_where_text_has_marks() -> None:
    bare = plan_of("<|START_ACTION|><|START_TEXT|>", None)
    assert bare is not None and read(bare, "<|START_TEXT|>Hi.<|END_TEXT|>", [3]) == ("Hi.", [])
    assert plan_of("<|start_of_role|><|tool_call|>", None) is None


def test_the_tools_of_phi_are_in_the_turn_of_its_system_and_its_calls_in_the_history() -> None:
    source = (
        "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is "
        "not none %}{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}"
        "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    template = ChatTemplate({"default": source}, {})
    stage = ChatTurns(template.render, source, template.variables, MessageFormat.of(source).calls)
    tools = [{"type": "function", "function": {"name": "write", "parameters": {}}}]
    call = {"id": "c", "type": "function", "function": {"name": "write", "arguments": {"path": "a"}}}
    turns: list[Any] = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Done."},
    ]
    told = '<|tool|>[{"name": "write", "parameters": {}}]<|/tool|><|end|>'
    rest = (
        '<|user|>Go.<|end|><|assistant|><|tool_call|>[{"name": "write", "arguments": {"path":"a"}}]<|/tool_call|>'
        "<|end|><|tool|>Done.<|end|><|assistant|>"
    )
    assert stage.prompt(turns, tools, {}) == f"<|system|>{told}{rest}"
    system: Any = {"role": "system", "content": "Help."}
    assert stage.prompt([system, *turns], tools, {}) == f"<|system|>Help.{told}{rest}"
    assert stage.prompt([system, *turns[:1]], None, {}) == "<|system|>Help.<|end|><|user|>Go.<|end|><|assistant|>"
    offered = plan_of(source, tools)
    assert offered is not None and offered.calls is PhiParser
