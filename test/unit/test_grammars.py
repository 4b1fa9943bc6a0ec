"""Grammars of every kind: what they allow, which grammars are refused, and what they may cost."""

from __future__ import annotations

import json
import random
import re
import threading
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from grammar_texts import COMPILER, FORMATS, MARKED, MARKED_COMPILER, TINY, allows, drawn, is_answer, may_come, text_of
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from chitu.errors import Capacity, InvalidRequest
from chitu.grammars import CompiledGrammar, GrammarCompiler, GrammarStore, Matcher
from chitu.grammars.compiler import MASK_GRACE_S, MASK_S_PER_TOKEN, MAX_GBNF_CHARS
from chitu.grammars.store import MAX_KEPT, MAX_WAITING
from chitu.http.messages.call_formats import grammar_of_calls
from chitu.http.messages.call_parser import CallParser
from chitu.http.messages.dsml_calls import DSMLParser
from chitu.http.messages.harmony import HarmonyParser
from chitu.http.messages.message_parser import HARMONY
from chitu.http.messages.tagged_calls import CompactGLMParser, GLMParser
from chitu.protocol import MAX_GRAMMAR_CHARS, Grammar, Reasoning, ToolCall, ToolCalls
from chitu.tokenizer import Tokenizer

DEADLINE_S = 60.0


@pytest.mark.parametrize("seed", range(5))
def test_what_may_come_is_what_the_grammar_says_down_to_odd_characters(seed: int) -> None:
    choices = ['a"b\\', "x\n/y", "\U0001f600ü", "\x00\x1f\x7f", " ", "[a]+"]
    assert text_of(Grammar("choice", json.dumps(choices)), seed) in choices
    assert re.fullmatch(r"[a-c]{2,4}\d/[^x]", text_of(Grammar("regex", r"[a-c]{2,4}\d/[^x]"), seed))
    assert re.fullmatch(r"x([0-9]+,)*", text_of(Grammar("lark", 'start: "x" y*\ny: /[0-9]+/ ","\n'), seed))
    assert re.fullmatch(r"a[0-9]+z", text_of(Grammar("lark", 'root ::= "a" [0-9]+ "z"'), seed))
    schema = {"type": "array", "items": {"enum": ["é", None, 1.5]}, "minItems": 2, "maxItems": 3}
    value = json.loads(text_of(Grammar("json_schema", json.dumps(schema)), seed))
    assert 2 <= len(value) <= 3 and all(item in ["é", None, 1.5] for item in value)


def byte_fallback() -> Backend:
    """Return a tokenizer like Llama 2's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "好"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def test_any_json_object_is_one_and_nothing_else_is() -> None:
    compiled = COMPILER.compile(Grammar("json_object"))
    for text in ("{}", '{"a": [1, {"b": null}],\n    "c": "é"}'):
        assert allows(compiled, text), text
    for text in ("[1]", '{"a": 1', "{a: 1}", '{"a": 1}}', ""):
        assert not allows(compiled, text), text


@pytest.mark.parametrize("seed", range(3))
def test_a_tokenizer_with_byte_fallback_spells_what_it_has_no_token_for(seed: int) -> None:
    backend = byte_fallback()
    eos = backend.token_to_id("</s>")
    tokenizer = SimpleNamespace(
        eos_token_ids=(eos,),
        vocab_size=backend.get_vocab_size(),
        to_json=backend.to_str,
        added_token_ids={},
    )
    compiler = GrammarCompiler(cast(Tokenizer, tokenizer), tokenizer.vocab_size + 40)
    tokens = drawn(compiler.compile(Grammar("regex", "(漢|ü好)ab a")), seed, (eos,))
    assert backend.decode(tokens) in ("漢ab a", "ü好ab a") and max(tokens) < tokenizer.vocab_size


def test_an_eos_that_the_tokenizer_lacks_does_not_matter() -> None:
    odd = (TINY.vocab_size + 3, *TINY.eos_token_ids, TINY.vocab_size + 99)
    facts = {"vocab_size": TINY.vocab_size, "to_json": TINY.to_json, "added_token_ids": TINY.added_token_ids}
    tokenizer = cast(Tokenizer, SimpleNamespace(eos_token_ids=odd, **facts))
    matcher = GrammarCompiler(tokenizer, TINY.vocab_size + 40).compile(Grammar("regex", "a")).matcher()
    matcher.consume(TINY.encode("a", add_special_tokens=False))
    assert set(may_come(matcher)) == set(TINY.eos_token_ids)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", "{", "Expecting"),
        ("json_schema", "true", "object"),
        ("json_schema", '{"not": {}}', "not"),
        ("json_schema", '{"type": "object", "dependentRequired": {"a": ["b"]}, "if": {}}', "dependentRequired"),
        ("json_schema", '{"type": "string", "not": {}, "x-guidance": {"lenient": true}}', "not"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "not part of"),
        ("json_schema", '{"$ref": "#"}', "json_schema"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable"),
        ("json_schema", '{"type": "string", "pattern": "^(?!a)b"}', r"look-around.* not supported: .*\^\(\?!a\)b"),
        ("regex", "(", "unclosed group: .*invalid regex"),
        ("regex", "a(?=b)", "look-around.* not supported: .*invalid regex"),
        ("regex", "a\n(b", "unclosed group: "),
        ("choice", "[1]", "Expected"),
        ("lark", "foo", "Expected"),
        ("lark", "start: start start", "lark"),
        ("lark", "root ::= (", "Expected"),
        ("lark", 'root ::= "a"' + " " * MAX_GBNF_CHARS, "at most"),
        ("tool_calls", "{}", "calls"),
    ],
)
def test_what_is_no_grammar_or_not_supported_is_refused_with_its_reason(kind: Any, text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        COMPILER.compile(Grammar(kind, text))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type":"object","properties":{"a":' * 1500),
        ("json_schema", "[" * MAX_GRAMMAR_CHARS),
        ("json_schema", '{"type":"object","properties":{"a":' * 100 + "{}" + "}}" * 100),
        (
            "json_schema",
            json.dumps({"allOf": [{"anyOf": [{"pattern": f"a{i}"}, {"pattern": f"b{i}"}]} for i in range(20)]}),
        ),
        ("json_schema", json.dumps({"allOf": [{"$ref": "#"}, {"type": "object"}]})),
        ("regex", "(" * 10_000 + "a" + ")" * 10_000),
        ("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
        ("lark", "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(60)) + 'R60: "x"\n'),
    ],
)
def test_a_grammar_that_grows_beyond_its_text_is_refused(kind: Any, text: str) -> None:
    with pytest.raises(InvalidRequest):
        COMPILER.compile(Grammar(kind, text))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type":"array","items":{"type":"integer"},"minItems":1000000000}'),
        ("json_schema", '{"type":"string","maxLength":1000000000}'),
        ("json_schema", '{"type":"object","properties":{"l":{"$ref":"#"},"r":{"$ref":"#"}}}'),
        ("regex", "(a|b)*a(a|b){18}"),
        ("regex", "((a{1,1000}){1,1000}){1,1000}"),
        ("regex", r"(\p{L}{1,100}|\p{N}{1,100}|\w+\d+){1,60}"),
        ("lark", 'start: (("a"{0,1000}){0,1000}){0,1000}\n'),
    ],
)
def test_a_grammar_of_huge_extent_is_followed_or_ends_its_own_request(kind: Any, text: str) -> None:
    matcher, rng = COMPILER.compile(Grammar(kind, text)).matcher(), random.Random(1)
    try:
        for _ in range(200):
            matcher.consume([rng.choice(may_come(matcher))])
    except InvalidRequest as error:
        assert "cannot be followed" in error.message


def test_classes_of_a_regular_expression_are_ascii_as_in_a_schemas_pattern() -> None:
    for regex, yes, no in (
        (r"^\d{2}$", "12", "\u0661\u0662"),
        (r"[\d_]+", "1_", "\u0661"),
        (r"[^\d]", "\u0661", "1"),
        (r"[\D]", "\u0661", "1"),
        (r"\w+", "aZ_9", "é"),
        (r"\W", "é", "a"),
        (r"\s\S", " é", "\u00a0é"),
        (r"a\\d", "a\\d", "a\\1"),
        (r"\p{L}", "é", "1"),
    ):
        compiled = COMPILER.compile(Grammar("regex", regex))
        assert allows(compiled, yes) and not allows(compiled, no), regex
        if not regex.startswith((r"[\d", r"\p", r"\s", r"a\\")):
            of_schema = COMPILER.compile(
                Grammar("json_schema", json.dumps({"type": "string", "pattern": f"^({regex})$"}))
            )
            assert allows(of_schema, f'"{yes}"') and not allows(of_schema, f'"{no}"'), regex


def test_masks_that_cost_more_than_they_may_end_the_request() -> None:
    compiled = COMPILER.compile(Grammar("regex", "a+"))
    now_s = [0.0]

    def matcher_at(seconds_a_mask: float) -> Matcher:
        def clock() -> float:
            now_s[0] += seconds_a_mask
            return now_s[0]

        matcher = Matcher(compiled.matcher()._matcher, TINY.vocab_size, clock)
        return matcher

    token = TINY.encode("a", add_special_tokens=False)
    bearable, costly = matcher_at(MASK_S_PER_TOKEN), matcher_at(MASK_S_PER_TOKEN * 2)
    num_bearable = int(MASK_GRACE_S / MASK_S_PER_TOKEN)
    for _ in range(3 * num_bearable):
        bearable.mask()
        bearable.consume(token)
    for _ in range(num_bearable - 2):
        costly.mask()
        costly.consume(token)
    with pytest.raises(InvalidRequest, match="processor time"):
        for _ in range(4):
            costly.mask()
            costly.consume(token)


def test_a_token_that_may_not_come_ends_the_request_and_an_end_is_followed_by_ends_alone() -> None:
    compiled = COMPILER.compile(Grammar("regex", "ab"))
    matcher = compiled.matcher()
    matcher.consume(TINY.encode("x", add_special_tokens=False))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="cannot be followed"):
            matcher.mask()
    ended = compiled.matcher()
    ended.consume([*TINY.encode("ab", add_special_tokens=False), TINY.eos_token_ids[0]])
    assert set(may_come(ended)) == set(TINY.eos_token_ids)


def test_texts_with_bounds_do_not_wear_a_grammar_out() -> None:
    """The engine has a state for each number of characters, and its states are those of all answers."""
    compiled = COMPILER.compile(Grammar("json_schema", json.dumps({"type": "string", "maxLength": 2000})))
    for word in ("The quick brown fox ", "jumps over\\n", "a lazy dog. ", "ü"):
        for size in (900, 2000):
            text = (word * size)[:size].rstrip("\\")
            assert allows(compiled, f'"{text}"'), (word, size)
    assert not allows(compiled, f'"{"x" * 2001}"')
    matcher = compiled.matcher()
    matcher.consume(TINY.encode('"a" and more', add_special_tokens=False))
    with pytest.raises(InvalidRequest, match="cannot be followed"):
        matcher.mask()


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize("trigger", ["<tool_call>", "<|im_start|>"], ids=["text", "special token"])
def test_a_tool_call_follows_its_schema_wherever_the_trigger_stands(trigger: str) -> None:
    def compiled(is_required: bool, is_parallel: bool) -> CompiledGrammar:
        schema = msgspec.Raw(json.dumps(SCHEMA).encode())
        calls = tuple(
            ToolCall(f'{trigger}\n{{"name": "{name}", "arguments": ', schema, "}\n</tool_call>") for name in "fg"
        )
        text = msgspec.json.encode(ToolCalls(calls, trigger, is_required, is_parallel, "\n")).decode()
        return COMPILER.compile(Grammar("tool_calls", text))

    f, g = (f'{trigger}\n{{"name": "{name}", "arguments": {{"x": 3}}}}\n</tool_call>' for name in "fg")
    unknown, wrong = f.replace('"f"', '"h"'), f.replace("3", '"3"')
    # (required, parallel): for each text, whether it may be the whole answer
    texts = [f, f + "\n" + g, "a < b", "a" + g, f + "b", f + g, trigger, "a" + unknown, wrong, ""]
    right = {
        (False, True): [True, True, True, True, True, True, False, False, False, True],
        (False, False): [True, False, True, True, False, False, False, False, False, True],
        (True, True): [True, True, False, False, False, False, False, False, False, False],
        (True, False): [True, False, False, False, False, False, False, False, False, False],
    }
    for (is_required, is_parallel), allowed in right.items():
        one = compiled(is_required, is_parallel)
        assert [allows(one, text) for text in texts] == allowed, (is_required, is_parallel)


@pytest.mark.parametrize("is_required", [False, True])
def test_arguments_of_a_call_have_the_options_of_every_schema(is_required: bool) -> None:
    def compiled(schema: Any) -> CompiledGrammar:
        calls = (ToolCall("<a>", msgspec.Raw(json.dumps(schema).encode())),)
        return COMPILER.compile(
            Grammar("tool_calls", msgspec.json.encode(ToolCalls(calls, "<a>", is_required)).decode())
        )

    spaced = compiled({**SCHEMA, "x-guidance": {"whitespace_flexible": False}})
    for space in ("", " ", "\n" + " " * 20):
        assert allows(spaced, f'<a>{{{space}"x":{space}3}}'), space
    for space in ("  ", "\n" + " " * 21, "\n\n"):
        assert not allows(spaced, f'<a>{{{space}"x": 3}}'), "a model that likes spaces would go on with them to the end"
    with pytest.raises(InvalidRequest, match="not"):
        compiled({**SCHEMA, "not": {}, "x-guidance": {"lenient": True}})


CALLS = ToolCalls((ToolCall('<tool_call>{"x": ', msgspec.Raw(json.dumps(SCHEMA).encode()), "}"),), "<tool_call>", True)


@pytest.mark.parametrize("is_spelled", [False, True])
@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (Grammar("json_object"), '{"a": [1]}', "[1]"),
        (Grammar("json_schema", json.dumps(SCHEMA)), '{"x": 3}', '{"x": "3"}'),
        (Grammar("regex", "a{2,3}"), "aa", "aaaa"),
        (Grammar("choice", '["yes","no"]'), "no", "nay"),
        (Grammar("lark", 'start: w\nw: /[ab]+/ "!"'), "ab!", "ab"),
        (Grammar("lark", 'root ::= "a" [0-9]+'), "a1", "a"),
        (Grammar("tool_calls", msgspec.json.encode(CALLS).decode()), '<tool_call>{"x": {"x": 3}}', '{"x": 3}'),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else None,
)
def test_a_grammar_begins_behind_a_reasoning_in_which_anything_may_stand(
    grammar: Grammar, right: str, wrong: str, is_spelled: bool
) -> None:
    thoughts = (
        "",
        "Hm.\n",
        wrong,
        right,
        "<think><tool_call>a<tool_call>",
        "ü < </ </thin </think",
        'if "\\x": {',
        "\n" * 30,
    )
    of = {is_open: Reasoning("<think>", "</think>", is_open) for is_open in (False, True)}
    asks_token = grammar.kind == "tool_calls" and is_spelled  # an enforced call begins with the token

    def allows_behind(reasoning: Reasoning | None, text: str) -> bool:
        return is_answer(msgspec.structs.replace(grammar, reasoning=reasoning), text, is_spelled)

    for thought in thoughts:
        for reasoning, opened in ((of[True], ""), (of[False], "<think>")):
            if is_spelled and opened:
                continue  # a model does not spell the mark that begins its reasoning either
            for gap in ("", "\n", "\n\n"):
                behind = f"{opened}{thought}</think>{gap}"
                assert allows_behind(reasoning, behind + right) is not asks_token, behind
                assert not allows_behind(reasoning, behind + wrong), behind
            for never in (f"{opened}{thought}", f"{opened}{thought}</think>\n\n\n{right}"):
                assert not allows_behind(reasoning, never), never
    assert allows_behind(None, right) is allows_behind(of[False], right) is not asks_token
    for behind in (None, of[False]):
        assert not allows_behind(behind, f"Hm.</think>{right}"), "it began with neither"
    assert not allows_behind(None, f"<think></think>{right}") and not allows_behind(of[True], right)


def test_a_reasoning_may_go_on_for_ever_within_the_bounds_and_has_no_end_of_the_answer_in_it() -> None:
    grammar = Grammar("json_object", reasoning=Reasoning("<think>", "</think>", True))
    matcher, rng = MARKED_COMPILER.compile(grammar).matcher(), random.Random(1)
    letters = [MARKED.token_to_id(letter) for letter in "abc<>/{}"]
    for _ in range(4000):
        allowed = may_come(matcher)
        assert MARKED.token_to_id("<eos>") not in allowed and MARKED.token_to_id("</think>") in allowed
        matcher.consume([rng.choice(letters)])


@pytest.mark.parametrize("is_spelled", [False, True])
def test_free_text_takes_a_trigger_that_is_an_added_token(is_spelled: bool) -> None:
    free = msgspec.structs.replace(CALLS, is_required=False)
    grammar = Grammar("tool_calls", msgspec.json.encode(free).decode())
    call = '<tool_call>{"x": {"x": 3}}'
    for text in ("", "a < b", call, f"Well: {call}", f"{call} and {call}."):
        assert is_answer(grammar, text, is_spelled), text
    for text in ("<tool_call>", call.replace("3", '"3"'), f"Well: {call[:-3]}"):
        assert not is_answer(grammar, text, is_spelled), text


@pytest.mark.parametrize("calls", FORMATS)
@pytest.mark.parametrize("is_required", [False, True])
def test_calls_with_many_marks_are_enforced_as_the_tokens_of_these(calls: type[CallParser], is_required: bool) -> None:
    grammar = grammar_of_calls(calls, [{"function": {"name": "f", "parameters": SCHEMA}}], ["p"], True, is_required)
    begin, end = calls.written("f")
    begin += f"0{calls.behind_index('f')}" if calls.behind_index("f") else ""
    end += (calls.section_end or calls.end_mark) if calls.has_section else ""
    form = calls.fields
    right, wrong = (
        f'{{"x": {value}}}' if form is None else f"{form.begin}x{form.json_middle or form.middle}{value}{form.end}"
        for value in ("3", '"3"')
    )
    assert is_answer(grammar, f"{begin}{right}{end}", False)
    assert not is_answer(grammar, f"{begin}{wrong}{end}", False)
    assert is_answer(grammar, f"{calls.text_begin}Free.", False) is not is_required
    if calls is HarmonyParser:
        thought = f"{HARMONY.open}I do.<|channel|>{HARMONY.close}{HARMONY.behind}"
        reasoning = Reasoning(*HARMONY[:2], False, HARMONY.behind)
        behind = msgspec.structs.replace(grammar, reasoning=reasoning)
        for ahead in ("", thought):
            assert is_answer(behind, f'{ahead}{begin}{{"x": 3}}{end}', False)
            assert is_answer(behind, f"{ahead}{calls.text_begin}Free.", False) is not is_required
        schema = Grammar("json_schema", json.dumps(SCHEMA), msgspec.structs.replace(reasoning, head=HARMONY.head))
        assert is_answer(schema, f'{thought}{HARMONY.head}{{"x": 3}}', False)
        assert not is_answer(schema, f'{thought}{{"x": 3}}', False)


TEXTS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "any < text", ""),
    ({"pattern": "^[0-9]{3}$"}, "123", "12"),
    ({"pattern": "a", "maxLength": 9}, "cab", "cb"),
    ({"format": "date"}, "2024-02-29", "2024-02-30"),
    ({"minLength": 2}, "ab", "a"),
    ({"minLength": 2, "maxLength": 4}, "abc", "abcde"),
    ({"maxLength": 900}, "ab" * 300, "x" * 901),
    ({"minLength": 2, "maxLength": 900}, "ab" * 300, "x"),
    ({"enum": ["yes", "no"]}, "no", "nay"),
    ({"enum": ["yes", "no"], "pattern": "y"}, "yes", "no"),
]


@pytest.mark.parametrize("is_spelled", [False, True])
@pytest.mark.parametrize("calls", [GLMParser, CompactGLMParser, DSMLParser])
def test_texts_of_every_kind_end_with_tags_that_are_tokens_or_spelled(
    calls: type[CallParser], is_spelled: bool
) -> None:
    form, (begin, end) = calls.fields, calls.written("f")
    assert form is not None
    end += calls.section_end
    for schema, right, wrong in TEXTS:
        parameters = {"type": "object", "properties": {"x": {"type": "string", **schema}}, "required": ["x"]}
        tools = [{"function": {"name": "f", "parameters": parameters}}]
        grammar = grammar_of_calls(calls, tools, ["p"], False, False)
        for text, is_right in ((right, True), (wrong, not schema)):
            call = f"{begin}{form.begin}x{form.middle}{text}{form.end}{end}"
            assert is_answer(grammar, call, is_spelled) is is_right, (schema, text)


@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize(("begin", "end"), [("<tool_call>f[ARGS]", ""), ("<tool_call>\n", "\n</tool_call>")])
def test_marks_in_a_call_are_the_tokens_that_models_write_or_spelled(begin: str, end: str, is_required: bool) -> None:
    calls = (ToolCall(begin, msgspec.Raw(json.dumps(SCHEMA).encode()), end),)
    made = ToolCalls(calls, "<tool_call>", is_required, True, "")
    grammar, call = Grammar("tool_calls", msgspec.json.encode(made).decode()), f'{begin}{{"x": 3}}{end}'
    for is_spelled in (False, True):
        for text in (call, call + call):
            # an enforced call begins with the token
            assert is_answer(grammar, text, is_spelled) is not (is_required and is_spelled), text
        for text in (call.replace("3", '"3"'), call + begin, call.removesuffix(end or "}")):
            assert not is_answer(grammar, text, is_spelled), text


def test_calls_that_stand_at_the_beginning_or_nowhere_leave_other_text_alone() -> None:
    call = ToolCall('{"name": "f", "parameters": ', msgspec.Raw(json.dumps(SCHEMA).encode()), "}")
    f = '{"name": "f", "parameters": {"x": 3}}'
    wrong = f.replace("3", '"3"')
    for is_parallel in (True, False):
        record = ToolCalls((call,), "{", False, is_parallel, "; ", is_leading=True)
        grammar = Grammar("tool_calls", msgspec.json.encode(record).decode())
        for text in ("", "no", " \n", f"Like {wrong}", "a {b} c", f):
            assert is_answer(grammar, text, False), text
        for text in ("{", wrong, f" {wrong}", '{"a": 1}', f + " said"):
            assert not is_answer(grammar, text, False), text
        assert is_answer(grammar, f"{f}; {f}", False) is is_parallel


def test_a_call_that_does_not_begin_with_the_trigger_is_refused() -> None:
    for calls in (ToolCalls((ToolCall("<b>", msgspec.Raw(b"{}")),), "<a>"), ToolCalls((), "<a>")):
        with pytest.raises(InvalidRequest, match="tool_calls"):
            COMPILER.compile(Grammar("tool_calls", msgspec.json.encode(calls).decode()))


def test_a_store_compiles_in_threads_keeps_the_newest_and_finds_what_somebody_holds() -> None:
    grammars = GrammarStore(lambda: COMPILER)
    first, bad = Grammar("regex", "a"), Grammar("regex", "(")
    assert grammars.find(first) is None
    wait([grammars.submit(first), grammars.submit(bad)], DEADLINE_S)
    held = grammars.find(first)
    assert isinstance(held, CompiledGrammar) and isinstance(grammars.find(bad), InvalidRequest)
    for i in range(MAX_KEPT):
        wait([grammars.submit(Grammar("regex", f"a{i}"))], DEADLINE_S)
    assert grammars.find(first) is held and grammars.compiled(first) is held
    assert grammars.find(bad) is None
    del held
    assert grammars.find(first) is None
    with pytest.raises(InvalidRequest):
        grammars.compiled(bad)
    grammars.close()


def test_a_fault_of_the_compiler_costs_its_request_alone_and_too_many_that_wait_are_refused() -> None:
    may_go = threading.Event()

    class Panic(BaseException):
        """A panic of Rust code, as the compiler raises it."""

    def compile_(grammar: Grammar) -> CompiledGrammar:
        may_go.wait(DEADLINE_S)
        raise Panic

    grammars = GrammarStore(lambda: cast(GrammarCompiler, SimpleNamespace(compile=compile_)))
    asked = [Grammar("regex", str(i)) for i in range(MAX_WAITING)]
    futures = [grammars.submit(grammar) for grammar in asked]
    assert grammars.submit(asked[0]) is futures[0], "one that is being compiled is waited for"
    with pytest.raises(Capacity):
        grammars.submit(Grammar("regex", "one more"))
    may_go.set()
    wait(futures, DEADLINE_S)
    assert all(isinstance(future.result(), InvalidRequest) for future in futures)
    grammars.submit(Grammar("regex", "one more"))
    grammars.close()
