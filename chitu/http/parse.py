"""Parsing of a body into a `ParsedRequest`: prompts as token ids, each with its sampling, and output options. Pure.

Checks what the types of a body cannot express (the shape of prompts, the content of messages, the choice of tools).
Bodies of other APIs are chats in other words (`translation.py`). Part of `BodyWork`; every error is returned to the
client.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec

from chitu.errors import InvalidRequest, NoInstance
from chitu.http.anthropic_bodies import CountTokensBody
from chitu.http.anthropic_chat import chat_of_messages
from chitu.http.bodies import (
    EFFORTS,
    MAX_PROMPTS,
    TOOL_CHOICES,
    ChatBody,
    ChatMessage,
    GenerationBody,
    MessageToolCall,
    Tool,
)
from chitu.http.body_decoder import (
    chat_decoder,
    completion_decoder,
    count_decoder,
    cut_character,
    messages_decoder,
    responses_decoder,
)
from chitu.http.custom_tools import with_pattern
from chitu.http.messages.call_formats import grammar_of_calls
from chitu.http.messages.message_parser import MessagePlan
from chitu.http.pooled_answers import PooledAnswer
from chitu.http.responses_bodies import ENCRYPTED
from chitu.http.responses_chat import chat_of_responses, custom_names, echo_of
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
from chitu.http.translation import Translation, text_of_parts
from chitu.net.http import Scope, header
from chitu.protocol import Grammar, Reasoning, RequestOptions, SamplingParams, pack_i32
from chitu.router.costs import NO_SLO, SLO

_PLACE = re.compile(r"(\d+)(.*)", re.DOTALL)
_SHAPE = "must be a string, a list of strings, a list of token ids, or a list of those (none of them empty)"
_BRACKET = ord("[")
_TEXTS = re.compile(rb'\[\s*"')
_LISTS = re.compile(rb"\[\s*\[")
ROLES = {"developer": "system"}
"""OpenAI's newer name of a role -> the name that chat templates use."""
_EMPTY = (b"null", b'""', b"[]", b"{}")
SET_OTHERWISE = ("messages", "tools", "add_generation_prompt")
"""Variables of chat templates that `chat_template_kwargs` may not set."""


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
    has_places: bool = True
    """Whether the places within it are those of its field."""


class RenderedChat(NamedTuple):
    text: str
    variables: dict[str, Any]
    """Variables of the chat template."""
    tools: ChosenTools
    adapter: str
    """Name of the LoRA adapter; empty: the model alone."""


class ParsedRequest(msgspec.Struct):
    """A parsed request: prompts times n choices."""

    prompts: list[Prompt]
    samplings: list[SamplingParams]
    """Sampling parameters, one per prompt."""
    options: OutputOptions
    timeout_s: float | None = None
    """Timeout that the client set."""
    asked: RequestOptions = RequestOptions()
    """What its instances are told beside tokens and sampling."""
    slo: SLO = NO_SLO
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
    custom_tools: frozenset[str] = frozenset()
    """Names of the tools that take text (`custom_tools.py`)."""
    encodes_reasoning: bool = False
    """The answer has its reasoning encoded, too (`ENCRYPTED`)."""
    pooled: PooledAnswer | None = None
    """How the answer is made of the prompts' pooled states; None: the answer is generated."""
    fills_context: bool = False
    """The tokens of the answer are those that the context has room for, fewer than asked for."""

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
        param = f"{schema.param}{place[2] if schema.has_places else ''}"
        return InvalidRequest(f"{param}: {error.message} ({schema.why})", param)

    @property
    def why_not_kept(self) -> str:
        """The field because of which the request cannot outlive its router; empty if it can."""
        options = self.options
        fields = {
            "n": len(self.prompts) * options.n > 1,
            "tools": self.plan is not None and bool(self.plan.names),
            "return_proof": options.return_proof,
            "prompt_logprobs": options.prompt_logprobs is not None,
            "a route without generation": self.pooled is not None,
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


class BodyParser:
    """Parser of bodies for one model. `takes_unknown`: an unknown field causes a warning instead of an error."""

    def __init__(self, model: ServedModel, takes_unknown: bool = False) -> None:
        self._model = model
        self._takes_unknown = takes_unknown

    def completion(self, raw: bytes | bytearray, context: ParseContext) -> ParsedRequest:
        """Parse a body of `/v1/completions`."""
        warnings: list[str] = []
        body = completion_decoder.decode(raw, warnings if self._takes_unknown else None)
        adapter = self._model.adapter_of(body.model)
        given = prompts_of(body.prompt, "prompt")
        parsed = self._parsed(
            body, given, body.add_special_tokens is not False, context, DEFAULT_COMPLETION_TOKENS, warnings
        )
        parsed.asked = msgspec.structs.replace(parsed.asked, adapter=adapter)
        return parsed

    def chat(self, raw: bytes | bytearray, context: ParseContext) -> ParsedRequest:
        """Parse a body of `/v1/chat/completions`."""
        warnings: list[str] = []
        body = chat_decoder.decode(raw, warnings if self._takes_unknown else None)
        return self._chat(body, context, warnings)

    def responses(self, raw: bytes | bytearray, context: ParseContext) -> ParsedRequest:
        """Parse a body of `/v1/responses`."""
        warnings: list[str] = []
        body = responses_decoder.decode(raw, warnings if self._takes_unknown else None)
        translation = chat_of_responses(body, self._model.tokenizer.template_variables, warnings)
        parsed = self._translated(translation, context, warnings)
        parsed.echo = echo_of(body)
        parsed.custom_tools = custom_names(body)
        parsed.encodes_reasoning = ENCRYPTED in (body.include or ())
        return parsed

    def messages(self, raw: bytes | bytearray, context: ParseContext) -> ParsedRequest:
        """Parse a body of `/v1/messages`."""
        warnings: list[str] = []
        body = messages_decoder.decode(raw, warnings if self._takes_unknown else None)
        return self._translated(self._of_messages(body, warnings), context, warnings, caps=True)

    def count_tokens(self, raw: bytes | bytearray, context: ParseContext) -> tuple[int, list[str]]:
        """Return how many tokens the prompt of a body of `/v1/messages/count_tokens` has, and warnings."""
        warnings: list[str] = []
        body = count_decoder.decode(raw, warnings if self._takes_unknown else None)
        translation = self._of_messages(body, warnings)
        try:
            rendered = self._rendered(translation.chat, warnings)
        except InvalidRequest as error:
            raise translation.names.renamed(error) from None
        limits = context.facts.limits
        ids = self._model.encode_counted(rendered.text, False, "messages", limits, context.require_client)
        return len(ids), warnings

    def _of_messages(self, body: CountTokensBody, warnings: list[str]) -> Translation:
        reasons = self._model.message_format.reasoning is not None
        return chat_of_messages(body, self._model.tokenizer.template_variables, reasons, warnings)

    def _translated(
        self, translation: Translation, context: ParseContext, warnings: list[str], caps: bool = False
    ) -> ParsedRequest:
        """Parse a chat that was made of another body, whose answer always has its usage."""
        names = translation.names
        try:
            parsed = self._chat(translation.chat, context, warnings, caps, translation.patterns)
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

    def _rendered(self, body: ChatBody, warnings: list[str]) -> RenderedChat:
        adapter = self._model.adapter_of(body.model)
        variables = {
            **reasoning_variables(body.reasoning_effort, self._model.tokenizer.template_variables),
            **template_variables(body.chat_template_kwargs),
        }
        tools = chosen_tools(body)
        text = self._model.render(chat_messages(body.messages), variables, warnings, tools.offered)
        return RenderedChat(text, variables, tools, adapter)

    def _chat(
        self,
        body: ChatBody,
        context: ParseContext,
        warnings: list[str],
        caps: bool = False,
        patterns: Mapping[str, str] = MappingProxyType({}),
    ) -> ParsedRequest:
        """`caps`: more tokens than the rest of the context are no error, but cut to it. `patterns`: see
        `Translation`."""
        text, variables, tools, adapter = self._rendered(body, warnings)
        plan, calls, schemas = self._model.message_plan(body, text, tools.offered), None, []
        if tools.enforced and plan is not None and plan.calls is not None:
            schemas = _call_schemas(body.tools or (), tools)
            enforced = [_as_enforced(tool, patterns) for tool in tools.enforced]
            params = [schema.param for schema in schemas]
            calls = grammar_of_calls(plan.calls, enforced, params, plan.is_parallel, tools.is_required)
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
        parsed.asked = msgspec.structs.replace(parsed.asked, adapter=adapter)
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
            if reasoning is not None and grammar.kind == "tool_calls":
                reasoning = msgspec.structs.replace(reasoning, head="")  # calls and text have their own
            grammar = msgspec.structs.replace(grammar, reasoning=reasoning)
        bad_words = self._model.bad_words(body.bad_words, limits) if body.bad_words else ()
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
        return ParsedRequest(
            prompts,
            samplings,
            options,
            asked=RequestOptions(
                cache_salt=None if body.cache_prompt is False else body.cache_salt or "", priority=body.priority or 0
            ),
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


def _as_enforced(tool: dict[str, Any], patterns: Mapping[str, str]) -> dict[str, Any]:
    pattern = patterns.get(tool["function"]["name"])
    return tool if pattern is None else with_pattern(tool, pattern)


def _call_schemas(given: Sequence[Tool], tools: ChosenTools) -> list[CallSchema]:
    """Return where the schemas of the enforced tools are in the body."""
    places = {tool.function.name: f"tools[{i}].function.parameters" for i, tool in enumerate(given)}
    names = [tool["function"]["name"] for tool in tools.enforced]
    why = "tool_choice enforces calls of {!r}" if tools.is_required else "{!r} is strict"
    return [CallSchema(places[name], why.format(name)) for name in names]


# ------------------------------------------------------------------------------------------------- prompts and messages


_Several = msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)
_Ids = Annotated[list[int], msgspec.Meta(min_length=1)]
_one_text = msgspec.json.Decoder(str)
_texts: msgspec.json.Decoder[list[str]] = msgspec.json.Decoder(Annotated[list[str], _Several])
_ids: msgspec.json.Decoder[list[int]] = msgspec.json.Decoder(_Ids)
_ids_of_several: msgspec.json.Decoder[list[list[int]]] = msgspec.json.Decoder(Annotated[list[_Ids], _Several])


def prompts_of(raw: msgspec.Raw, param: str) -> list[str] | list[list[int]]:
    """Return the prompts of a field, all texts or all token ids. Raise InvalidRequest for any other shape. Decodes in
    place, because no other request has a turn while a large body is copied."""
    given = memoryview(raw)
    if not given or bytes(given[:5]) == b"null":
        raise InvalidRequest(f"{param} is required", param)
    try:
        if given[0] != _BRACKET:
            return [_one_text.decode(given)]
        if _TEXTS.match(given):
            return _texts.decode(given)
        if not _LISTS.match(given):
            return [_ids.decode(given)]
        # Count before decoding: a decoded list costs many times the three bytes of its JSON.
        if bytes(given).count(b"[") <= MAX_PROMPTS + 1:
            return _ids_of_several.decode(given)
    except msgspec.ValidationError as error:
        if "length <=" not in str(error):
            raise InvalidRequest(f"{param} {_SHAPE}", param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        broken = InvalidRequest(f"{param} is not valid JSON: {error}", param)
        raise cut_character(bytes(given), param) or broken from error
    raise InvalidRequest(f"{param}: at most {MAX_PROMPTS} prompts are accepted", param)


def chat_messages(given: list[ChatMessage] | None) -> list[dict[str, Any]]:
    """Return messages as the chat template takes them. Raise InvalidRequest for content that is not text."""
    if not given:
        raise InvalidRequest("messages must hold at least one message", "messages")
    messages = []
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        if message.function_call is not msgspec.UNSET or message.audio is not msgspec.UNSET:
            for name in ("function_call", "audio"):
                value = getattr(message, name)
                if value is not msgspec.UNSET and bytes(value) not in _EMPTY:
                    raise InvalidRequest(f"{where}.{name} is not supported yet", f"{where}.{name}")
        content = message.content
        if content is None:
            if message.role != "assistant":
                raise InvalidRequest(f"{where}.content is required", f"{where}.content")
            content = ""  # templates add text to it
        if not isinstance(content, str):
            content = text_of_parts([(part.type, part.text) for part in content], ("text",), f"{where}.content")
        message_of_template: dict[str, Any] = {"role": ROLES.get(message.role, message.role), "content": content}
        if message.name is not None:
            message_of_template["name"] = message.name
        if message.tool_calls:
            message_of_template["tool_calls"] = [_call_of_template(call, where) for call in message.tool_calls]
        if message.tool_call_id:
            message_of_template["tool_call_id"] = message.tool_call_id
        if reasoning := message.reasoning_content or message.reasoning:
            message_of_template["reasoning_content"] = reasoning
        messages.append(message_of_template)
    return messages


def _call_of_template(call: MessageToolCall, where: str) -> dict[str, Any]:
    """Return a call as the chat template takes it. Arguments become an object, because templates write the JSON
    themselves; arguments that are no JSON object stay text."""
    if call.type not in (None, "function"):
        raise InvalidRequest(f"{where}.tool_calls: only calls of type 'function' are supported", f"{where}.tool_calls")
    arguments: Any = call.function.arguments or "{}"
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = None
    if isinstance(value, dict):
        arguments = value
    of_template = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return {"id": call.id, **of_template} if call.id else of_template


def offered_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Return tools as the chat template takes them, with fields in the order that models are trained with. Raise
    InvalidRequest if two tools have the same name."""
    if not tools:
        return None
    offered: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        given = tool.function
        if given.name in offered:
            raise InvalidRequest(f"tools[{i}]: {given.name!r} is there twice", f"tools[{i}].function.name")
        function: dict[str, Any] = {"name": given.name}
        if given.description is not None:
            function["description"] = given.description
        if given.parameters is not None:
            function["parameters"] = given.parameters
        offered[given.name] = {"type": "function", "function": function}
    return list(offered.values())


class ChosenTools(NamedTuple):
    offered: list[dict[str, Any]] | None
    """Tools in the prompt; None if the body offers none, or forbids calls."""
    enforced: list[dict[str, Any]]
    """Tools whose calls must follow their schemas; empty: calls are not constrained."""
    is_required: bool = False
    """The answer must be a call of one of `enforced`."""


def chosen_tools(body: ChatBody) -> ChosenTools:
    """Return the tools of the body that its `tool_choice` selects. Raise InvalidRequest if it names no tool of them."""
    tools, choice = offered_tools(body.tools), body.tool_choice
    if choice is None or choice == "auto":
        return ChosenTools(tools, _strict(body.tools or (), tools or ()))
    if choice == "none":
        return ChosenTools(None, [])
    if isinstance(choice, str) and choice not in TOOL_CHOICES:
        raise InvalidRequest(
            f"tool_choice must be one of {', '.join(TOOL_CHOICES)} or a function of tools, not {choice[:40]!r}",
            "tool_choice",
        )
    if not tools:
        raise InvalidRequest("tool_choice is allowed only with tools", "tool_choice")
    if isinstance(choice, str):
        return ChosenTools(tools, tools, True)
    named = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
    if not named:
        raise InvalidRequest(f"tool_choice: {choice.function.name[:80]!r} is none of tools", "tool_choice")
    return ChosenTools(tools, named, True)


def _strict(given: Sequence[Tool], offered: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools that constrain calls if at least one of them is strict. A tool that is not strict accepts any
    object. Empty if no tool is strict."""
    if not any(tool.function.strict for tool in given):
        return []
    return [
        tool if own.function.strict else {"function": {"name": own.function.name}}
        for own, tool in zip(given, offered, strict=True)
    ]


def reasoning_variables(effort: str | None, known: Collection[str]) -> dict[str, Any]:
    """Return `reasoning_effort` as variables of a template that reads `known`. Raise InvalidRequest for an unknown
    effort, and for any effort except `none` if the template reads no such variable."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise InvalidRequest(f"reasoning_effort must be one of {', '.join(EFFORTS)}", "reasoning_effort")
    variables: dict[str, Any] = {}
    if "reasoning_effort" in known:
        variables["reasoning_effort"] = effort
    if "enable_thinking" in known:
        variables["enable_thinking"] = effort != "none"
    if not variables and effort != "none":
        raise InvalidRequest("reasoning_effort: the model's chat template has no such choice", "reasoning_effort")
    return variables


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """Return `chat_template_kwargs` as the template takes them. Raise InvalidRequest for a name in `SET_OTHERWISE`."""
    for name in SET_OTHERWISE:
        if given and name in given:
            raise InvalidRequest(
                f"chat_template_kwargs.{name} is set by other fields; leave it out", f"chat_template_kwargs.{name}"
            )
    return given or {}
