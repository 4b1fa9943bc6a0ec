"""What the fields of a body ask of sampling and of the answer: parameters and options. Pure; part of `BodyWork`, where
a body passes through `AskedAnswer` once.

Ranges are checked as the body is decoded (`bodies.py`); here are defaults, and what depends on the model or on other
fields. Every error names its field.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from chitu.errors import ContextLengthExceeded, InvalidRequest
from chitu.http.ask.answer_size import AnswerSize
from chitu.http.ask.bodies import MAX_PROMPTS, ChatBody, CompletionBody, GenerationBody
from chitu.http.ask.grammar_fields import grammar_of
from chitu.http.ask.parsed import OutputOptions, ParseContext
from chitu.http.ask.served_model import ModelLimits, ServedModel
from chitu.models.sampling_defaults import SamplingDefaults
from chitu.protocol import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGPROBS, Grammar, Reasoning, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; a chat's default is the rest of the context."""
NO_LIMIT = -1
"""`max_tokens` of clients that want all the context has, as LM Studio and llama.cpp take it."""
SEED_MASK = (1 << 63) - 1
TokenSequences = tuple[tuple[int, ...], ...]
STANDARD = SamplingDefaults()
"""Of a model that publishes none."""
MAX_ID_DIGITS = 20
"""A token id that is given as text has fewer digits than this."""


class Rules(NamedTuple):
    """What differs between a completion, a chat, and a chat that was another body."""

    default_tokens: int | None
    """Default of `max_tokens`; None for a chat: the rest of the context."""
    add_special_tokens: bool
    calls: tuple[Grammar, str] | None = None
    """Grammar of tool calls, and its field."""
    reasoning: Reasoning | None = None
    """What precedes the part that follows a grammar."""
    caps: bool = False
    """More tokens than the rest of the context are no error, but cut to it."""


class AskedAnswer:
    """What a body asks of sampling and of its answer: checked once, then applied to each of its prompts."""

    def __init__(
        self, body: GenerationBody, rules: Rules, model: ServedModel, context: ParseContext, num_prompts: int
    ) -> None:
        self._body, self._model = body, model
        self._defaults = model.sampling_defaults
        self.options = options = output_options(body)
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        wanted: int | None = getattr(body, name)
        if wanted is not None and wanted < 1:
            if wanted != NO_LIMIT:
                raise InvalidRequest(f"{name}: must be at least 1, or -1 for no limit, not {wanted}", name)
            wanted, rules = None, rules._replace(default_tokens=None)
        self._wanted, self._rules = wanted, rules
        self.limits = limits = context.require_limits()
        if options.stops:
            found = model.tokenizer.special_tokens_in(options.stops)
            options.special_stops = {text: token for text, token in found.items() if token < limits.vocab_size}
        num_choices = num_prompts * options.n
        if num_choices > MAX_PROMPTS:
            raise InvalidRequest(f"{num_prompts} prompts times n={options.n}: at most {MAX_PROMPTS} choices", "n")
        for name in ("return_receipt", "return_page_sums"):
            if num_choices > 1 and getattr(body, name):
                raise InvalidRequest(f"{name} is available for one choice of one prompt", name)
        self.kept = _kept_tokens(body, wanted or rules.default_tokens or 1, limits.max_model_len)
        """Most tokens of a prompt that are kept; None: all."""
        found_grammar = grammar_of(body, rules.calls)
        self.grammar_param = None if found_grammar is None else found_grammar[1]
        grammar = None if found_grammar is None else found_grammar[0]
        if grammar is not None:
            reasoning = rules.reasoning
            if reasoning is not None and grammar.kind == "tool_calls":
                reasoning = msgspec.structs.replace(reasoning, head="")  # calls and text have their own
            grammar = msgspec.structs.replace(grammar, reasoning=reasoning)
        self._grammar = grammar
        self._bad_words = _bad_words(model, body.bad_words, limits) if body.bad_words else ()
        self._size = AnswerSize(body, options, num_prompts)
        self.samplings: list[SamplingParams] = []
        """Of each prompt; those of equal prompts are one object."""
        self.fills_context = False
        """See `ParsedRequest`, for the last prompt."""

    def add(self, ids: Sequence[int], is_text: bool, param: str) -> None:
        """Decide on the sampling of a prompt, which is still to be counted."""
        body, rules, wanted, most = self._body, self._rules, self._wanted, self.limits.max_model_len
        if rules.caps:
            max_tokens = _output_limit(len(ids), None, wanted, most)
            self.fills_context = max_tokens == most - len(ids) and max_tokens != wanted
        else:
            max_tokens = _output_limit(len(ids), wanted, rules.default_tokens, most)
        if wanted is None:
            max_tokens = min(max_tokens, self._size.most_tokens(len(ids)))
        self._model.require_known(ids, self.limits, param, is_text)
        sampling = self.samplings[-1] if self.samplings else None
        if sampling is None or sampling.max_tokens != max_tokens:
            more_eos, vocab_size = self._model.tokenizer_eos, self.limits.vocab_size
            sampling = sampling_params(
                body, self.options, max_tokens, vocab_size, more_eos, self._bad_words, self._grammar, self._defaults
            )
            _require_a_token(sampling, self._model.eos_ids)
        self.samplings.append(sampling)

    def count(self, num_tokens: int, echo: str) -> None:
        """Count the prompt that was added last to the answer's size. `echo`: its text, if the answer repeats it."""
        self._size.add(num_tokens, self.samplings[-1].max_tokens, echo)


def _token_ids(values: list[int], vocab_size: int, name: str) -> tuple[int, ...]:
    for token in values:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{name}: {token} is no token id (0 to {vocab_size - 1})", name)
    return tuple(dict.fromkeys(values))


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, value in bias.items():
        # Check the length first: Python does not parse integers of thousands of digits.
        if not (len(key) < MAX_ID_DIGITS and key.isascii() and key.isdigit() and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias: {key[:MAX_ID_DIGITS]!r} is no token id (0 to {vocab_size - 1})", "logit_bias"
            )
        if not -100 <= value <= 100:
            raise InvalidRequest(f"logit_bias must be from -100 to 100, not {value:g}", "logit_bias")
        result[int(key)] = value
    return result


def output_options(body: GenerationBody) -> OutputOptions:
    """Return the output options of a body. Raise InvalidRequest if fields contradict each other."""
    n, stream, given = body.n or 1, body.stream is True, body.stream_options
    if given is not None and not stream:
        raise InvalidRequest("stream_options is allowed only with stream: true", "stream_options")
    stops = () if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if "" in stops:
        raise InvalidRequest("stop must not hold an empty string", "stop")
    if body.return_proof is not True:
        for name in ("return_receipt", "return_page_sums"):
            if getattr(body, name):
                raise InvalidRequest(f"{name} is allowed only with return_proof: true", name)
    if isinstance(body, CompletionBody):
        total, logprobs, echo = _best_of(body, n), _num_logprobs("logprobs", body.logprobs), body.echo is True
    else:
        assert isinstance(body, ChatBody)
        total, logprobs, echo = n, _num_chat_logprobs(body), False
    prompt_logprobs = _num_logprobs("prompt_logprobs", body.prompt_logprobs)
    if prompt_logprobs is not None and stream:  # events have no place for them
        raise InvalidRequest("prompt_logprobs is not available with stream: true", "prompt_logprobs")
    return OutputOptions(
        n=total,
        num_returned=n if total > n else 0,
        stream=stream,
        include_usage=given is not None and given.include_usage is True,
        continuous_usage=given is not None and given.continuous_usage_stats is True,
        stops=stops,
        include_stop=body.include_stop_str_in_output is True,
        skip_special_tokens=body.skip_special_tokens is not False,
        return_token_ids=body.return_token_ids is True,
        return_proof=body.return_proof is True,
        return_receipt=body.return_receipt is True,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
    )


def _best_of(body: CompletionBody, n: int) -> int:
    """Return how many choices are generated for a prompt."""
    if body.best_of is None:
        return n
    if body.best_of < n:
        raise InvalidRequest(f"best_of ({body.best_of}) must not be below n ({n})", "best_of")
    if body.best_of > n and body.stream:
        raise InvalidRequest("best_of above n is not available with stream: true", "best_of")
    return body.best_of


def _num_logprobs(name: str, count: int | bool | None) -> int | None:
    """Return the number of most likely tokens per token; None if no logprobs are requested."""
    if count is True:
        raise InvalidRequest(f"{name} must be an integer from 0 to {MAX_LOGPROBS}", name)
    return None if count is False else count


def _num_chat_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs is allowed only with logprobs: true", "top_logprobs")
    return None


def sampling_params(
    body: GenerationBody,
    options: OutputOptions,
    max_tokens: int,
    vocab_size: int,
    more_eos: tuple[int, ...] = (),
    bad_words: TokenSequences = (),
    grammar: Grammar | None = None,
    defaults: SamplingDefaults = STANDARD,
) -> SamplingParams:
    """Return the sampling parameters, with every default resolved and every id checked. `options` are those of the same
    body. `max_tokens` is already capped by the context. `more_eos` are ids that end a text in addition to D's own eos
    ids. `bad_words` are token sequences. `defaults` are the model's."""
    if body.allowed_token_ids == []:
        raise InvalidRequest(
            "allowed_token_ids must not be empty; leave it out to allow all tokens", "allowed_token_ids"
        )
    min_tokens, seed, stop_ids = body.min_tokens or 0, body.seed, body.stop_token_ids
    top_k = defaults.top_k if body.top_k is None else body.top_k
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens must be from 0 to max_tokens ({max_tokens}), not {min_tokens}", "min_tokens")
    if more_eos and not body.ignore_eos:
        stop_ids = [*(stop_ids or ()), *more_eos]
    if options.special_stops:
        stop_ids = [*(stop_ids or ()), *options.stop_ids]
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_k=0 if top_k < 0 else min(top_k, vocab_size),
        top_p=body.top_p or defaults.top_p,
        min_p=body.min_p or 0.0,
        seed=random.getrandbits(63) if seed is None else seed & SEED_MASK,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or defaults.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias, vocab_size) if body.logit_bias else {},
        stop_token_ids=_token_ids(stop_ids, vocab_size, "stop_token_ids") if stop_ids else (),
        ignore_eos=body.ignore_eos is True,
        allowed_token_ids=_token_ids(body.allowed_token_ids, vocab_size, "allowed_token_ids")
        if body.allowed_token_ids
        else (),
        bad_words=bad_words,
        # `best_of` ranks by logprobs, even if the client does not want them.
        logprobs=0 if options.logprobs is None and options.num_returned else options.logprobs,
        prompt_logprobs=_asked_prompt_logprobs(options),
        grammar=grammar,
        page_sums=body.return_page_sums is True,
    )


def _asked_prompt_logprobs(options: OutputOptions) -> int | None:
    """Return the `prompt_logprobs` to request from P: for the field, or for a completion that echoes with logprobs."""
    if options.logprobs is None or not options.echo:
        return options.prompt_logprobs
    return max(options.logprobs, options.prompt_logprobs or 0)


def _require_a_token(sampling: SamplingParams, eos_ids: frozenset[int]) -> None:
    """Raise InvalidRequest if no allowed token is left. Tokens that `min_tokens` holds back for a while count as
    forbidden, because no token could be drawn meanwhile."""
    if not sampling.allowed_token_ids:
        return
    forbidden = {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.min_tokens:
        forbidden.update(sampling.stop_token_ids, () if sampling.ignore_eos else eos_ids)
    if forbidden.issuperset(sampling.allowed_token_ids):
        raise InvalidRequest(
            "allowed_token_ids: no token remains after bad_words and the stop tokens that min_tokens suppresses",
            "allowed_token_ids",
        )


def _kept_tokens(body: GenerationBody, to_emit: int, max_model_len: int) -> int | None:
    """Return how many prompt tokens `truncate_prompt_tokens` keeps at most; None: all. If it is -1, the prompt leaves
    room for `to_emit` tokens of the answer. Raise InvalidRequest if it is out of range."""
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return None
    if wanted == -1:
        return max(1, max_model_len - to_emit)
    if not 1 <= wanted <= max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or from 1 to {max_model_len}, not {wanted}", "truncate_prompt_tokens"
        )
    return wanted


def _output_limit(prompt_tokens: int, wanted: int | None, default: int | None, max_model_len: int) -> int:
    """Return how many tokens a request may emit. `default` None: the rest of the context. ContextLengthExceeded if the
    prompt leaves no room, or less than `wanted`."""
    room = max_model_len - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {max_model_len} tokens and the prompt alone has {prompt_tokens}; "
            "shorten the prompt"
        )
    if wanted is not None:
        if wanted > room:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {max_model_len} tokens, but {prompt_tokens + wanted} were "
                f"asked for ({prompt_tokens} in the prompt, {wanted} to generate); shorten either"
            )
        return wanted
    return room if default is None else min(default, room)


def _bad_words(
    model: ServedModel, words: Sequence[str | list[int]], limits: ModelLimits
) -> tuple[tuple[int, ...], ...]:
    """Return each word as its tokens at the beginning of a text and after a space; token lists stay as they are.
    InvalidRequest if a word is only spaces, or more than `MAX_BAD_WORD_TOKENS` tokens, and for more than
    `MAX_BAD_WORDS` sequences."""
    found: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(words):
        param = f"bad_words[{i}]"
        if not isinstance(word, str):
            model.require_known(word, limits, param, is_text=False)
            found[tuple(word)] = None
            continue
        bare = word.lstrip()
        if not bare:
            raise InvalidRequest(f"{param} must not be empty", param)
        for text in (bare, " " + bare):
            ids = tuple(model.tokenizer.encode(text, add_special_tokens=False))
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(f"{param}: {len(ids)} tokens; at most {MAX_BAD_WORD_TOKENS} are accepted", param)
            if ids:
                model.require_known(ids, limits, param, is_text=True)
                found[ids] = None
    if len(found) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words: {len(found)} sequences of tokens, a text being two; at most {MAX_BAD_WORDS} are accepted",
            "bad_words",
        )
    return tuple(found)


def with_seed(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of choice `index` of n: with seed + index."""
    if index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) & SEED_MASK)
