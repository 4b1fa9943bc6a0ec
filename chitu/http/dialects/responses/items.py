"""Items of `/v1/responses` as the messages of a chat. Pure; part of `BodyWork`.

Adjacent items of the model form one assistant message. Calls of all tools that a client runs are calls of functions,
and stay together with their outputs: an output whose call is left out is left out, too, and one without any call is
text of the user.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import CalledFunction, ChatMessage, MessageToolCall
from chitu.http.ask.chat import IMAGE_TYPES, SEEING, image_url
from chitu.http.ask.decoder import cut_character
from chitu.http.ask.images import SentImages
from chitu.http.ask.parts import (
    NOT_RUN,
    NOT_SHOWN,
    LeftOut,
    Reading,
    question_start,
    read_file,
    required_text,
    shown,
    text_of,
)
from chitu.http.ask.translation import add_text, without_orphans
from chitu.http.dialects.responses.bodies import TEXT_TYPES, InputItem, InputPart
from chitu.http.dialects.responses.custom_tools import arguments_of
from chitu.http.dialects.responses.tools import SEARCH, OfferedTools

_ENCODED = "chitu1."
_HOSTED = ("web_search", "file_search", "image_generation", "code_interpreter")
_NOT_RUN = frozenset(
    {
        *(f"{tool}_call" for tool in _HOSTED),
        *(f"{tool}_call_output" for tool in _HOSTED),
        *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "program", "program_output"),
    }
)
"""Items of what runs on other servers alone."""
_NOT_SHOWN = frozenset({"ghost_snapshot", "compaction_trigger", "configuration_update", "other"})
"""Items that are not for the model."""
_SUMMARIES = ("compaction", "compaction_summary", "context_compaction")
"""Items with a summary of earlier turns that only the server that made it can read."""
_CALL, _OUTPUT = "_call", "_output"
_OF_SEARCH = (f"{SEARCH}{_CALL}", f"{SEARCH}{_OUTPUT}")


def encoded_reasoning(text: str) -> str:
    """Return reasoning as text that clients keep and send back without looking at it. It is not encrypted: the client
    gets the same text in plain words."""
    return _ENCODED + b64encode(text.encode()).decode()


def decoded_reasoning(text: str) -> str:
    """Return the reasoning in such a text; empty if it is of another server."""
    if not text.startswith(_ENCODED):
        return ""
    try:
        return b64decode(text.removeprefix(_ENCODED), validate=True).decode()
    except ValueError:
        return ""


def messages_of(
    items: list[InputItem],
    messages: list[ChatMessage],
    tools: OfferedTools,
    warnings: list[str],
    images: SentImages | None = None,
) -> tuple[list[ChatMessage], list[str]]:
    """Return the messages with those of the items, and the place that each begins with. Those of the system in a row
    are one, since many chat templates take only one. Raise InvalidRequest for items whose meaning would be lost;
    `warnings` gets a sentence about what the prompt leaves out. `images`: see `chat_messages`."""
    reader = _ItemReader(messages, tools, question_start([_role(item) for item in items]), LeftOut(images))
    places = ["instructions"] * len(messages)
    for i, item in enumerate(items):
        reader.add(i, item)
        places += [f"input[{i}]"] * (len(reader.messages) - len(places))
    # Templates have no message of reasoning alone.
    kept = [(told, place) for told, place in zip(reader.messages, places, strict=True) if _has_answer(told)]
    for message, where in reader.reasoning:
        if not _has_answer(message):
            reader.left.add(where, "reasoning", NOT_SHOWN)
    reader.left.warn(warnings)
    return without_orphans([message for message, _ in kept]), [place for _, place in kept]


def _has_answer(message: ChatMessage) -> bool:
    return message.content is not None or bool(message.tool_calls)


def _role(item: InputItem) -> str:
    """Return the role that an item has in the order of turns."""
    kind = _type_of(item)
    if kind == "message" or (item.role and item.content):
        return item.role or ""
    if kind.endswith(_OUTPUT) or kind == "mcp_call":
        return "tool"
    return "assistant" if kind.endswith(_CALL) or kind == "reasoning" else "user" if kind == "agent_message" else ""


def _type_of(item: InputItem) -> str:
    return item.type or "message"


class _ItemReader:
    """One pass over the items."""

    def __init__(self, messages: list[ChatMessage], tools: OfferedTools, question: int, left: LeftOut) -> None:
        """`question`: the first item of those with which the user asks."""
        self.messages = messages
        self.left = left
        self.reasoning: list[tuple[ChatMessage, str]] = []
        """Messages with the places of their reasoning."""
        self._tools = tools
        self._question = question
        self._left_calls: set[str] = set()
        """Calls that the prompt leaves out."""

    def add(self, place: int, item: InputItem) -> None:
        kind, where = _type_of(item), f"input[{place}]"
        if kind == "item_reference":
            raise InvalidRequest(
                f"{where}.type: 'item_reference' is not supported: nothing is stored, so send the item", f"{where}.type"
            )
        if kind in _NOT_RUN or (kind in _OF_SEARCH and item.execution != "client"):
            self._leave_out(item, where, NOT_RUN)
        elif kind in _NOT_SHOWN:
            self._leave_out(item, where, NOT_SHOWN)
        elif kind in _SUMMARIES:
            self.messages.append(ChatMessage("user", self.left.placeholder(where, kind, "of earlier turns")))
        elif kind == "message":
            if item.role is None or item.content is None:
                raise InvalidRequest(f"{where}: a message has a role and content", where)
            self._add_message(item, item.role, place)
        elif kind == "reasoning":
            self._add_reasoning(item, where)
        elif kind == "agent_message":
            text = self._text(item.content or "", f"{where}.content")
            self.messages.append(ChatMessage("user", f"[message of {item.author or 'another agent'}]\n{text}"))
        elif kind == "mcp_call":
            self._add_call(item, where)
            self._add_output(item, where)
        elif kind.endswith(_CALL):
            self._add_call(item, where)
        elif kind.endswith(_OUTPUT):
            self._add_output(item, where)
        elif kind != "additional_tools":
            self.left.add(where, kind, NOT_SHOWN)
            if item.content:
                self._add_message(item, item.role or "user", place)

    def _leave_out(self, item: InputItem, where: str, sentence: str) -> None:
        self.left.add(where, _type_of(item), sentence)
        if item.call_id is not None:
            self._left_calls.add(item.call_id)

    def _add_message(self, item: InputItem, role: str, place: int) -> None:
        is_asked = place >= self._question and role == "user" and _type_of(item) == "message"
        where = f"input[{place}].content"
        left = self.left if role in SEEING else self.left.without_images
        text = text_of(item.content or "", _read_part, where, left, is_asked)
        if role == "assistant":
            self._of_model("message").content = text
        elif role in ("system", "developer"):
            add_text(self.messages, "system", text)
        else:
            self.messages.append(ChatMessage(role, text))

    def _add_reasoning(self, item: InputItem, where: str) -> None:
        text = text_of(item.content or "", _read_part, f"{where}.content", self.left.without_images)
        text = text or decoded_reasoning(item.encrypted_content or "")
        if not text:
            return
        own = self._of_model("reasoning")
        self.reasoning.append((own, where))
        own.reasoning_content = "\n".join([each for each in (own.reasoning_content, text) if each])

    def _add_call(self, item: InputItem, where: str) -> None:
        kind, name = _type_of(item), item.name
        if kind in ("function_call", "custom_tool_call"):
            if name is None or item.call_id is None:
                raise InvalidRequest(f"{where}: a {kind} has a name and a call_id", where)
        elif kind != "mcp_call":
            name = name or kind.removesuffix(_CALL)
        namespace = item.server_label if kind == "mcp_call" else item.namespace
        function = CalledFunction(self._tools.shown_name(namespace, name or "mcp"), _arguments(item, where))
        own = self._of_model(kind)
        own.tool_calls = [*(own.tool_calls or ()), MessageToolCall(function, _call_id(item))]

    def _add_output(self, item: InputItem, where: str) -> None:
        kind = _type_of(item)
        if item.call_id in self._left_calls:
            self.left.add(where, kind, NOT_RUN)
            return
        is_given = item.output is not None and not (item.call_id is None and item.name is None)
        if kind in ("function_call_output", "custom_tool_call_output") and not is_given:
            raise InvalidRequest(f"{where}: a {kind} has a call_id and an output", where)
        name = None if item.name is None else self._tools.shown_name(item.namespace, item.name)
        text = self._output(item, where)
        self.messages.append(ChatMessage("tool", text, name=name, tool_call_id=_call_id(item)))

    def _output(self, item: InputItem, where: str) -> str:
        given = item.output
        if given is None:
            if item.tools is not msgspec.UNSET:
                found = [name for name, tool in self._tools.by_name.items() if tool.place.startswith(f"{where}.")]
                return f"[tools that can be called now: {', '.join(found)}]" if found else "[no further tools]"
            told = item.error if item.error is not msgspec.UNSET else item.status
            return "" if told is msgspec.UNSET else _json_text(told, f"{where}.output").strip('"')
        if isinstance(given, dict):
            if isinstance(given.get("content"), str):
                return str(given["content"])
            kind = str(given.get("type", ""))
            if "image_url" not in given and "file_id" not in given:
                return _encoded(given)
            url = given.get("image_url")
            reading = Reading(None, image=url if isinstance(url, str) else None)
            return shown(kind, f"{where}.output", reading, self.left)
        return self._text(given, f"{where}.output")

    def _text(self, given: str | list[InputPart], where: str) -> str:
        return text_of(given, _read_part, where, self.left)

    def _of_model(self, kind: str) -> ChatMessage:
        """Return the assistant message that an item of this kind belongs to: the last one, or a new one."""
        last = self.messages[-1] if self.messages else None
        if (
            last is None
            or last.role != "assistant"
            or (kind == "message" and last.content is not None)
            or (kind == "reasoning" and last.tool_calls)
        ):
            last = ChatMessage("assistant")
            self.messages.append(last)
        return last


def _read_part(part: InputPart, where: str) -> Reading:
    if part.type in TEXT_TYPES:
        return required_text(part.text, where)
    if part.type == "refusal":
        return Reading(part.refusal)
    if part.type == "input_file":
        return read_file(part.file_data, part.filename)
    if part.stdout is not None or part.stderr is not None:
        outcome = {name: value for name, value in (part.outcome or {}).items() if value not in (None, "")}
        told = f"[{' '.join(map(str, outcome.values()))}]" if outcome else ""
        return Reading("\n".join([text for text in (part.stdout, part.stderr, told) if text]))
    if part.type in IMAGE_TYPES:
        return Reading(None, part.filename or "", image=image_url(part.image_url))
    if not part.type:
        raise InvalidRequest(f"{where}.type is required", f"{where}.type")
    return Reading(part.text, part.filename or "")


def _call_id(item: InputItem) -> str | None:
    """Return the id that a call has in common with its output. Local shells of older agents have only that of the
    item."""
    return item.call_id if item.call_id is not None else item.id


def _arguments(item: InputItem, where: str) -> str | None:
    """Return the arguments of a call as JSON."""
    if item.type == "custom_tool_call":
        return arguments_of(item.input or "")
    if isinstance(item.arguments, str):
        return item.arguments
    if item.arguments is not None:
        return _encoded(item.arguments)
    for name in ("action", "actions", "operation"):
        value = getattr(item, name)
        if value is not msgspec.UNSET:
            text = _json_text(value, f"{where}.{name}")
            return text if text.startswith("{") else f'{{"{name}":{text}}}'
    return arguments_of(item.input) if item.input is not None else None


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _json_text(value: msgspec.Raw, where: str) -> str:
    """Return JSON in its shortest form. Raise InvalidRequest if a character in it was cut in two."""
    try:
        return _encoded(msgspec.json.decode(value))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise cut_character(bytes(value), where) or InvalidRequest(f"{where}: {error}", where) from None
