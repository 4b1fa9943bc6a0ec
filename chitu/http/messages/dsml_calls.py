"""Calls in DSML, as DeepSeek-V3.2 and V4 write them: `<｜DSML｜function_calls>`, and within it for each call
`<｜DSML｜invoke name="f">`, `<｜DSML｜parameter name="a" string="true">` with a value, and the end tags. Pure.

A value is raw text if it is a string, and JSON if it is not; `string` says which. A model that contradicts the tool's
schema, or leaves `string` out, is read as the schema says. No value has the mark `｜DSML｜` in it, so that one ends a
value, and a tag that was left out is of no matter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from chitu.grammars.tool_calls import types_of
from chitu.http.messages.call_objects import Call, Piece, arguments_of, json_text
from chitu.http.messages.call_parser import MAX_HEAD_CHARS, CallParser
from chitu.http.messages.tagged_calls import value_of
from chitu.protocol import ToolFields

DSML = "｜DSML｜"
_OPEN, _CLOSE = f"<{DSML}", f"</{DSML}"
_SECTIONS = r" ?(?:function_calls|tool_calls|calls)>"
_HEAD = re.compile(
    rf'(?:{_SECTIONS}\s*(?:{_OPEN})?| ?invoke\s+name="?\s*{_OPEN}|{_OPEN})* ?invoke\s+name="?([^">\n]+)"?\s*(/?)>'
)
_NO_HEAD = re.compile(rf"(?:{_SECTIONS}\s*|{_OPEN})*(?!{_OPEN[0]}| ?invoke| ?function_| ?tool_| ?calls)[^\s<]{{9}}")
"""What begins so is no head."""
_ARGUMENT = re.compile(
    rf'(?:<?{DSML})+ ?parameter\s+name="?([^"<>｜\n]+)"?(?:\s+string="?(true|false)(?:"|(?=\s*>"))?)?\s*'
    rf'(?:>(?!")|(?<=")>|>")(?:\s*"\s+string="(?:true|false)">)*((?:(?![</]{{0,2}}{DSML}).)*)'
    rf"(?:[</]{{0,2}}{DSML}(?! ?(?:parameter|invoke)\s+name) ?\w*>?\s*)*",
    re.DOTALL,
)
_END = re.compile(rf"<?/?{DSML} ?invoke>|(?=<?{DSML} ?invoke\s)|(?=<?/?{DSML}{_SECTIONS})")
_END_CHARS = 32
"""More than a tag that ends a call has."""
_CLOSED = re.compile(rf"<?/{DSML} ?\w|/?<?{DSML} ?parameter>")
_NO_CLOSE = re.compile(r"(?:<[^\s<>]{0,24}>?)?\s*\Z")
"""What there may be instead of an end tag."""
_TAGS = re.compile(rf"(?:</?{DSML}[^>\n]*>?\s*)+")
_TYPES = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
"""Type of a JSON value that begins so; others are numbers."""


class DSMLParser(CallParser):
    """DeepSeek-V3.2."""

    marks: ClassVar[tuple[str, ...]] = (_OPEN, f"\n{_OPEN}", f"\n\n{_OPEN}", _CLOSE, f"\n{_CLOSE}")
    hidden: ClassVar[tuple[str, ...]] = (DSML,)
    needed: ClassVar[tuple[str, ...]] = (DSML,)
    trigger: ClassVar[str] = f"{_OPEN}function_calls>"
    separator: ClassVar[str | None] = ""
    has_section: ClassVar[bool] = True
    section_begin: ClassVar[str] = "\n"
    section_end: ClassVar[str] = f"{_CLOSE}function_calls>"
    fields: ClassVar[ToolFields | None] = ToolFields(
        f'{_OPEN}parameter name="', '" string="true">', f"{_CLOSE}parameter>\n", json_middle='" string="false">'
    )

    def __init__(self, names: Collection[str], is_parallel: bool, is_enforced: bool = False) -> None:
        """`names`: names of the tools, each with its parameters."""
        super().__init__(names, is_parallel, is_enforced)
        self._schemas: Mapping[str, Any] = names if isinstance(names, Mapping) else {}
        self._last = ""
        """The newest characters of the arguments, in which the end of the call may have begun."""

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f'{cls.trigger}\n{_OPEN}invoke name="{name}">\n', f"{_CLOSE}invoke>\n"

    def finish(self, is_whole: bool = True) -> list[Piece]:
        self._pieces = []
        if is_whole and self._state == self._in_arguments:  # the model left the end out
            arguments = self._arguments("".join(self._raw[2:]))
            if arguments is not None:
                self._emit(Call(self._name, arguments))
                return self._pieces
        if self._state == self._in_close:
            self._held = ""
        return super().finish(is_whole)

    def _begin(self, mark: str, text: str) -> str:
        if mark.endswith(_CLOSE):  # of a section whose calls were read, or of none
            self._state = self._in_close
            return text
        self._last = ""
        return super()._begin(mark, text)

    def _refuse(self, rest: str) -> str:
        self._raw = [_TAGS.sub("", "".join(self._raw))]
        return super()._refuse(rest)

    # ------------------------------------------- states: each takes text, which is not empty, and returns what is left

    def _in_head(self, text: str) -> str:
        head = text[: MAX_HEAD_CHARS + 1]
        found = _HEAD.match(head)
        if found is not None and found[1] in self._names:
            self._name = found[1]
            if found[2]:
                self._emit(Call(self._name, "{}"))
                return text[found.end() :]
            self._raw.append(found[0])
            self._state = self._in_arguments
            return text[found.end() :]
        if found is None and len(text) <= MAX_HEAD_CHARS and not _NO_HEAD.match(text):
            self._held = text
            return ""
        return self._refuse(text)

    def _in_arguments(self, text: str) -> str:
        """Read up to the end of a call."""
        self._raw.append(text)
        window, before = self._last + text, len(self._last)
        found = _END.search(window)
        if found is None:
            self._last = window[-_END_CHARS:]
            return ""
        whole = "".join(self._raw[2:])
        start = len(whole) - len(text) - before
        if not found[0] and not whole[: start + found.start()].strip():  # the head of a call twice
            return self._begin("", whole[start + found.end() :].removeprefix(_OPEN))
        arguments = self._arguments(whole[: start + found.start()])
        if arguments is None:
            self._raw = [*self._raw[:2], whole[: start + found.end()]]
            return self._refuse(whole[start + found.end() :])
        self._emit(Call(self._name, arguments))
        return whole[start + found.end() :]

    def _between(self, text: str) -> str:
        """Read what follows a call: the next one, or tags that end it."""
        rest = text.lstrip()
        if rest.startswith(_OPEN):
            return self._begin("", rest[len(_OPEN) :])
        if rest.startswith(_CLOSE):
            self._state = self._in_close
            return rest
        if _OPEN.startswith(rest) or _CLOSE.startswith(rest):
            self._held = rest
            return ""
        self._state = self._in_text
        return rest

    def _in_close(self, text: str) -> str:
        """Leave out an end tag."""
        at = min((at for at in (text.find(">") + 1, text.find("\n")) if at > 0), default=0)
        if at == 0 and len(text) <= MAX_HEAD_CHARS:
            self._held = text
            return ""
        self._state = self._between if self.num_calls else self._in_text
        return text[at:]

    def _arguments(self, text: str) -> str | None:
        """Return the arguments as a JSON object; None if the text is not all of them."""
        text = _TAGS.sub("", text.strip(), count=1) if text.lstrip().startswith(_CLOSE) else text.strip()
        if text.startswith("{"):  # an object instead of parameters
            return arguments_of(text)
        parameters = self._schemas.get(self._name) or {}
        known = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schemas = known if isinstance(known, Mapping) else {}
        values: dict[str, str] = {}
        at = 0
        while at < len(text):
            found = _ARGUMENT.match(text, at)
            if found is None:
                return None
            name, is_text, value = found.groups()
            closed = _CLOSED.match(text, found.end(3)) is not None
            value = value if closed else _NO_CLOSE.sub("", value, count=1)
            values[name] = _typed(value, is_text, schemas.get(name), parameters)
            at = found.end()
        return f"{{{', '.join(f'{json_text(name)}: {value}' for name, value in values.items())}}}"


class DSMLToolsParser(DSMLParser):
    """DeepSeek-V4."""

    trigger: ClassVar[str] = f"{_OPEN}tool_calls>"
    section_end: ClassVar[str] = f"{_CLOSE}tool_calls>"


def _typed(text: str, is_text: str | None, schema: Any, root: Any) -> str:
    """Return a value as JSON. `is_text`: what the model says of it, `true` or `false`."""
    types = types_of(schema, root)
    if is_text == "true" and (not types or "string" in types):
        return json_text(text)
    if is_text == "false":
        value = value_of(text, {"type": "object"}, None)  # as JSON if it is some
        kind = _TYPES.get(value[0], "number")
        if not types or kind in types or (kind == "number" and "integer" in types):
            return value
    return value_of(text, schema, root)
