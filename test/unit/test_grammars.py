"""Grammars of every kind: what they allow, what of them is refused, and what they may cost."""

from __future__ import annotations

import json
import random
import re
import threading
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from chitu.assets import TINY_MODEL_DIR
from chitu.errors import Capacity, InvalidRequest
from chitu.grammars import CompiledGrammar, GrammarCompiler, GrammarStore, Matcher, store
from chitu.grammars.compiler import MASK_GRACE_S, MASK_S_A_TOKEN, MAX_GBNF_CHARS
from chitu.protocol import MAX_GRAMMAR_CHARS, Grammar, ToolCall, ToolCalls
from chitu.tokenizer import Tokenizer

TINY = Tokenizer.load(TINY_MODEL_DIR)
COMPILER = GrammarCompiler(TINY, TINY.vocab_size)
DEADLINE_S = 60.0


def may_come(matcher: Matcher) -> list[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return [int(token) for token in np.nonzero(bits)[0]]


def drawn(compiled: CompiledGrammar, seed: int, eos: tuple[int, ...], most: int = 3000) -> list[int]:
    """Any of the tokens that may come, until it ends."""
    matcher, rng, tokens = compiled.matcher(), random.Random(seed), []
    while len(tokens) < most:
        token = rng.choice(may_come(matcher))
        matcher.consume([token])
        if token in eos:
            return tokens
        tokens.append(token)
    raise AssertionError(f"no end after {most} tokens: {TINY.decode(tokens)[-100:]!r}")


def text_of(grammar: Grammar, seed: int) -> str:
    return TINY.decode(drawn(COMPILER.compile(grammar), seed, TINY.eos_token_ids), skip_special_tokens=False)


def allows(compiled: CompiledGrammar, text: str) -> bool:
    """As a whole answer."""
    matcher = compiled.matcher()
    for token in TINY.encode(text, add_special_tokens=False):
        if token not in may_come(matcher):
            return False
        matcher.consume([token])
    return set(TINY.eos_token_ids) <= set(may_come(matcher))


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
    """As Llama 2."""
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
        special_token_ids={},
    )
    compiler = GrammarCompiler(cast(Tokenizer, tokenizer), tokenizer.vocab_size + 40)
    tokens = drawn(compiler.compile(Grammar("regex", "(漢|ü好)ab a")), seed, (eos,))
    assert backend.decode(tokens) in ("漢ab a", "ü好ab a") and max(tokens) < tokenizer.vocab_size


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", "{", "EOF"),
        ("json_schema", "true", "object"),
        ("json_schema", '{"not": {}}', "not"),
        ("json_schema", '{"type": "object", "dependentRequired": {}, "if": {}}', "dependentRequired"),
        ("json_schema", '{"type": "string", "not": {}, "x-guidance": {"lenient": true}}', "not"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "not present"),
        ("json_schema", '{"$ref": "#"}', "json_schema"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable"),
        ("regex", "(", "invalid regex"),
        ("regex", "a(?=b)", "invalid regex"),
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
    bearable, costly = matcher_at(MASK_S_A_TOKEN), matcher_at(MASK_S_A_TOKEN * 2)
    num_bearable = int(MASK_GRACE_S / MASK_S_A_TOKEN)
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
    # required, parallel -> of each text whether it may be the whole answer
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


def test_a_call_that_does_not_begin_with_the_trigger_is_refused() -> None:
    for calls in (ToolCalls((ToolCall("<b>", msgspec.Raw(b"{}")),), "<a>"), ToolCalls((), "<a>")):
        with pytest.raises(InvalidRequest, match="tool_calls"):
            COMPILER.compile(Grammar("tool_calls", msgspec.json.encode(calls).decode()))


def test_a_store_compiles_in_threads_keeps_the_newest_and_finds_what_somebody_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "MAX_KEPT", 2)
    grammars = GrammarStore(lambda: COMPILER)
    first, bad = Grammar("regex", "a"), Grammar("regex", "(")
    assert grammars.find(first) is None
    wait([grammars.submit(first), grammars.submit(bad)], DEADLINE_S)
    held = grammars.find(first)
    assert isinstance(held, CompiledGrammar) and isinstance(grammars.find(bad), InvalidRequest)
    for i in range(2):
        wait([grammars.submit(Grammar("regex", f"a{i}"))], DEADLINE_S)
    assert grammars.find(first) is held and grammars.compiled(first) is held
    assert grammars.find(bad) is None
    del held
    assert grammars.find(first) is None
    with pytest.raises(InvalidRequest):
        grammars.compiled(bad)
    grammars.close()


def test_a_fault_of_the_compiler_costs_its_request_alone_and_too_many_that_wait_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_go = threading.Event()

    class Panic(BaseException):
        """As those of Rust."""

    def compile_(grammar: Grammar) -> CompiledGrammar:
        may_go.wait(DEADLINE_S)
        raise Panic

    monkeypatch.setattr(store, "MAX_WAITING", 3)
    grammars = GrammarStore(lambda: cast(GrammarCompiler, SimpleNamespace(compile=compile_)))
    asked = [Grammar("regex", str(i)) for i in range(3)]
    futures = [grammars.submit(grammar) for grammar in asked]
    assert grammars.submit(asked[0]) is futures[0], "one that is being compiled is waited for"
    with pytest.raises(Capacity):
        grammars.submit(Grammar("regex", "one more"))
    may_go.set()
    wait(futures, DEADLINE_S)
    assert all(isinstance(grammars.find(grammar), InvalidRequest) for grammar in asked)
    grammars.submit(Grammar("regex", "one more"))
    grammars.close()
