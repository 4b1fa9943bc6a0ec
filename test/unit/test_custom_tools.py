"""Calls of custom tools, and the regular expressions that they follow."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.agent_requests import PATCH, PATCH_GRAMMAR, codex_agent

from chitu.assets import TINY_MODEL_DIR
from chitu.config.schema import ModelConfig
from chitu.errors import InvalidRequest
from chitu.grammars import GrammarCompiler
from chitu.http.ask.parsed import ClusterFacts, ParsedRequest
from chitu.http.ask.reader import BodyWork, ReadBody
from chitu.http.ask.served_model import ModelLimits, ServedModel
from chitu.http.dialects.responses.custom_tools import arguments_of, input_of
from chitu.http.messages.call_formats import HermesParser
from chitu.http.table import READERS
from chitu.protocol import unpack_i32


@given(st.text())
def test_the_text_of_a_custom_call_comes_back(text: str) -> None:
    assert input_of(arguments_of(text)) == text


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
    found = BodyWork(model, False, READERS).read(ReadBody("responses", facts), json.dumps(body).encode(), lambda: None)
    assert isinstance(found, ParsedRequest)
    return found


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


def custom(syntax: str, definition: str) -> dict[str, Any]:
    format = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"input": "a", "tools": [{"type": "web_search"}, {"type": "custom", "name": "f", "format": format}]}


def test_a_call_of_a_custom_tool_follows_its_expression_also_if_the_model_chooses_to_make_it(
    model: ServedModel,
) -> None:
    made = parsed(model, custom("regex", "a|b+"))
    assert [warning.split(":")[0] for warning in made.warnings] == ["tools[0]"]
    for text in ("No call.", "Well. " + call("f", arguments_of("bb")), call("f", arguments_of("a"))):
        assert allows(model, made, text), text
    for text in (call("f", arguments_of("ab")), call("f", "{}"), call("web_search", "{}")):
        assert not allows(model, made, text), text
    forced = parsed(model, {**custom("regex", "a|b+"), "tool_choice": {"type": "custom", "name": "f"}})
    assert allows(model, forced, call("f", arguments_of("bb")))
    assert not allows(model, forced, "No call.") and not allows(model, forced, call("f", arguments_of("ab")))


def test_an_expression_that_cannot_be_compiled_is_refused_by_its_place(model: ServedModel) -> None:
    made = parsed(model, custom("regex", "a(?=b)"))
    grammar = made.samplings[0].grammar
    assert grammar is not None
    with pytest.raises(InvalidRequest) as raised:
        GrammarCompiler(model.tokenizer, model.tokenizer.vocab_size).compile(grammar)
    assert made.refusal(raised.value).param == "tools[1].format"


@pytest.mark.parametrize("definition", [PATCH_GRAMMAR, 'start: "(" start? ")"', "start: *"])
def test_a_grammar_in_lark_is_in_the_prompt_and_a_warning(model: ServedModel, definition: str) -> None:
    made = parsed(model, custom("lark", definition))
    assert made.samplings[0].grammar is None
    assert json.dumps(definition.strip())[1:-1] in model.tokenizer.decode(unpack_i32(made.prompts[0].token_ids))
    assert [warning.split(":")[0] for warning in made.warnings] == ["tools[1].format", "tools[0]"]


def test_a_chosen_tool_with_a_grammar_in_lark_is_called_with_any_text(model: ServedModel) -> None:
    made = parsed(model, codex_agent(reasoning=None))
    kinds = {name: tool.kind for name, tool in made.for_answer.tools.items()}
    assert kinds == {**dict.fromkeys(("shell", "update_plan"), "function"), "apply_patch": "custom", "note": "custom"}
    assert made.for_answer.encodes_reasoning
    assert made.samplings[0].grammar is None
    forced = parsed(model, codex_agent(reasoning=None, tool_choice={"type": "custom", "name": "apply_patch"}))
    assert [warning.split(":")[0] for warning in forced.warnings] == [
        *("input[9]", "tools[2].format", "tools[3], tools[4]"),
    ]
    for text in (PATCH, "no patch"):
        assert allows(model, forced, call("apply_patch", arguments_of(text))), text
    for text in ("No call.", call("note", arguments_of("a")), call("apply_patch", "{}")):
        assert not allows(model, forced, text), text
