"""Parsing of a body's bytes into a `Job`: prompts as token ids, each with its sampling, and output options.

Pure; part of `BodyWork`. Every error is returned to the client.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from chitu.errors import InvalidRequest, NoInstance
from chitu.http.bodies import (
    MAX_PROMPTS,
    ChatBody,
    ChosenTools,
    GenerationBody,
    Tool,
    chat_messages,
    chosen_tools,
    completion_prompts,
    reasoning_variables,
    template_variables,
)
from chitu.http.body_decoder import chat_decoder, completion_decoder, responses_decoder
from chitu.http.messages.call_formats import grammar_of_calls
from chitu.http.messages.message_parser import MessagePlan
from chitu.http.responses import chat_body, echo_of, error_for_responses
from chitu.http.sampling_fields import (
    DEFAULT_COMPLETION_TOKENS,
    AnswerSize,
    OutputOptions,
    grammar_of,
    kept_tokens,
    output_options,
    require_a_token,
    sampling_params,
)
from chitu.http.served_model import ModelLimits, ServedModel, output_limit
from chitu.net.http import Scope, header
from chitu.protocol import Grammar, Reasoning, SamplingParams, pack_i32


class Prompt(msgspec.Struct):
    token_ids: bytes
    """Packed little-endian int32."""
    num_tokens: int
    echo: str
    """Text of the prompt if the answer repeats it, else empty."""
    num_added: int | None = None
    """Tokens before `echo` that the tokenizer added; None if `echo` was decoded from tokens."""


class CallSchema(NamedTuple):
    param: str
    """Name of its field."""
    why: str
    """The reason why calls follow it."""


_PLACE = re.compile(r"(\d+)(.*)", re.DOTALL)


class Job(msgspec.Struct):
    """A parsed request: prompts times n choices."""

    prompts: list[Prompt]
    samplings: list[SamplingParams]
    """Sampling parameters, one per prompt."""
    options: OutputOptions
    timeout_s: float | None = None
    """Timeout that the client set."""
    cache_salt: str | None = ""
    """None: the request neither uses nor leaves cached pages."""
    priority: int = 0
    plan: MessagePlan | None = None
    """How the text of a chat's choices is parsed; None: all of it is content."""
    is_chat: bool = True
    echo: dict[str, Any] = {}
    """Request fields that an answer of `/v1/responses` repeats."""
    warnings: list[str] = []
    """Warnings for the client about fields that had no effect."""
    grammar_param: str | None = None
    """Name of the field that the samplings' grammar comes from."""
    call_schemas: tuple[CallSchema, ...] = ()
    """Schemas in a grammar of calls."""

    def refusal(self, error: InvalidRequest) -> InvalidRequest:
        """Return the error of compiling the grammar with the field that is at fault. Its `param` is that of
        `GrammarCompiler.compile`."""
        place = None if error.param is None else _PLACE.fullmatch(error.param)
        if place is None:
            return InvalidRequest(f"{self.grammar_param}: {error.message}", self.grammar_param)
        if not self.call_schemas:
            param = f"{self.grammar_param}{place[2]}"
            return InvalidRequest(f"{param}: {error.message}", param)
        schema = self.call_schemas[int(place[1])]
        param = f"{schema.param}{place[2]}"
        return InvalidRequest(f"{param}: {error.message} ({schema.why})", param)

    @property
    def why_not_kept(self) -> str:
        """The field because of which the request cannot outlive its router; empty if it can."""
        options = self.options
        fields = {
            "n": len(self.prompts) * options.n > 1,
            "tools": self.plan is not None and self.plan.calls is not None,
            "return_proof": options.return_proof,
            "prompt_logprobs": options.prompt_logprobs is not None,
            "echo with logprobs": options.echo and options.logprobs is not None,
        }
        return next((name for name, is_asked in fields.items() if is_asked), "")


def client_timeout_s(scope: Scope) -> float | None:
    """Return how many seconds the client waits for the whole answer: the header X-Request-Timeout. Raise InvalidRequest
    if it is not a positive decimal number."""
    given = header(scope, b"x-request-timeout")
    if given is None:
        return None
    try:
        timeout_s = math.nan if b"_" in given else float(given)  # Python parses 1_0 as ten
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        text = given[:40].decode("latin-1")
        raise InvalidRequest(f"X-Request-Timeout: {text!r} is no positive number of seconds", "X-Request-Timeout")
    return timeout_s


class ClusterFacts(msgspec.Struct, frozen=True):
    """State of the cluster at the time when a body is parsed."""

    limits: ModelLimits | None
    """Limits of the instances that serve; None if nothing serves."""
    why_unusable: str
    """Reason why nothing serves; empty if there are limits."""
    vocab_size: int
    """Vocabulary size of the instances that serve; the checkpoint's while none serves."""


class ParseContext(msgspec.Struct, frozen=True):
    """Context in which a body is parsed."""

    facts: ClusterFacts
    require_client: Callable[[], None]
    """Raises if the client no longer waits for the answer."""

    def require_limits(self) -> ModelLimits:
        if self.facts.limits is None:
            raise NoInstance(self.facts.why_unusable)
        return self.facts.limits


class JobParser:
    """Parser of bodies for one model. `takes_unknown`: an unknown field causes a warning instead of an error."""

    def __init__(self, model: ServedModel, takes_unknown: bool = False) -> None:
        self._model = model
        self._takes_unknown = takes_unknown

    def completion(self, raw: bytes | bytearray, context: ParseContext) -> Job:
        """Parse a body of `/v1/completions`."""
        warnings: list[str] = []
        body = completion_decoder.decode(raw, warnings if self._takes_unknown else None)
        self._model.require_name(body.model)
        given = completion_prompts(body)
        return self._job(
            body, given, body.add_special_tokens is not False, context, DEFAULT_COMPLETION_TOKENS, warnings
        )

    def chat(self, raw: bytes | bytearray, context: ParseContext) -> Job:
        """Parse a body of `/v1/chat/completions`."""
        warnings: list[str] = []
        body = chat_decoder.decode(raw, warnings if self._takes_unknown else None)
        return self._chat_job(body, context, warnings)

    def responses(self, raw: bytes | bytearray, context: ParseContext) -> Job:
        """Parse a body of `/v1/responses`."""
        warnings: list[str] = []
        body = responses_decoder.decode(raw, warnings if self._takes_unknown else None)
        chat = chat_body(body)
        try:
            job = self._chat_job(chat, context, warnings)
        except InvalidRequest as error:
            raise error_for_responses(error) from None
        if job.grammar_param is not None:
            job.grammar_param = _for_responses(job.grammar_param)
        job.call_schemas = tuple([schema._replace(param=_for_responses(schema.param)) for schema in job.call_schemas])
        job.echo = echo_of(body)
        job.options.include_usage = True
        return job

    def _chat_job(self, body: ChatBody, context: ParseContext, warnings: list[str]) -> Job:
        self._model.require_name(body.model)
        variables = {
            **reasoning_variables(body.reasoning_effort, self._model.tokenizer.template_variables),
            **template_variables(body.chat_template_kwargs),
        }
        tools = chosen_tools(body)
        text = self._model.render(chat_messages(body.messages), variables, warnings, tools.offered)
        plan, calls, schemas = self._model.message_plan(body, text, tools.offered), None, []
        if tools.enforced and plan is not None and plan.calls is not None:
            schemas = _call_schemas(body.tools or (), tools)
            params = [schema.param for schema in schemas]
            calls = grammar_of_calls(plan.calls, tools.enforced, params, plan.is_parallel, tools.is_required)
            plan = plan._replace(is_enforced=True)
        reasoning = plan.reasoning_ahead(text) if plan is not None else None
        if variables.get("enable_thinking") is False:
            reasoning = None
        param = "tool_choice" if tools.is_required else "tools"
        job = self._job(
            body,
            [text],
            bool(body.add_special_tokens),
            context,
            None,
            warnings,
            (calls, param) if calls is not None else None,
            reasoning,
        )
        if plan is not None and reasoning is None and job.samplings[0].grammar is not None:
            # The grammar holds from the first token on, so there is no reasoning.
            plan = plan._replace(reasoning=None, is_reasoning=False)
        job.plan = plan
        job.call_schemas = tuple(schemas)
        return job

    def _job(
        self,
        body: GenerationBody,
        given: Sequence[str] | Sequence[list[int]],
        add_special_tokens: bool,
        context: ParseContext,
        default_tokens: int | None,
        warnings: list[str],
        calls: tuple[Grammar, str] | None = None,
        reasoning: Reasoning | None = None,
    ) -> Job:
        options = output_options(body)
        wanted = body.max_completion_tokens
        if wanted is None and (wanted := body.max_tokens) is not None and wanted < 1:
            raise InvalidRequest(f"max_tokens: must be at least 1, not {wanted}", "max_tokens")
        limits = context.require_limits()
        if options.stops:
            found = self._model.tokenizer.special_tokens_in(options.stops)
            options.special_stops = {text: token for text, token in found.items() if token < limits.vocab_size}
        num_choices = len(given) * options.n
        if num_choices > MAX_PROMPTS:
            raise InvalidRequest(f"{len(given)} prompts times n={options.n}: at most {MAX_PROMPTS} choices", "n")
        for name in ("return_receipt", "return_page_sums"):
            if num_choices > 1 and getattr(body, name):
                raise InvalidRequest(f"{name} is available for one choice of one prompt", name)
        # The prompt of a chat is rendered from its messages.
        param = "messages" if default_tokens is None else "prompt"
        most = kept_tokens(body, wanted or default_tokens or 1, limits.max_model_len)
        grammar, grammar_param = grammar_of(body, calls) or (None, None)
        if grammar is not None:
            grammar = msgspec.structs.replace(grammar, reasoning=reasoning)
        bad_words = self._model.bad_words(body.bad_words, limits) if body.bad_words else ()
        prompts: list[Prompt] = []
        samplings = []
        shared: SamplingParams | None = None
        size = AnswerSize(body, options, len(given))
        for entry in given:
            context.require_client()
            ids, text = self._encode(entry, add_special_tokens, limits, most)
            if not ids:
                raise InvalidRequest(f"{param}: a prompt must have at least one token", param)
            max_tokens = output_limit(len(ids), wanted, default_tokens, limits.max_model_len)
            if wanted is None:
                max_tokens = min(max_tokens, size.most_tokens(len(ids)))
            self._model.require_known(ids, limits, param, isinstance(entry, str))
            if shared is None or shared.max_tokens != max_tokens:
                shared = sampling_params(
                    body, options, max_tokens, limits.vocab_size, self._model.tokenizer_eos, bad_words, grammar
                )
                require_a_token(shared, self._model.eos_ids)
            prompt = self._prompt(ids, text, add_special_tokens, options)
            size.add(len(ids), max_tokens, prompt.echo)
            prompts.append(prompt)
            samplings.append(shared)
        return Job(
            prompts,
            samplings,
            options,
            cache_salt=None if body.cache_prompt is False else body.cache_salt or "",
            priority=body.priority or 0,
            is_chat=default_tokens is None,
            warnings=warnings,
            grammar_param=grammar_param,
        )

    def _encode(
        self, given: str | list[int], add_special_tokens: bool, limits: ModelLimits, most: int | None
    ) -> tuple[list[int], str | None]:
        """Return a prompt's ids, cut to the last `most`, and its text if they are all of it."""
        if not isinstance(given, str):
            text, ids = None, given
        elif most is None:
            text, ids = given, self._model.encode(given, add_special_tokens, limits)
        else:
            text, ids = given, self._model.encode_to_cut(given, add_special_tokens, limits)
        if most is not None and len(ids) > most:
            return self._model.last_tokens(ids, most, text is not None and add_special_tokens), None
        return ids, text

    def _prompt(self, ids: list[int], text: str | None, add_special_tokens: bool, options: OutputOptions) -> Prompt:
        prompt = Prompt(pack_i32(ids), len(ids), "")
        if options.echo and text is not None:
            prompt.echo = text
            prompt.num_added = self._model.num_added_tokens(ids) if add_special_tokens else 0
        elif options.echo:
            prompt.echo = self._model.tokenizer.decode(ids, options.skip_special_tokens)
        return prompt


def _call_schemas(given: Sequence[Tool], tools: ChosenTools) -> list[CallSchema]:
    """Return where the schemas of the enforced tools are in the body."""
    places = {tool.function.name: f"tools[{i}].function.parameters" for i, tool in enumerate(given)}
    names = [tool["function"]["name"] for tool in tools.enforced]
    why = "tool_choice enforces calls of {!r}" if tools.is_required else "{!r} is strict"
    return [CallSchema(places[name], why.format(name)) for name in names]


def _for_responses(param: str) -> str:
    return error_for_responses(InvalidRequest("", param)).param or param
