"""From a body's bytes to a `Job`: prompts as token ids, each with its sampling, and what to do with the tokens.

Called by the generation routes on the loop thread (a long prompt is tokenised in a thread, which is awaited). Every
error is one for the client, raised before anything of the request was sent on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from chitu.errors import InvalidRequest, NoInstance
from chitu.messages import SamplingParams
from chitu.net.http import Scope, header
from chitu.pd_request_router import PDRequestRouter
from chitu.serve.request_bodies import GenerationBody, chat_decoder, completion_decoder, decode_body
from chitu.serve.request_checks import MAX_PROMPTS, chat_messages, check_chat, check_completion, completion_prompts
from chitu.serve.sampling_fields import (
    DEFAULT_COMPLETION_TOKENS,
    OutputOptions,
    output_options,
    sampling_params,
    wanted_tokens,
)
from chitu.serve.served_model import ServedModel, output_limit


@dataclass(slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None
    """None where the client gave token ids."""


@dataclass(slots=True)
class Job:
    """A parsed request: prompts times n choices."""

    prompts: list[Prompt]
    samplings: list[SamplingParams]
    """One per prompt."""
    options: OutputOptions
    timeout_s: float | None = None
    """The client's own."""


def client_timeout_s(scope: Scope) -> float | None:
    """The header X-Request-Timeout: how many seconds the client waits for the whole answer. InvalidRequest where it is
    no positive number."""
    given = header(scope, b"x-request-timeout")
    if given is None:
        return None
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        text = given[:40].decode("latin-1")
        raise InvalidRequest(f"X-Request-Timeout: {text!r} is no positive number of seconds", "X-Request-Timeout")
    return timeout_s


class JobParser:
    """For one model; the limits are those of the instances that serve at the moment."""

    def __init__(self, model: ServedModel, router: PDRequestRouter) -> None:
        self._model = model
        self._router = router

    async def completion(self, raw: bytes) -> Job:
        """A body of `/v1/completions`."""
        body = decode_body(completion_decoder, raw)
        self._model.require_name(body.model)
        check_completion(body)
        given = completion_prompts(body)
        options = output_options(body)
        prompts: list[Prompt] = []
        for entry in given:
            if isinstance(entry, str):
                ids = await self._model.encode(entry, body.add_special_tokens is not False)
                prompts.append(Prompt(ids, entry))
            else:
                prompts.append(Prompt(entry, None))
        return self._job(body, prompts, options, DEFAULT_COMPLETION_TOKENS)

    async def chat(self, raw: bytes) -> Job:
        """A body of `/v1/chat/completions`."""
        body = decode_body(chat_decoder, raw)
        self._model.require_name(body.model)
        check_chat(body)
        messages = chat_messages(body.messages)
        options = output_options(body)
        text = self._model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        ids = await self._model.encode(text, bool(body.add_special_tokens))
        return self._job(body, [Prompt(ids, text)], options, None)

    def _job(
        self, body: GenerationBody, prompts: list[Prompt], options: OutputOptions, default_tokens: int | None
    ) -> Job:
        wanted = wanted_tokens(body)
        limits = self._model.limits(self._router.candidates)
        if limits is None:
            raise self._router.rejected(NoInstance(self._router.candidates.why_unusable()))
        if len(prompts) * options.n > MAX_PROMPTS:
            raise InvalidRequest(f"{len(prompts)} prompts times n={options.n}: at most {MAX_PROMPTS} choices", "n")
        samplings = []
        shared: SamplingParams | None = None
        for prompt in prompts:
            ids = prompt.token_ids
            if not ids:
                raise InvalidRequest("the prompt must have at least one token", "prompt")
            if prompt.text is None and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
                raise InvalidRequest(f"prompt: token ids must be from 0 to {limits.vocab_size - 1}", "prompt")
            max_tokens = output_limit(len(ids), wanted, default_tokens, limits.max_model_len)
            if shared is None or shared.max_tokens != max_tokens:
                shared = sampling_params(body, max_tokens, limits.vocab_size)
            samplings.append(shared)
        return Job(prompts, samplings, options)
