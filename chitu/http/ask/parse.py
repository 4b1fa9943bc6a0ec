"""Parsing of a body into a `ParsedRequest`: prompts as token ids, each with its sampling, and output options. Pure.

Bodies of other APIs are chats in other words (`translation.py`). Part of `BodyWork`; every error is returned to the
client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import ChatBody, CompletionBody, GenerationBody, Tool
from chitu.http.ask.chat import (
    ChosenTools,
    chat_messages,
    chosen_tools,
    end_of_prompt,
    of_any_arguments,
    reasoning_variables,
    template_variables,
    thinking_variables,
)
from chitu.http.ask.grammar_fields import format_of
from chitu.http.ask.images import SentImages
from chitu.http.ask.parsed import CallSchema, OutputOptions, ParseContext, ParsedRequest, Prompt
from chitu.http.ask.prediction import prediction_of
from chitu.http.ask.prompts import prompts_of
from chitu.http.ask.sampling import DEFAULT_COMPLETION_TOKENS, AskedAnswer, Rules
from chitu.http.ask.served_model import ModelLimits, ServedModel
from chitu.http.ask.translation import Translation
from chitu.http.messages.call_formats import grammar_of_calls
from chitu.protocol import RequestOptions, pack_i32
from chitu.router.costs import NO_SLO, SLO


class RenderedChat(NamedTuple):
    text: str
    variables: dict[str, Any]
    """Variables of the chat template."""
    tools: ChosenTools
    adapter: str
    """Name of the LoRA adapter; empty: the model alone."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Messages of the chat template; they have marks for images."""
    images: SentImages | None = None


class BodyParser:
    """Parser of bodies for one model. `warnings` gets sentences about what has no effect."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    def completion(self, body: CompletionBody, context: ParseContext, warnings: list[str]) -> ParsedRequest:
        adapter = self.model.adapter_of(body.model)
        given, images = prompts_of(body.prompt, "prompt"), None
        if body.images:
            images = self._images_of_ids(body.images, given, context)
        rules = Rules(DEFAULT_COMPLETION_TOKENS, body.add_special_tokens is not False)
        parsed = self._parsed(body, given, rules, context, warnings, images, None)
        parsed.asked = msgspec.structs.replace(parsed.asked, adapter=adapter)
        return parsed

    def translated(
        self, translation: Translation, context: ParseContext, warnings: list[str], caps: bool = False
    ) -> ParsedRequest:
        """Parse a chat that was made of another body, whose answer always has its usage. `caps`: see `chat`."""
        names = translation.names
        self.read_images(translation.images, context)
        try:
            chat = self.rendered(translation.chat, warnings, translation.images)
            parsed = self._chat(translation.chat, chat, context, warnings, caps, translation.enforced, names.of)
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

    def images(self, context: ParseContext) -> SentImages | None:
        """Return what gets the images of a chat; None if the model sees none."""
        vision = self.model.vision
        if vision is None or not context.facts.sees_images:
            return None
        return SentImages(vision, context.fetched, context.reads_images)

    def _images_of_ids(self, urls: Sequence[str], given: Sequence[Any], context: ParseContext) -> SentImages:
        """Return the images of a prompt of token ids, read."""
        images = self.images(context)
        if images is None:
            raise InvalidRequest("images: this model sees none", "images")
        if len(given) != 1 or isinstance(given[0], str):
            raise InvalidRequest("images: only with one prompt of token ids, which has their rows", "images")
        for i, url in enumerate(urls):
            images.mark(f"images[{i}]", url)
        self.read_images(images, context)
        images.find(given[0])
        return images

    def read_images(self, images: SentImages | None, context: ParseContext) -> None:
        """Read the files of images, whose errors have the names of the body that they are in. ImagesWanted if that is
        not for this process."""
        if images:
            context.require_client()
            images.read(context.facts.limits)

    def rendered(
        self,
        body: ChatBody,
        warnings: list[str],
        images: SentImages | None = None,
        context: ParseContext | None = None,
    ) -> RenderedChat:
        """Render a chat. `images`: those that it was translated with, which are read; or with `context`, what gets
        those of the body."""
        adapter = self.model.adapter_of(body.model)
        known = self.model.tokenizer.template_variables
        variables = {
            **reasoning_variables(body.reasoning_effort, known),
            **thinking_variables(body.enable_thinking, known, warnings),
            **template_variables(body.chat_template_kwargs),
        }
        tools = chosen_tools(body)
        begins, continues = end_of_prompt(body.add_generation_prompt, body.continue_final_message)
        messages = chat_messages(body.messages, warnings, images)
        if context is not None:
            self.read_images(images, context)
        text = self.model.render(messages, variables, warnings, tools.offered, begins, continues, images)
        return RenderedChat(text, variables, tools, adapter, messages, images)

    def counted(self, chat: RenderedChat, add_special_tokens: bool, context: ParseContext) -> list[int]:
        """Return the token ids of a chat that is only to be counted."""
        limits = context.facts.limits
        ids = self.model.encode_counted(chat.text, add_special_tokens, "messages", limits, context.require_client)
        return self.with_images(ids, chat.images, chat.messages)

    def with_images(
        self, ids: list[int], images: SentImages | None, messages: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Return the ids of a chat with the rows of its images."""
        if not images:
            return ids
        decode = self.model.tokenizer.decode
        return images.expanded(ids, lambda token: decode([token], skip_special_tokens=False), messages)

    def chat(self, body: ChatBody, context: ParseContext, warnings: list[str]) -> ParsedRequest:
        return self._chat(body, self.rendered(body, warnings, self.images(context), context), context, warnings)

    def _chat(
        self,
        body: ChatBody,
        chat: RenderedChat,
        context: ParseContext,
        warnings: list[str],
        caps: bool = False,
        enforced: Mapping[str, dict[str, Any]] = MappingProxyType({}),
        own_name: Callable[[str], str] = str,
    ) -> ParsedRequest:
        """`caps`: more tokens than the rest of the context are no error, but cut to it. `enforced`: see
        `Translation`. `own_name` returns the name that a field of the chat has in the body."""
        text, variables, tools, adapter, _, _ = chat
        plan, calls, schemas = self.model.message_plan(body, text, tools.callable), None, []
        given = format_of(body) if tools.offered and plan is not None and plan.calls is not None else None
        if given is not None and tools.is_required:
            warnings.append(f"{own_name(given[1])}: no effect, since tool_choice has the answer be a call")
            given = None
        if given is not None and not tools.enforced:
            tools = tools._replace(enforced=[of_any_arguments(tool) for tool in tools.callable or ()])
        if tools.enforced and plan is not None and plan.calls is not None:
            schemas = _call_schemas(body.tools or (), tools)
            followed = [_as_enforced(tool, enforced) for tool in tools.enforced]
            params = [schema.param for schema in schemas]
            answer = given[0] if given is not None else None
            calls = grammar_of_calls(plan.calls, followed, params, plan.is_parallel, tools.is_required, answer)
            if given is not None:
                schemas.append(CallSchema(given[1], "an answer without calls follows it"))
            plan = plan._replace(is_enforced=True)
        reasoning = plan.reasoning_ahead(text) if plan is not None else None
        if variables.get("enable_thinking") is False or body.continue_final_message:
            reasoning = None
        param = "tool_choice" if tools.is_required else "tools"
        rules = Rules(None, bool(body.add_special_tokens), None if calls is None else (calls, param), reasoning, caps)
        parsed = self._parsed(body, [text], rules, context, warnings, chat.images or None, chat.messages)
        if plan is not None and reasoning is None and parsed.samplings[0].grammar is not None:
            # The grammar holds from the first token on, so there is no reasoning.
            plan = plan._replace(reasoning=None, is_reasoning=False)
        parsed.plan = plan
        parsed.call_schemas = tuple(schemas)
        parsed.asked = msgspec.structs.replace(parsed.asked, adapter=adapter)
        return parsed

    def _parsed(
        self,
        body: GenerationBody,
        given: Sequence[str] | Sequence[list[int]],
        rules: Rules,
        context: ParseContext,
        warnings: list[str],
        images: SentImages | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
    ) -> ParsedRequest:
        """`images`: those of the one prompt. It was rendered from `messages`, and has a token for each; None: it has
        their rows already."""
        asked = AskedAnswer(body, rules, self.model, context, len(given))
        # The prompt of a chat is rendered from its messages.
        is_chat = rules.default_tokens is None
        param = "messages" if is_chat else "prompt"
        prompts: list[Prompt] = []
        for entry in given:
            context.require_client()
            most = asked.kept if images is None else None
            ids, text = self._encode(entry, rules.add_special_tokens, asked.limits, most)
            if images is not None:
                if messages is not None:
                    ids = self.with_images(ids, images, messages)
                if asked.kept is not None and len(ids) > asked.kept:
                    raise InvalidRequest(
                        "truncate_prompt_tokens: a prompt with images is not cut", "truncate_prompt_tokens"
                    )
            if not ids:
                raise InvalidRequest(f"{param}: a prompt must have at least one token", param)
            asked.add(ids, isinstance(entry, str), param)
            prompts.append(self._prompt(ids, text, rules.add_special_tokens, asked.options))
            asked.count(len(ids), prompts[-1].echo)
        if images is not None:
            prompts[0].images = images.parts
        return ParsedRequest(
            *(prompts, asked.samplings, asked.options),
            asked=RequestOptions(
                cache_salt=None if body.cache_prompt is False else body.cache_salt or "",
                priority=body.priority or 0,
                is_drafted=body.speculation != "off",
            ),
            slo=NO_SLO if body.slo is None else SLO(body.slo.ttft_s, body.slo.tpot_s),
            prediction=prediction_of(body.prediction, self.model, asked.limits),
            is_chat=is_chat,
            warnings=warnings,
            grammar_param=asked.grammar_param,
            fills_context=asked.fills_context,
            files={} if images is None else images.files,
            image_fingerprint=b"" if images is None else images.form.fingerprint,
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
