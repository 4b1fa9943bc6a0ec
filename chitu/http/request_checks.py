"""What a generation route takes of a body: refusals of what the service does not do, the shapes of prompts. Pure.

Called by `jobs.py` (and by `/tokenize`, for messages), on the loop or in a thread. Everything that the service does not
do yet is refused by name, never ignored; a field at its neutral value is taken.
"""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.request_bodies import (
    MAX_PROMPTS,
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
)


def _refuse(body: GenerationBody, name: str, neutral: tuple[Any, ...] = ()) -> None:
    value = getattr(body, name, None)
    if value is not None and value not in neutral:
        raise InvalidRequest(f"{name} is not supported yet; leave it out", name)


UNSUPPORTED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    # name, and the values at which it is taken
    ("response_format", ({"type": "text"},)),
    ("prompt_logprobs", (False,)),
    ("guided_json", ()),
    ("guided_regex", ()),
    ("guided_choice", ()),
    ("guided_grammar", ()),
    ("structured_outputs", ()),
    ("regex", ()),
    ("json_schema", ()),
    ("ebnf", ()),
    ("use_beam_search", (False,)),
    ("tools", ([],)),
    ("tool_choice", ("none", "auto")),
    ("functions", ([],)),
    ("function_call", ("none", "auto")),
)
UNSUPPORTED_CHAT: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("modalities", (["text"],)),
    ("audio", ()),
    ("prediction", ()),
    ("reasoning_effort", ("none",)),
    ("verbosity", ("medium",)),
    ("web_search_options", ()),
    ("store", (False,)),
    ("chat_template", ()),
    ("continue_final_message", (False,)),
    ("add_generation_prompt", (True,)),
)


_unsupported_of = attrgetter(*(name for name, _ in UNSUPPORTED), "top_logprobs", "suffix", "best_of", "logprobs")
_unsupported_of_chat = attrgetter(*(name for name, _ in UNSUPPORTED + UNSUPPORTED_CHAT))


def _is_plain(values: tuple[Any, ...]) -> bool:
    """None of them given: nearly every request, so it is found out with one comparison."""
    return values.count(None) == len(values)


def check_completion(body: CompletionBody) -> None:
    """Refuse what is not supported. InvalidRequest naming the field."""
    if _is_plain(_unsupported_of(body)):
        return
    for name, neutral in UNSUPPORTED:
        if getattr(body, name) is not None:
            _refuse(body, name, neutral)
    _refuse(body, "top_logprobs", (0,))
    _refuse(body, "suffix", ("",))
    if body.echo and body.logprobs is not None and body.logprobs is not False:
        raise InvalidRequest("echo with logprobs is not supported yet; leave one out", "echo")
    if body.best_of is not None and body.best_of not in (1, body.n or 1):
        raise InvalidRequest("best_of above n is not supported yet; use n", "best_of")
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise InvalidRequest(f"best_of ({body.best_of}) must not be below n ({body.n})", "best_of")


def check_chat(body: ChatBody) -> None:
    """The same for chat."""
    if _is_plain(_unsupported_of_chat(body)):
        return
    for name, neutral in UNSUPPORTED:
        if getattr(body, name) is not None:
            _refuse(body, name, neutral)
    for name, neutral in UNSUPPORTED_CHAT:
        if getattr(body, name) is not None:
            _refuse(body, name, neutral)


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


def chat_messages(given: list[ChatMessage] | None) -> list[dict[str, str]]:
    """Messages as the chat template takes them. InvalidRequest for what is not text."""
    if not given:
        raise InvalidRequest("messages must hold at least one message", "messages")
    messages = []
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        for name in ("tool_calls", "function_call", "audio"):
            if getattr(message, name):
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
        messages.append({"role": ROLES.get(message.role, message.role), "content": content})
    return messages
