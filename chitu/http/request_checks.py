"""What types alone do not say of a body: the shapes of prompts, what messages may hold. Pure.

Called by `jobs.py` (and by `/tokenize`, for messages), on the loop or in a thread.
"""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.request_bodies import (
    MAX_PROMPTS,
    ChatMessage,
    CompletionBody,
)


def check_completion(body: CompletionBody) -> None:
    """InvalidRequest for fields that do not go together."""
    if body.best_of is None:
        return
    if body.best_of < (body.n or 1):
        raise InvalidRequest(f"best_of ({body.best_of}) must not be below n ({body.n or 1})", "best_of")
    if body.best_of > (body.n or 1):
        raise InvalidRequest("best_of above n is not supported yet; use n", "best_of")


# -------------------------------------------------------------------------------------------------------------- prompts


_SHAPE = "prompt must be a string, a list of strings, a list of token ids, or a list of those (none of them empty)"
_Several = msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)
_Ids = Annotated[list[int], msgspec.Meta(min_length=1)]
_text = msgspec.json.Decoder(str)
_texts: msgspec.json.Decoder[list[str]] = msgspec.json.Decoder(Annotated[list[str], _Several])
_ids: msgspec.json.Decoder[list[int]] = msgspec.json.Decoder(_Ids)
_ids_of_several: msgspec.json.Decoder[list[list[int]]] = msgspec.json.Decoder(Annotated[list[_Ids], _Several])
_TEXTS = re.compile(rb'\[\s*"')
_LISTS = re.compile(rb"\[\s*\[")


def completion_prompts(body: CompletionBody) -> list[str] | list[list[int]]:
    """The prompts of a body, all texts or all token ids. InvalidRequest for any other shape."""
    given = bytes(body.prompt)
    if given in (b"", b"null"):
        raise InvalidRequest("prompt is required", "prompt")
    try:
        if given[:1] != b"[":
            return [_text.decode(given)]
        if _TEXTS.match(given):
            return _texts.decode(given)
        if not _LISTS.match(given):
            return [_ids.decode(given)]
        # Before they are made: a list costs many times the three bytes that it takes here.
        if given.count(b"[") <= MAX_PROMPTS + 1:
            return _ids_of_several.decode(given)
    except msgspec.ValidationError as error:
        if "length <=" not in str(error):
            raise InvalidRequest(_SHAPE, "prompt") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"prompt is not valid JSON: {error}", "prompt") from error
    raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} prompts are taken", "prompt")


ROLES = {"developer": "system"}
"""OpenAI's newer name of the role, and the one that chat templates know."""


_EMPTY_ONLY = ("tool_calls", "tool_call_id", "function_call", "audio", "reasoning", "reasoning_content")
_EMPTY = (b"null", b'""', b"[]", b"{}")
_empty_only_of = attrgetter(*_EMPTY_ONLY)


def chat_messages(given: list[ChatMessage] | None) -> list[dict[str, str]]:
    """Messages as the chat template takes them. InvalidRequest for what is not text."""
    if not given:
        raise InvalidRequest("messages must hold at least one message", "messages")
    messages = []
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        values = _empty_only_of(message)
        if values.count(msgspec.UNSET) < len(values):
            for name, value in zip(_EMPTY_ONLY, values, strict=True):
                if value is not msgspec.UNSET and bytes(value) not in _EMPTY:
                    raise InvalidRequest(f"{where}.{name} is not supported yet", f"{where}.{name}")
        content = message.content
        if content is None:
            raise InvalidRequest(f"{where}.content is required", f"{where}.content")
        if not isinstance(content, str):
            for j, part in enumerate(content):
                if part.type != "text" or part.text is None:
                    raise InvalidRequest(
                        f"{where}.content[{j}]: only parts of type 'text' are supported, not {part.type!r}",
                        f"{where}.content[{j}]",
                    )
            content = "".join(part.text or "" for part in content)
        message_of_template = {"role": ROLES.get(message.role, message.role), "content": content}
        if message.name is not None:
            message_of_template["name"] = message.name
        messages.append(message_of_template)
    return messages


SET_OTHERWISE = ("messages", "tools", "add_generation_prompt")
"""Variables of chat templates that `chat_template_kwargs` may not give."""


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs` as the template takes them. InvalidRequest for a name that is not theirs to set."""
    for name in SET_OTHERWISE:
        if given and name in given:
            raise InvalidRequest(
                f"chat_template_kwargs.{name} is made of other fields; leave it out", f"chat_template_kwargs.{name}"
            )
    return given or {}
