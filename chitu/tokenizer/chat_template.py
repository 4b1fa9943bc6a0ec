"""A checkpoint's chat template: found and rendered as transformers does, without importing it.

A template is code from the checkpoint, so it runs in jinja's immutable sandbox. Rendering is thread-safe.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chitu.errors import ConfigError, InvalidRequest

DEFAULT = "default"
TOOL_USE = "tool_use"
FAILURES = (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError)
"""What a template raises that meets data of an unexpected shape."""
CallForm = tuple[str | None, bool]
"""What stands for an empty content beside calls, and whether their arguments are passed as JSON text."""
CALL_FORMS: tuple[CallForm, ...] = (("", False), (None, False), ("", True), (None, True))
PROBE = {"id": "call00000", "type": "function", "function": {"name": "probe_name", "arguments": {"probe_key": "a"}}}
PROBE_TOOL = {"type": "function", "function": {"name": "a", "description": "a", "parameters": {"type": "object"}}}


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's part for training; it renders as its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes, unlike jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _in_form(message: Mapping[str, Any], form: CallForm) -> Mapping[str, Any]:
    """Return a message with calls in that form. Arguments that are text already stay so."""
    empty, is_text = form
    calls = [
        {**call, "function": {**call["function"], "arguments": _tojson(arguments)}}
        if is_text and not isinstance(arguments := call["function"]["arguments"], str)
        else call
        for call in message["tool_calls"]
    ]
    return {**message, "content": message.get("content") or empty, "tool_calls": calls}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def find_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return templates by name; precedence: chat_template.jinja, chat_template.json, tokenizer_config.json.

    Raises ConfigError if a file lacks its template, or is no text."""
    templates: dict[str, str] = {}
    inline = tokenizer_config.get("chat_template")
    if isinstance(inline, str):
        templates[DEFAULT] = inline
    as_json = folder / "chat_template.json"
    try:
        if isinstance(inline, list):
            templates |= {str(entry["name"]): str(entry["template"]) for entry in inline}
        if as_json.is_file():
            templates[DEFAULT] = str(json.loads(as_json.read_text(encoding="utf-8"))["chat_template"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.path: {folder} has a chat template without its text: {error!r}") from error
    as_jinja = folder / "chat_template.jinja"
    if as_jinja.is_file():
        templates = {DEFAULT: _read_text(as_jinja)}  # also for tools: it replaces the named ones, too
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    return templates


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"model.path: {path} is not UTF-8: {error}") from error


class ChatTemplate:
    """The compiled templates of one checkpoint and the special tokens that they name (`bos_token`, ...)."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in templates.items()}
            for (
                template
            ) in self._templates.values():  # jinja's own is a chain of dicts, which each render copies slowly
                template.globals = dict(template.globals)
        except TemplateError as error:
            raise ConfigError(f"the checkpoint's chat template does not compile: {error}") from error
        self.source = templates.get(TOOL_USE, templates.get(DEFAULT, ""))
        """Text of the template that shows how tools are called; empty if there is none."""
        self._special_tokens = dict(special_tokens)
        trees = map(environment.parse, templates.values())
        self.variables = frozenset(name for tree in trees for name in find_undeclared_variables(tree))
        """Names that the templates read."""
        self._reads_thinking = "message.thinking" in self.source and "reasoning_content" not in self.source
        """Reasoning of earlier turns is called `thinking`, as in gpt-oss' template."""
        self._call_form = functools.cache(self._find_call_form)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the prompt's text. Raises InvalidRequest if there is no template or it refuses the messages."""
        name = TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT
        template = self._templates.get(name)
        if template is None:
            raise InvalidRequest(
                "this model has no chat template, so it accepts prompts (/v1/completions) but no messages",
                param="messages",
            )
        given = {
            "documents": None,
            **self._special_tokens,
            **variables,
            "messages": self._with_calls(template, messages, bool(tools)),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(given)
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from error
        except FAILURES as error:  # of the request, not of the server
            raise InvalidRequest(
                f"the chat template failed on the messages: {type(error).__name__}: {error}", param="messages"
            ) from error

    def _with_calls(
        self, template: Template, messages: Sequence[Mapping[str, Any]], has_tools: bool
    ) -> list[Mapping[str, Any]]:
        """Return the messages, calls in the form in which the template writes them. Raises InvalidRequest if it writes
        calls, but would leave one out because of the content beside it."""
        found = []
        for i, message in enumerate(messages):
            if message.get("role") == "assistant" and message.get("tool_calls"):
                form = self._call_form(template, has_tools, bool(message.get("content")))
                if form is None and message.get("content") and self._call_form(template, has_tools, False) is not None:
                    where = f"messages[{i}].tool_calls"
                    raise InvalidRequest(f"{where}: the model's chat template writes no calls beside content", where)
                message = _in_form(message, form or CALL_FORMS[0])
            # gpt-oss' template refuses both thinking and content beside a call.
            if self._reads_thinking and not (message.get("tool_calls") and message.get("content")):
                message = {**message, **({"thinking": told} if (told := message.get("reasoning_content")) else {})}
            found.append(message)
        return found

    def _find_call_form(self, template: Template, has_tools: bool, has_content: bool) -> CallForm | None:
        """Return the first form in which the template writes a call with its arguments. None if it leaves calls out."""
        message = {"role": "assistant", "content": "a" if has_content else "", "tool_calls": [PROBE]}
        given = {"documents": None, **self._special_tokens, "tools": [PROBE_TOOL] if has_tools else None}
        for form in CALL_FORMS:
            try:
                text = template.render(given, messages=[{"role": "user", "content": "a"}, _in_form(message, form)])
            except (TemplateError, *FAILURES):
                continue
            if "probe_name" in text and "probe_key" in text and "'probe_key'" not in text:  # that is Python's, not JSON
                return form
        return None
