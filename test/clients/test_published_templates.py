"""Published chat templates, as TRL and Unsloth ship them: every text of a chat is in the prompt, whatever the order and
form of its turns, and the prompt is what transformers renders of the turns in that form."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError
from transformers.utils.chat_template_utils import render_jinja_template

from chitu.errors import InvalidRequest
from chitu.http.ask.turn_forms import tools_filled
from chitu.http.ask.turns import ChatTurns
from chitu.http.messages.message_parser import MessageFormat
from chitu.tokenizer.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TOOLS = [
    {"type": "function", "function": {"name": "get_w"}},
    {
        "type": "function",
        "function": {"name": "list_d", "description": "d", "parameters": {"type": "object", "properties": {"p": {}}}},
    },
]
THOUGHT = {"reasoning_content": "thought"}


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calls(*given: tuple[str, str, Any]) -> list[dict[str, Any]]:
    return [
        {"id": own, "type": "function", "function": {"name": name, "arguments": arguments}}
        for own, name, arguments in given
    ]


F = ("toolu_01.a", "get_w", {"city": "BRAVO"})
SYSTEM, USER, MODEL = (functools.partial(turn, role) for role in ("system", "user", "assistant"))
PLAIN: dict[str, list[dict[str, Any]]] = {
    "two systems": [SYSTEM("ALPHA"), SYSTEM("BRAVO"), USER("CHARLIE")],
    "system behind a user": [SYSTEM("ALPHA"), USER("BRAVO"), SYSTEM("CHARLIE")],
    "system between": [USER("ALPHA"), MODEL("BRAVO"), SYSTEM("CHARLIE"), USER("DELTA")],
    "two users": [USER("ALPHA"), USER("BRAVO"), MODEL("CHARLIE"), USER("DELTA"), USER("ECHO")],
    "two assistants": [USER("ALPHA"), MODEL("BRAVO"), MODEL("CHARLIE"), USER("DELTA")],
    "reasoning": [USER("ALPHA"), MODEL("BRAVO", **THOUGHT), USER("CHARLIE")],
}
WITH_CALLS: dict[str, list[dict[str, Any]]] = {
    "two calls": [
        USER("ALPHA"),
        MODEL("", tool_calls=calls(F, ("call_9", "list_d", {"p": "CHARLIE"}))),
        turn("tool", "DELTA", tool_call_id="call_9"),
        turn("tool", "ECHO", tool_call_id="toolu_01.a"),
        USER("FOXTROT"),
    ],
    "content, call, system": [
        USER("ALPHA"),
        MODEL("GOLF", **THOUGHT, tool_calls=calls(F)),
        turn("tool", "CHARLIE", tool_call_id="toolu_01.a"),
        SYSTEM("DELTA"),
        MODEL("ECHO"),
        USER("FOXTROT"),
    ],
    "a call that was cut": [
        USER("ALPHA"),
        MODEL("", tool_calls=calls(("toolu_01.a", "get_w", '{"city": "BRAVO'))),
        turn("tool", "CHARLIE", tool_call_id="toolu_01.a"),
    ],
}
WORDS = ("ALPHA", "BRAVO", "CHARLIE", "DELTA", "ECHO", "FOXTROT", "GOLF")


def published(site: Path) -> dict[str, str]:
    """Return the templates by name, each text once."""
    found = {path.stem: path.read_text(encoding="utf-8") for path in sorted(site.glob("trl/chat_templates/*.jinja"))}
    for path in site.glob("unsloth/chat_templates.py"):
        found |= of_module(path)
    names = {text: name for name, text in reversed(found.items())}
    return {name: text for text, name in names.items()}


def of_module(path: Path) -> dict[str, str]:
    """Return the templates that a module assigns as sums of texts, without importing it."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and (name := ast.unparse(node.targets[0])).endswith("_template"):
            text = text_of(node.value)
            if text is not None and "ollama" not in name:
                found[f"unsloth {name}"] = text
    return found


def text_of(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [text_of(node.left), text_of(node.right)]
        return None if None in parts else "".join(part for part in parts if part is not None)
    return None


[SITE] = (
    Path(sys.prefix, "clients").glob("lib/python*/site-packages") if Path(sys.prefix, "clients").exists() else [Path()]
)
PUBLISHED = published(SITE)


@functools.cache
def stage(name: str) -> tuple[ChatTemplate, ChatTurns]:
    template = ChatTemplate({"default": PUBLISHED[name]}, SPECIAL)
    calls = MessageFormat.of(template.source).calls
    return template, ChatTurns(template.render, template.source, template.variables, calls)


def test_the_packages_have_some_ninety_templates(clients_python: Path) -> None:
    assert len(PUBLISHED) > 80


def requires_all_texts(name: str, turns: list[dict[str, Any]], has_tools: bool) -> None:
    """Require each word of the turns in the prompt, and what transformers renders of the turns in their form."""
    template, turns_of = stage(name)
    tools = TOOLS if has_tools and "tools" in template.variables else None
    text = turns_of.prompt(turns, tools, {})
    words = [word for word in WORDS if word in str(turns)]
    assert [word for word in words if word not in text] == []
    for tool in tools or ():
        assert tool["function"]["name"] in text
    reformed = turns_of.reformed(turns, bool(tools), {})
    source = PUBLISHED[name]
    given: dict[str, Any] = {"chat_template": source, "add_generation_prompt": True, **SPECIAL}
    try:
        [theirs], _ = render_jinja_template([reformed], tools=tools, **given)
    except (UndefinedError, TypeError):
        assert tools, "only what is missing of a tool"
        [theirs], _ = render_jinja_template([reformed], tools=tools_filled(tools), **given)
    assert text == theirs


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_every_text_is_in_the_prompt_whatever_the_order_of_turns(name: str) -> None:
    for turns in PLAIN.values():
        requires_all_texts(name, turns, has_tools=False)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_calls_and_results_are_in_the_prompt_or_refused_by_their_place(name: str) -> None:
    for turns in WITH_CALLS.values():
        try:
            requires_all_texts(name, turns, has_tools=True)
        except InvalidRequest as error:
            assert "tool_calls" not in PUBLISHED[name], error
            assert error.param in ("messages[1].tool_calls", "messages[2].content", "messages")


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_prompt_that_continues_ends_with_the_last_message(name: str) -> None:
    text = stage(name)[1].prompt([USER("ALPHA"), MODEL("BRAVO \n")], None, {}, continues=True)
    assert text.endswith("BRAVO \n") and "ALPHA" in text
