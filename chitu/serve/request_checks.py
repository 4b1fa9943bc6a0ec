"""What a generation route takes of a body: refusals of what the service does not do, the shapes of prompts. Pure.

Called by `jobs.py` (and by `/tokenize`, for messages) on the loop thread. Everything that the service does not do yet
is refused by name, never ignored; a field at its neutral value is taken.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from chitu.errors import InvalidRequest
from chitu.serve.request_bodies import ChatBody, ChatMessage, CompletionBody, GenerationBody

MAX_PROMPTS = 1024
"""Prompts in one body; each is a request of its own."""


def _refuse(body: GenerationBody, name: str, neutral: tuple[Any, ...] = ()) -> None:
    value = getattr(body, name, None)
    if value is not None and value not in neutral:
        raise InvalidRequest(f"{name} is not supported yet; leave it out", name)


UNSUPPORTED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    # name, and the values at which it is taken
    ("response_format", ({"type": "text"},)),
    ("logprobs", (False,)),
    ("prompt_logprobs", (False,)),
    ("top_logprobs", (0,)),
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


_unsupported_of = attrgetter(*(name for name, _ in UNSUPPORTED), "suffix", "best_of")
_unsupported_of_chat = attrgetter(*(name for name, _ in UNSUPPORTED + UNSUPPORTED_CHAT))


def _is_plain(values: tuple[Any, ...]) -> bool:
    """None of them given: nearly every request, so it is found out with one comparison."""
    return values.count(None) == len(values)


def check_completion(body: CompletionBody) -> None:
    """Refuse what is not supported. InvalidRequest naming the field."""
    if _is_plain(_unsupported_of(body)):
        return
    for name, neutral in UNSUPPORTED:
        # 0 asks completions for the chosen token's logprob, and 0 == False.
        if getattr(body, name) is not None and not (name == "logprobs" and body.logprobs is False):
            _refuse(body, name, () if name == "logprobs" else neutral)
    _refuse(body, "suffix", ("",))
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


def completion_prompts(body: CompletionBody) -> list[str] | list[list[int]]:
    """The prompts of a body, all texts or all token ids. InvalidRequest for any other shape."""
    prompt: Any = body.prompt
    if prompt is None:
        raise InvalidRequest("prompt is required", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids, or a list of those", "prompt"
        )
    if _all_ints(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(prompt)} entries; at most {MAX_PROMPTS} are taken", "prompt")
    if all(isinstance(entry, str) for entry in prompt):
        return prompt
    if all(isinstance(entry, list) and entry and _all_ints(entry) for entry in prompt):
        return prompt
    raise InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids, or a list of those (none of them empty)",
        "prompt",
    )


def _all_ints(values: list[Any]) -> bool:
    return set(map(type, values)) == {int}


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
        messages.append({"role": message.role, "content": content})
    return messages
