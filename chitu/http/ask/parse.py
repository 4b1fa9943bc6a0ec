"""Parsing of a body into a `ParsedRequest`: prompts as token ids, each with its sampling, and output options. Pure.

Checks what the types of a body cannot express (the shape of prompts, the content of messages, the choice of tools).
Bodies of other APIs are chats in other words (`translation.py`). Part of `BodyWork`; every error is returned to the
client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import MAX_PROMPTS, ChatBody, CompletionBody, GenerationBody, Tool
from chitu.http.ask.chat import ChosenTools, chat_messages, chosen_tools, reasoning_variables, template_variables
from chitu.http.ask.parsed import CallSchema, OutputOptions, ParseContext, ParsedRequest, Prompt
from chitu.http.ask.prompts import prompts_of
from chitu.http.ask.sampling import (
    DEFAULT_COMPLETION_TOKENS,
    AnswerSize,
    grammar_of,
    kept_tokens,
    output_options,
    require_a_token,
    sampling_params,
)
from chitu.http.ask.served_model import ModelLimits, ServedModel, output_limit
from chitu.http.ask.translation import Translation
from chitu.http.messages.call_formats import grammar_of_calls
from chitu.protocol import Grammar, Reasoning, SamplingParams, pack_i32
from chitu.router.costs import NO_SLO, SLO


class RenderedChat(NamedTuple):
    text: str
    variables: dict[str, Any]
    """Variables of the chat template."""
    tools: ChosenTools
    adapter: str
    """Name of the LoRA adapter; empty: the model alone."""


class BodyParser:
    """Parser of bodies for one model. `warnings` gets sentences about what has no effect."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    def completion(self, body: CompletionBody, context: ParseContext, warnings: list[str]) -> ParsedRequest:
        adapter = self.model.adapter_of(body.model)
        given = prompts_of(body.prompt, "prompt")
        parsed = self._parsed(
            body, given, body.add_special_tokens is not False, context, DEFAULT_COMPLETION_TOKENS, warnings
        )
        parsed.adapter = adapter
        return parsed

    def translated(
        self, translation: Translation, context: ParseContext, warnings: list[str], caps: bool = False
    ) -> ParsedRequest:
        """Parse a chat that was made of another body, whose answer always has its usage. `caps`: see `chat`."""
        names = translation.names
        try:
            parsed = self.chat(translation.chat, context, warnings, caps, translation.enforced)
        except InvalidRequest as error:
            raise names.renamed(error) from None
        if parsed.grammar_param is not None:
            parsed.grammar_param = names.of(parsed.grammar_param)
        parsed.call_schemas = tuple(
            [
                schema._replace(param=own, has_places=names.of(f"{schema.param}.x") != own)
                for schema in parsed.call_schemas
                for own in (names.of(schema.param),)
            ]
        )
        parsed.options.include_usage = True
        return parsed

    def rendered(self, body: ChatBody, warnings: list[str]) -> RenderedChat:
        adapter = self.model.adapter_of(body.model)
        variables = {
            **reasoning_variables(body.reasoning_effort, self.model.tokenizer.template_variables),
            **template_variables(body.chat_template_kwargs),
        }
        tools = chosen_tools(body)
        text = self.model.render(chat_messages(body.messages), variables, warnings, tools.offered)
        return RenderedChat(text, variables, tools, adapter)

    def chat(
        self,
        body: ChatBody,
        context: ParseContext,
        warnings: list[str],
        caps: bool = False,
        enforced: Mapping[str, dict[str, Any]] = MappingProxyType({}),
    ) -> ParsedRequest:
        """`caps`: more tokens than the rest of the context are no error, but cut to it. `enforced`: see
        `Translation`."""
        text, variables, tools, adapter = self.rendered(body, warnings)
        plan, calls, schemas = self.model.message_plan(body, text, tools.offered), None, []
        if tools.enforced and plan is not None and plan.calls is not None:
            schemas = _call_schemas(body.tools or (), tools)
            followed = [_as_enforced(tool, enforced) for tool in tools.enforced]
            params = [schema.param for schema in schemas]
            calls = grammar_of_calls(plan.calls, followed, params, plan.is_parallel, tools.is_required)
            plan = plan._replace(is_enforced=True)
        reasoning = plan.reasoning_ahead(text) if plan is not None else None
        if variables.get("enable_thinking") is False:
            reasoning = None
        param = "tool_choice" if tools.is_required else "tools"
        parsed = self._parsed(
            body,
            [text],
            bool(body.add_special_tokens),
            context,
            None,
            warnings,
            (calls, param) if calls is not None else None,
            reasoning,
            caps,
        )
        if plan is not None and reasoning is None and parsed.samplings[0].grammar is not None:
            # The grammar holds from the first token on, so there is no reasoning.
            plan = plan._replace(reasoning=None, is_reasoning=False)
        parsed.plan = plan
        parsed.call_schemas = tuple(schemas)
        parsed.adapter = adapter
        return parsed

    def _parsed(
        self,
        body: GenerationBody,
        given: Sequence[str] | Sequence[list[int]],
        add_special_tokens: bool,
        context: ParseContext,
        default_tokens: int | None,
        warnings: list[str],
        calls: tuple[Grammar, str] | None = None,
        reasoning: Reasoning | None = None,
        caps: bool = False,
    ) -> ParsedRequest:
        options = output_options(body)
        wanted = body.max_completion_tokens
        if wanted is None and (wanted := body.max_tokens) is not None and wanted < 1:
            raise InvalidRequest(f"max_tokens: must be at least 1, not {wanted}", "max_tokens")
        limits = context.require_limits()
        if options.stops:
            found = self.model.tokenizer.special_tokens_in(options.stops)
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
            if reasoning is not None and grammar.kind == "tool_calls":
                reasoning = msgspec.structs.replace(reasoning, head="")  # calls and text have their own
            grammar = msgspec.structs.replace(grammar, reasoning=reasoning)
        bad_words = self.model.bad_words(body.bad_words, limits) if body.bad_words else ()
        prompts: list[Prompt] = []
        samplings = []
        shared: SamplingParams | None = None
        size, fills_context = AnswerSize(body, options, len(given)), False
        for entry in given:
            context.require_client()
            ids, text = self._encode(entry, add_special_tokens, limits, most)
            if not ids:
                raise InvalidRequest(f"{param}: a prompt must have at least one token", param)
            if caps:
                max_tokens = output_limit(len(ids), None, wanted, limits.max_model_len)
                fills_context = max_tokens == limits.max_model_len - len(ids) and max_tokens != wanted
            else:
                max_tokens = output_limit(len(ids), wanted, default_tokens, limits.max_model_len)
            if wanted is None:
                max_tokens = min(max_tokens, size.most_tokens(len(ids)))
            self.model.require_known(ids, limits, param, isinstance(entry, str))
            if shared is None or shared.max_tokens != max_tokens:
                shared = sampling_params(
                    body, options, max_tokens, limits.vocab_size, self.model.tokenizer_eos, bad_words, grammar
                )
                require_a_token(shared, self.model.eos_ids)
            prompt = self._prompt(ids, text, add_special_tokens, options)
            size.add(len(ids), max_tokens, prompt.echo)
            prompts.append(prompt)
            samplings.append(shared)
        return ParsedRequest(
            prompts,
            samplings,
            options,
            cache_salt=None if body.cache_prompt is False else body.cache_salt or "",
            priority=body.priority or 0,
            slo=NO_SLO if body.slo is None else SLO(body.slo.ttft_s, body.slo.tpot_s),
            is_chat=default_tokens is None,
            warnings=warnings,
            grammar_param=grammar_param,
            fills_context=fills_context,
        )

    def _encode(
        self, given: str | list[int], add_special_tokens: bool, limits: ModelLimits, most: int | None
    ) -> tuple[list[int], str | None]:
        """Return a prompt's ids, cut to the last `most`, and its text if they are all of it."""
        if not isinstance(given, str):
            text, ids = None, given
        elif most is None:
            text, ids = given, self.model.encode(given, add_special_tokens, limits)
        else:
            text, ids = given, self.model.encode_to_cut(given, add_special_tokens, limits)
        if most is not None and len(ids) > most:
            return self.model.last_tokens(ids, most, text is not None and add_special_tokens), None
        return ids, text

    def _prompt(self, ids: list[int], text: str | None, add_special_tokens: bool, options: OutputOptions) -> Prompt:
        prompt = Prompt(pack_i32(ids), len(ids), "")
        if options.echo and text is not None:
            prompt.echo = text
            prompt.num_added = self.model.num_added_tokens(ids) if add_special_tokens else 0
        elif options.echo:
            prompt.echo = self.model.tokenizer.decode(ids, options.skip_special_tokens)
        return prompt


def _as_enforced(tool: dict[str, Any], enforced: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    parameters = enforced.get(tool["function"]["name"])
    return tool if parameters is None else {**tool, "function": {**tool["function"], "parameters": parameters}}


def _call_schemas(given: Sequence[Tool], tools: ChosenTools) -> list[CallSchema]:
    """Return where the schemas of the enforced tools are in the body."""
    places = {tool.function.name: f"tools[{i}].function.parameters" for i, tool in enumerate(given)}
    names = [tool["function"]["name"] for tool in tools.enforced]
    why = "tool_choice enforces calls of {!r}" if tools.is_required else "{!r} is strict"
    return [CallSchema(places[name], why.format(name)) for name in names]
