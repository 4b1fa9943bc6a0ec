"""Calls in DSML, as DeepSeek-V3.2 and V4 write them: `<｜DSML｜function_calls>`, and within it for each call
`<｜DSML｜invoke name="f">`, `<｜DSML｜parameter name="a" string="true">` with a value, and the end tags. Pure.

A value is raw text if it is a string, and JSON if it is not. `string` says which. A model that contradicts the tool's
schema, or leaves `string` out, is read as the schema says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from chitu.grammars.tool_calls import types_of
from chitu.http.messages.call_objects import Call, arguments_of, json_text
from chitu.http.messages.tagged_calls import TaggedParser, value_of
from chitu.protocol import ToolFields

DSML = "｜DSML｜"
_TAG, _END = rf"<{DSML} ?", rf"</{DSML} ?"
_NEXT = rf'(?={_TAG}parameter\s+name="|\Z)'
_TYPES = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
"""Type of a JSON value that begins so; others are numbers."""


class DSMLParser(TaggedParser):
    """DeepSeek-V3.2."""

    section: ClassVar[str] = "function_calls"
    sections: ClassVar[tuple[str, ...]] = ("function_calls", "tool_calls", " calls")
    """What versions name a section; a model imitates all."""
    marks: ClassVar[tuple[str, ...]] = tuple(
        f"{space}<{DSML}{section}>" for section in sections for space in ("", "\n", "\n\n")
    )
    needed: ClassVar[tuple[str, ...]] = (DSML, *marks[::3])
    trigger: ClassVar[str] = marks[0]
    separator: ClassVar[str | None] = ""
    end_mark: ClassVar[str] = f"</{DSML}function_calls>"
    has_section: ClassVar[bool] = True
    section_begin: ClassVar[str] = "\n"
    section_end: ClassVar[str] = end_mark
    head_begins: ClassVar[str] = f"<{DSML}"
    head: ClassVar[re.Pattern[str]] = re.compile(rf'\s*{_TAG}invoke\s+name="?([^">\n]+)"?\s*/?>')
    call_ends: ClassVar[tuple[str, ...]] = tuple(f"</{DSML}{section}>" for section in sections)
    argument: ClassVar[re.Pattern[str]] = re.compile(
        rf'{_TAG}parameter\s+name="([^"]+)"(?:\s+string="(true|false)")?\s*>((?:(?!{_TAG}parameter\s).)*?)'
        rf"(?:{_END}parameter>\s*{_NEXT}|\s*{_NEXT})",
        re.DOTALL,
    )
    close: ClassVar[str] = f"</{DSML}invoke>"
    fields: ClassVar[ToolFields] = ToolFields(
        f'<{DSML}parameter name="', '" string="true">', f"</{DSML}parameter>\n", json_middle='" string="false">'
    )

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f'{cls.trigger}\n<{DSML}invoke name="{name}">\n', f"{cls.close}\n"

    def _behind_head(self, head: str, rest: str) -> str:
        if head.endswith("/>"):
            self._emit(Call(self._name, "{}"))
            return rest
        return super()._behind_head(head, rest)

    def _arguments(self, text: str) -> str | None:
        """Return the arguments as a JSON object; None if the text is not all of them."""
        if text.lstrip().startswith("{"):  # an object instead of parameters
            return arguments_of(text.strip())
        parameters = self._schemas.get(self._name) or {}
        known = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schemas = known if isinstance(known, Mapping) else {}
        values: dict[str, str] = {}
        at = len(text) - len(text.lstrip())
        while at < len(text):
            found = self.argument.match(text, at)
            if found is None:
                return None
            name, is_text, value = found.groups()
            values[name] = _typed(value, is_text, schemas.get(name), parameters)
            at = found.end()
        return f"{{{', '.join(f'{json_text(name)}: {value}' for name, value in values.items())}}}"


class DSMLToolsParser(DSMLParser):
    """DeepSeek-V4."""

    trigger: ClassVar[str] = f"<{DSML}tool_calls>"
    end_mark: ClassVar[str] = f"</{DSML}tool_calls>"
    section_end: ClassVar[str] = end_mark


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
