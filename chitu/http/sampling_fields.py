"""Sampling parameters and output options from the fields of a body: defaults, and what fields rule out. Pure.

Called by `jobs.py`, as part of `BodyWork`, once per request. Ranges are checked as the body is decoded, except those
that depend on the model or on other fields. Every error names its field.
"""

from __future__ import annotations

import random

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.request_bodies import ChatBody, CompletionBody, GenerationBody
from chitu.protocol import MAX_LOGPROBS, Grammar, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; a chat's default is the rest of the context."""
SEED_MASK = (1 << 63) - 1
MAX_ID_DIGITS = 20
"""A token id that is given as text has fewer digits than this."""


class OutputOptions(msgspec.Struct):
    """Options for what the HTTP layer does with the tokens."""

    n: int
    """Choices generated for each prompt."""
    stream: bool
    include_usage: bool
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    return_token_ids: bool
    return_proof: bool = False
    """The answer contains a proof of how it was served."""
    logprobs: int | None = None
    """Number of most likely tokens returned with each token; None: no logprobs."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens for each prompt token. By the field of that name; `echo` does not count here."""
    echo: bool = False
    num_returned: int = 0
    """Number of the `n` choices that the client gets: those with the highest logprob per token. 0: all."""
    continuous_usage: bool = False
    """Every event has the usage of its choice so far."""
    return_receipt: bool = False
    """The proof contains the receipt of the only choice."""
    special_stops: dict[str, int] = {}
    """Special tokens whose texts occur in `stops`: ids by text."""

    @property
    def stop_ids(self) -> list[int]:
        """Ids of the stops that are the text of a special token: D stops there."""
        return [self.special_stops[stop] for stop in self.stops if stop in self.special_stops]


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
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Return the sampling parameters, with every default resolved and every id checked. `options` are those of the same
    body. `max_tokens` is already capped by the context. `more_eos` are ids that end a text in addition to D's own eos
    ids. `bad_words` are token sequences."""
    if body.allowed_token_ids == []:
        raise InvalidRequest("allowed_token_ids must not be empty; left out, any may come", "allowed_token_ids")
    min_tokens, top_k, seed, stop_ids = body.min_tokens or 0, body.top_k or 0, body.seed, body.stop_token_ids
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens must be from 0 to max_tokens ({max_tokens}), not {min_tokens}", "min_tokens")
    if more_eos and not body.ignore_eos:
        stop_ids = [*(stop_ids or ()), *more_eos]
    if options.special_stops:
        stop_ids = [*(stop_ids or ()), *options.stop_ids]
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=0 if top_k < 0 else min(top_k, vocab_size),
        top_p=body.top_p or 1.0,
        min_p=body.min_p or 0.0,
        seed=random.getrandbits(63) if seed is None else seed & SEED_MASK,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
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


def require_a_token(sampling: SamplingParams, eos_ids: frozenset[int]) -> None:
    """Raise InvalidRequest if no allowed token is left. Tokens that `min_tokens` holds back for a while count as
    forbidden, because no token could be drawn meanwhile."""
    if not sampling.allowed_token_ids:
        return
    forbidden = {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.min_tokens:
        forbidden.update(sampling.stop_token_ids, () if sampling.ignore_eos else eos_ids)
    if forbidden.issuperset(sampling.allowed_token_ids):
        raise InvalidRequest(
            "allowed_token_ids: bad_words, and the ends that min_tokens holds back, leave none of them",
            "allowed_token_ids",
        )


def kept_tokens(body: GenerationBody, to_emit: int, max_model_len: int) -> int | None:
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


def with_seed(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of choice `index` of n: with seed + index."""
    if index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) & SEED_MASK)
