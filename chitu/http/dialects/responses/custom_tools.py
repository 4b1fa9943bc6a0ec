"""Tools of `/v1/responses` that take text instead of JSON (type `custom`). Pure.

Chat templates know functions alone, so the model sees a function whose one argument is the text. Its calls become calls
of the custom tool on their way out, and back on their way in. If the tool has a regular expression, calls follow it as
a pattern of that argument, as those of a strict function do. A grammar in Lark is in the prompt alone: llguidance
follows no grammar within a string of JSON.
"""

from __future__ import annotations

from typing import Any

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import ToolFunction
from chitu.http.dialects.responses.bodies import CustomFormat

ARGUMENT = "input"
"""Name of the one argument."""
_SYNTAXES = {"lark": "this Lark grammar", "regex": "this regular expression"}


def custom_function(
    description: str | None, format: CustomFormat | None, name: str, where: str, warnings: list[str]
) -> tuple[ToolFunction, dict[str, Any] | None]:
    """Return the function of this name that stands for a custom tool, and the parameters that its calls follow; None if
    the text may be any. Raise InvalidRequest for a wrong format; a grammar in Lark is a warning."""
    text = description or ""
    pattern = ""
    if format is not None and format.type == "grammar":
        syntax, definition = _required(format, where)
        text += f"\n\nThe text in `{ARGUMENT}` follows {_SYNTAXES[syntax]}:\n{definition}"
        if syntax == "regex":
            pattern = f"(?:{definition})"
        else:
            warnings.append(f"{where}.format: calls need not follow the Lark grammar: only a regex is enforced")
    elif format is not None and format.type != "text":
        raise InvalidRequest(f"{where}.format.type must be text or grammar", f"{where}.format.type")
    argument = {"type": "string", "description": "The text that the tool takes"}
    parameters: dict[str, Any] = {"type": "object", "properties": {ARGUMENT: argument}, "required": [ARGUMENT]}
    parameters["additionalProperties"] = False
    function = ToolFunction(name, text.strip(), parameters, True if pattern else None)
    enforced = {"type": "string", "pattern": f"^{pattern}$"}
    return function, {**parameters, "properties": {ARGUMENT: enforced}} if pattern else None


def _required(given: CustomFormat, where: str) -> tuple[str, str]:
    if given.syntax not in _SYNTAXES:
        raise InvalidRequest(f"{where}.format.syntax must be lark or regex", f"{where}.format.syntax")
    if not given.definition:
        raise InvalidRequest(f"{where}.format.definition is required", f"{where}.format.definition")
    return given.syntax, given.definition


def arguments_of(text: str) -> str:
    """Return the JSON arguments with which a call of the custom tool, with this text, is a call of a function."""
    return msgspec.json.encode({ARGUMENT: text}).decode()


def input_of(arguments: str) -> str:
    """Return the text of a call; if its arguments have another form, all of them."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
    text = value.get(ARGUMENT) if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments
