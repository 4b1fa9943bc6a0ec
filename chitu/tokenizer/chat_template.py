"""A checkpoint's chat template: found and rendered as transformers does, without importing it.

A template is code from the checkpoint, so it runs in jinja's immutable sandbox. Rendering is thread-safe.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chitu.errors import ConfigError, InvalidRequest

DEFAULT = "default"
TOOL_USE = "tool_use"
FAILURES = (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError)
"""What a template raises that meets data of an unexpected shape."""


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


def has_chat_template(folder: Path) -> bool:
    """Return whether a model's folder has a template that can be read."""
    try:
        file = folder / "tokenizer_config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return DEFAULT in find_templates(folder, config if isinstance(config, dict) else {})
    except (OSError, ValueError, ConfigError):
        return False


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
            "messages": messages,
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
