"""Tools of `/v1/responses` as functions of a chat, and their calls by the names that clients know. Pure.

A namespace (the Codex CLI has one for each MCP server) groups functions. Chat templates know none, so the name of such
a function begins with its namespace in the prompt, and a call of it has `namespace` and `name` in answers and
histories.
Tools also come with items: those that an agent adds later, or that a search of its own has found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import AllowedTool, AllowedTools, ChosenFunction, ChosenTool, Tool, ToolFunction
from chitu.http.ask.parts import NOT_RUN, LeftOut
from chitu.http.dialects.responses.bodies import (
    CustomFormat,
    InputItem,
    NamespacedTool,
    ResponsesBody,
    ResponsesTool,
    ResponsesToolChoice,
)
from chitu.http.dialects.responses.custom_tools import custom_function

SEARCH = "tool_search"
"""Type of a tool by which a client finds further tools, and the name of its function."""
ITEMS_WITH_TOOLS = ("additional_tools", "tool_search_output")
_FUNCTIONS = ("function", "custom")
_ODD = re.compile(r"[^a-zA-Z0-9_-]")


class GivenTool(Protocol):
    @property
    def type(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def description(self) -> str | None: ...
    @property
    def parameters(self) -> dict[str, Any] | None: ...
    @property
    def strict(self) -> bool | None: ...
    @property
    def format(self) -> CustomFormat | None: ...


class LoadedTool(msgspec.Struct):
    """Tool of an item; fields that a tool of the body has beside these have no effect."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    execution: str | None = None
    tools: list[LoadedTool] | None = None


_LOADED = msgspec.json.Decoder(list[LoadedTool])


class CalledTool(NamedTuple):
    """Tool by what calls of it have in answers."""

    kind: str
    """`function`, `custom` or `tool_search`."""
    name: str
    namespace: str


class OfferedTool(NamedTuple):
    place: str
    tool: GivenTool
    called: CalledTool
    about: str
    """Description of the namespace, at its first tool."""


class OfferedTools:
    """The functions that the prompt shows."""

    def __init__(self, body: ResponsesBody, left: LeftOut) -> None:
        """`left` gets the tools that the prompt leaves out. Raise InvalidRequest if two have the same name."""
        by_key: dict[tuple[str, str], OfferedTool] = {}
        for offered in _offered(((f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ())), left):
            key = (offered.called.namespace, offered.called.name)
            if key in by_key:
                where = offered.place
                raise InvalidRequest(f"{where}.name: {key[1]!r} is there twice", f"{where}.name")
            by_key[key] = offered
        for offered in _offered(_of_items(body.input), left):
            by_key.setdefault((offered.called.namespace, offered.called.name), offered)
        self._shown = _shown_names([*by_key])
        self.by_name = {self._shown[key]: offered for key, offered in by_key.items()}
        """Tools by their names in the prompt."""

    def shown_name(self, namespace: str | None, name: str) -> str:
        """Return the name of a function in the prompt, also of one that is no longer offered."""
        return self._shown.get((namespace or "", name)) or _joined(namespace or "", name)

    def functions(self, warnings: list[str]) -> tuple[list[Tool], list[str], dict[str, dict[str, Any]]]:
        """Return the tools of the chat, the places of those that take text, and the parameters that calls of some
        follow in place of those that the prompt shows."""
        tools, custom_places, enforced = [], [], {}
        for name, (place, tool, called, about) in self.by_name.items():
            if called.kind == "custom":
                function, followed = custom_function(tool.description, tool.format, name, place, warnings)
                custom_places.append(place)
                if followed is not None:
                    enforced[name] = followed
            else:
                function = ToolFunction(name, tool.description, tool.parameters, tool.strict)
            if about:
                function.description = f"[{called.namespace}: {about}]\n{function.description or ''}".rstrip()
            tools.append(Tool("function", function))
        return tools, custom_places, enforced

    def choice(self, given: ResponsesToolChoice | str | None, left: LeftOut) -> ChosenTool | str | None:
        """Return the choice of tools as a chat has it. `left` gets the allowed tools that the prompt leaves out."""
        if not isinstance(given, ResponsesToolChoice):
            return given
        if given.type != "allowed_tools":
            return ChosenTool("function", self._chosen(given.namespace, given.name, "tool_choice"))
        allowed = []
        for i, tool in enumerate(given.tools or ()):
            where = f"tool_choice.tools[{i}]"
            if tool.type in _FUNCTIONS:
                allowed.append(AllowedTool(self._chosen(tool.namespace, tool.name, where)))
            else:
                left.add(where, tool.type, NOT_RUN)
        if not allowed:
            raise InvalidRequest("tool_choice.tools must hold a tool that the client runs", "tool_choice.tools")
        return ChosenTool("allowed_tools", allowed_tools=AllowedTools(allowed, given.mode or "auto"))

    def _chosen(self, namespace: str | None, name: str | None, where: str) -> ChosenFunction:
        if name is None:
            raise InvalidRequest(f"{where}.name is required", f"{where}.name")
        return ChosenFunction(self.chosen_name(namespace, name, where))

    def chosen_name(self, namespace: str | None, name: str, where: str) -> str:
        """Return the name in the prompt of a function that a choice names: by its namespace, by its name alone, or as
        the prompt has it. Raise InvalidRequest if several namespaces have one of this name."""
        if namespace is not None or name in self.by_name:
            return self.shown_name(namespace, name)
        named = [key for key in self._shown if key[1] == name]
        if len(named) > 1:
            told = ", ".join([repr(key[0]) for key in named])
            raise InvalidRequest(f"{where}: {name!r} is in the namespaces {told}; give {where}.namespace", where)
        return self._shown[named[0]] if named else name


def _offered(given: Iterable[tuple[str, ResponsesTool | LoadedTool]], left: LeftOut) -> Iterator[OfferedTool]:
    """Yield the tools that the prompt shows, also those in namespaces. `left` gets the others."""
    for place, tool in given:
        if tool.type == "namespace":
            namespace, about = _name_of(tool, place), tool.description or ""
            inside: Sequence[NamespacedTool | LoadedTool] = tool.tools or ()
            for j, inner in enumerate(inside):
                where = f"{place}.tools[{j}]"
                if inner.type in _FUNCTIONS:
                    called = CalledTool(inner.type, _name_of(inner, where), namespace)
                    yield OfferedTool(where, inner, called, about)
                    about = ""
                else:
                    left.add(where, inner.type, NOT_RUN)
        elif tool.type in _FUNCTIONS:
            yield OfferedTool(place, tool, CalledTool(tool.type, _name_of(tool, place), ""), "")
        elif tool.type == SEARCH and tool.execution == "client":
            yield OfferedTool(place, tool, CalledTool(SEARCH, SEARCH, ""), "")
        else:
            left.add(place, tool.type, NOT_RUN)


def _name_of(tool: GivenTool, where: str) -> str:
    if not tool.name:
        raise InvalidRequest(f"{where}.name is required", f"{where}.name")
    return tool.name


def _of_items(items: str | list[InputItem] | None) -> Iterator[tuple[str, LoadedTool]]:
    """Yield the tools of items with their places."""
    for i, item in enumerate(items if isinstance(items, list) else ()):
        if item.type in ITEMS_WITH_TOOLS and item.tools is not msgspec.UNSET:
            where = f"input[{i}].tools"
            try:
                loaded = _LOADED.decode(item.tools)
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                raise InvalidRequest(f"{where}: {error}", where) from None
            yield from ((f"{where}[{j}]", tool) for j, tool in enumerate(loaded))


def _shown_names(keys: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the names in the prompt by namespace and name. Each is there once."""
    shown = {key: key[1] for key in keys if not key[0]}
    taken = {*shown.values()}
    for key in keys:
        if key not in shown:
            name, number = _joined(*key), 1
            while name in taken:
                number += 1
                name = f"{_joined(*key)}_{number}"
            shown[key] = name
            taken.add(name)
    return shown


def _joined(namespace: str, name: str) -> str:
    if not namespace:
        return name
    mark = "" if namespace.endswith("_") or name.startswith("_") else "__"
    return _ODD.sub("_", f"{namespace}{mark}{name}")
