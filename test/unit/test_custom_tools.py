"""Grammars in Lark as regular expressions, and calls of custom tools that follow them."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from support.agent_requests import PATCH, PATCH_GRAMMAR, codex_agent

from chitu.assets import TINY_MODEL_DIR
from chitu.config.schema import ModelConfig
from chitu.errors import InvalidRequest
from chitu.grammars import GrammarCompiler
from chitu.grammars.lark_regex import literally, regex_of_lark
from chitu.http.custom_tools import arguments_of, input_of
from chitu.http.messages.call_formats import HermesParser
from chitu.http.parse import BodyParser, ClusterFacts, ParseContext, ParsedRequest
from chitu.http.served_model import ModelLimits, ServedModel

BYTES = LLTokenizer("byte")
GRAMMARS = {
    PATCH_GRAMMAR: [
        PATCH,
        PATCH.replace("Begin Patch\n", "Begin Patch"),
        PATCH.replace("@@ ", "@@"),
        PATCH + "\n",
        PATCH[:-1],
        PATCH.replace("+", "?"),
        "",
    ],
    'start: "a"i ("b" | [c])~1..2 \nc: "0".."9"{2}  // two digits': ["ab", "Ab12", "a1", "a", "a12b", "abbb"],
    'start: WORD (_SEP WORD)* "."\n%import common (WORD, WS)\n_SEP: "," WS?': ["ab, c.", "ab,c.", "ab c.", "."],
    'start: /a.b/s | /[^\\/]+\\/x/\n  | QUOTE -> quoted\nQUOTE: "\\"" /[^"]*/ "\\""': [
        *("a\nb", "c/x", '"q ü"', "//x", '"'),
    ],
}


@pytest.mark.parametrize("grammar", GRAMMARS, ids=range(len(GRAMMARS)))
def test_the_expression_of_a_grammar_takes_what_the_grammar_takes(grammar: str) -> None:
    expression = regex_of_lark(grammar)
    # llguidance's lexer takes the longest lexeme: where lexemes overlap it refuses more. Here they do not.
    taken = 0
    for text in GRAMMARS[grammar]:
        matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        given = list(text.encode())
        is_text = matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting()
        assert (re.fullmatch(expression, text) is not None) is is_text, (text, expression)
        taken += is_text
    assert 0 < taken < len(GRAMMARS[grammar])


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('start: "(" start? ")"', "refers to itself"),
        ('start: a\na: b\nb: "x" | a', "refers to itself"),
        ("start: a", "no rule 'a'"),
        ('a: "x"', "no rule 'start'"),
        ('start: "a"\nstart: "b"', "there twice"),
        ("start: %json {}", "not supported"),
        ('start: "a"\n%ignore " "', "not supported"),
        ("start: <[7]>", "not supported"),
        ("start: X\n%import common.ESCAPED_STRING", "ESCAPED_STRING"),
        ("start: /a/x", "flags"),
        ('start: ("a"', "not closed"),
        ('start: "a" )', "out of place"),
        ("start: *", "out of place"),
        ('"a"', "belongs to no rule"),
        ("start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "too deep"),
        ("start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "xyz"', "too large"),
    ],
)
def test_what_is_no_expression_is_told(grammar: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        regex_of_lark(grammar)


@given(st.text())
def test_literal_text_is_matched_as_it_is(text: str) -> None:
    assert re.fullmatch(literally(text), text) is not None


@given(st.text())
def test_no_text_breaks_the_reader_of_grammars(text: str) -> None:
    with contextlib.suppress(ValueError):
        regex_of_lark("start: " + text)


@given(st.text())
def test_the_text_of_a_custom_call_comes_back(text: str) -> None:
    assert input_of(arguments_of(text)) == text


# ------------------------------------------------------------------------------------------------------- in the request


TEMPLATE = """{#- <tool_call> {"name": ..., "arguments": ...} </tool_call> -#}
{%- if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(TINY_MODEL_DIR, folder)
    Path(folder, "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return ServedModel.load(ModelConfig(path=str(folder), served_name="tiny"), 0)


def parsed(model: ServedModel, body: dict[str, Any]) -> ParsedRequest:
    facts = ClusterFacts(ModelLimits(1 << 20, model.tokenizer.vocab_size), "", model.tokenizer.vocab_size)
    return BodyParser(model).responses(json.dumps(body).encode(), ParseContext(facts, lambda: None))


def allows(model: ServedModel, parsed: ParsedRequest, text: str) -> bool:
    """Return whether the grammar of the request allows a whole answer."""
    tokenizer, grammar = model.tokenizer, parsed.samplings[0].grammar
    assert grammar is not None
    matcher = GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(grammar).matcher()
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not matcher.mask()[token // 32] >> (token % 32) & 1:
            return False
        matcher.consume([token])
    return any(bool(matcher.mask()[eos // 32] >> (eos % 32) & 1) for eos in tokenizer.eos_token_ids)


def call(name: str, arguments: str) -> str:
    begin, end = HermesParser.written(name)
    return f"{begin}{arguments}{end}"


def test_a_call_of_a_custom_tool_follows_its_grammar_also_if_the_model_chooses_to_make_it(model: ServedModel) -> None:
    made = parsed(model, codex_agent(reasoning=None))
    assert made.custom_tools == {"apply_patch", "note"} and made.encodes_reasoning
    assert [warning.split(":")[0] for warning in made.warnings] == ["input[9]", "tools[3], tools[4]"]
    for text in (
        "No call.",
        "Well. " + call("apply_patch", arguments_of(PATCH)),
        call("shell", '{"command": ["ls"]}'),
        call("note", arguments_of('any "text"')),
    ):
        assert allows(model, made, text), text
    wrong = PATCH.replace("*** End Patch", "*** The End")
    for text in (call("apply_patch", arguments_of(wrong)), call("apply_patch", "{}"), call("local_shell", "{}")):
        assert not allows(model, made, text), text
    forced = parsed(model, codex_agent(reasoning=None, tool_choice={"type": "custom", "name": "apply_patch"}))
    assert allows(model, forced, call("apply_patch", arguments_of(PATCH)))
    assert not allows(model, forced, "No call.") and not allows(model, forced, call("note", arguments_of("a")))


def test_a_regular_expression_holds_and_a_grammar_that_cannot_be_enforced_is_a_warning(model: ServedModel) -> None:
    def custom(syntax: str, definition: str) -> dict[str, Any]:
        format = {"type": "grammar", "syntax": syntax, "definition": definition}
        return {"input": "a", "tools": [{"type": "web_search"}, {"type": "custom", "name": "f", "format": format}]}

    made = parsed(model, custom("regex", "a|b+"))
    assert allows(model, made, call("f", arguments_of("bb"))) and not allows(model, made, call("f", arguments_of("ab")))
    made = parsed(model, custom("lark", 'start: "(" start? ")"'))
    assert made.samplings[0].grammar is None
    assert made.warnings[0].startswith("tools[1].format: calls need not follow the grammar: the rule 'start'")
    made = parsed(model, custom("regex", "a(?=b)"))
    grammar = made.samplings[0].grammar
    assert grammar is not None
    with pytest.raises(InvalidRequest) as raised:
        GrammarCompiler(model.tokenizer, model.tokenizer.vocab_size).compile(grammar)
    assert made.refusal(raised.value).param == "tools[1].format"
