"""Sampling parameters and output options from the fields of a body: defaults and ranges. Pure.

Called by `jobs.py`, as part of `BodyWork`, once per request. Every error names its field.
"""

from __future__ import annotations

import random

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.request_bodies import MAX_N, ChatBody, CompletionBody, GenerationBody
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


def _ranged(value: float | None, default: float, low: float, high: float, name: str, open_low: bool = False) -> float:
    if value is None:
        return default
    if not (low < value <= high if open_low else low <= value <= high):
        bounds = f"{'above' if open_low else 'from'} {low:g} {'and at most' if open_low else 'to'} {high:g}"
        raise InvalidRequest(f"{name} must be {bounds}, not {value:g}", name)
    return value


def _token_ids(values: list[int] | None, vocab_size: int, name: str) -> tuple[int, ...]:
    if not values:
        return ()
    for token in values:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{name}: {token} is no token id (0 to {vocab_size - 1})", name)
    return tuple(dict.fromkeys(values))


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, value in (bias or {}).items():
        # Check the length first: Python does not parse integers of thousands of digits.
        if not (len(key) < MAX_ID_DIGITS and key.isascii() and key.isdigit() and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias: {key[:MAX_ID_DIGITS]!r} is no token id (0 to {vocab_size - 1})", "logit_bias"
            )
        result[int(key)] = _ranged(value, 0.0, -100, 100, "logit_bias")
    return result


def output_options(body: GenerationBody) -> OutputOptions:
    """Return the output options of a body. Raise InvalidRequest if one of them is out of range."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_N:
        raise InvalidRequest(f"n must be from 1 to {MAX_N}, not {n}", "n")
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise InvalidRequest("stream_options is allowed only with stream: true", "stream_options")
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if "" in stops:
        raise InvalidRequest("stop must not hold an empty string", "stop")
    best_of = body.best_of or n if isinstance(body, CompletionBody) else n
    if best_of > MAX_N:
        raise InvalidRequest(f"best_of must be from 1 to {MAX_N}, not {best_of}", "best_of")
    if best_of > n and stream:
        raise InvalidRequest("best_of above n is not available with stream: true", "best_of")
    return OutputOptions(
        n=best_of,
        num_returned=n if best_of > n else 0,
        stream=stream,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        continuous_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        stops=stops,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        return_token_ids=bool(body.return_token_ids),
        return_proof=bool(body.return_proof),
        return_receipt=_asks_receipt(body),
        logprobs=_num_logprobs(body),
        prompt_logprobs=_num_prompt_logprobs(body),
        echo=isinstance(body, CompletionBody) and bool(body.echo),
    )


def sampling_params(
    body: GenerationBody,
    options: OutputOptions,
    max_tokens: int,
    vocab_size: int,
    more_eos: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Return the sampling parameters, with every default resolved and every range checked. `options` are those of the
    same body. `max_tokens` is already capped by the context. `more_eos` are ids that end a text in addition to D's own
    eos ids. `bad_words` are token sequences."""
    if body.allowed_token_ids == []:
        raise InvalidRequest("allowed_token_ids must not be empty; left out, any may come", "allowed_token_ids")
    min_tokens = body.min_tokens or 0
    if not 0 <= min_tokens <= max_tokens:
        raise InvalidRequest(f"min_tokens must be from 0 to max_tokens ({max_tokens}), not {min_tokens}", "min_tokens")
    top_k = body.top_k or 0
    if top_k < -1:
        raise InvalidRequest(f"top_k must be at least 1, or 0 or -1 for off, not {top_k}", "top_k")
    seed = body.seed
    if seed is not None and not -(1 << 63) <= seed < 1 << 63:
        raise InvalidRequest("seed must fit in 64 bits", "seed")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_ranged(body.temperature, 1.0, 0, 2, "temperature"),
        top_k=min(max(top_k, 0), vocab_size),
        top_p=_ranged(body.top_p, 1.0, 0, 1, "top_p", open_low=True),
        min_p=_ranged(body.min_p, 0.0, 0, 1, "min_p"),
        seed=random.getrandbits(63) if seed is None else seed & SEED_MASK,
        presence_penalty=_ranged(body.presence_penalty, 0.0, -2, 2, "presence_penalty"),
        frequency_penalty=_ranged(body.frequency_penalty, 0.0, -2, 2, "frequency_penalty"),
        repetition_penalty=_ranged(body.repetition_penalty, 1.0, 0, 10, "repetition_penalty", open_low=True),
        logit_bias=_logit_bias(body.logit_bias, vocab_size) if body.logit_bias else {},
        stop_token_ids=_token_ids(
            [*(body.stop_token_ids or ()), *(() if body.ignore_eos else more_eos)], vocab_size, "stop_token_ids"
        ),
        ignore_eos=bool(body.ignore_eos),
        allowed_token_ids=_token_ids(body.allowed_token_ids, vocab_size, "allowed_token_ids"),
        bad_words=bad_words,
        logprobs=_sampled_logprobs(options),
        prompt_logprobs=_prompt_logprobs(options),
        grammar=grammar,
        page_sums=_asks_page_sums(body),
    )


def _asks_receipt(body: GenerationBody) -> bool:
    if body.return_receipt and not body.return_proof:
        raise InvalidRequest("return_receipt is allowed only with return_proof: true", "return_receipt")
    return bool(body.return_receipt)


def _asks_page_sums(body: GenerationBody) -> bool:
    if body.return_page_sums and not body.return_proof:
        raise InvalidRequest("return_page_sums is allowed only with return_proof: true", "return_page_sums")
    return bool(body.return_page_sums)


def _sampled_logprobs(options: OutputOptions) -> int | None:
    """Return the `logprobs` to request from D: `best_of` ranks by them, even if the client does not want them."""
    return 0 if options.logprobs is None and options.num_returned else options.logprobs


def _prompt_logprobs(options: OutputOptions) -> int | None:
    """Return the `prompt_logprobs` to request from P: for the field, or for a completion that echoes with logprobs."""
    echoed = options.logprobs if options.echo else None
    return options.prompt_logprobs if echoed is None else max(echoed, options.prompt_logprobs or 0)


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


def _num_prompt_logprobs(body: GenerationBody) -> int | None:
    """Return `prompt_logprobs`. Raise InvalidRequest if it is out of range, and with `stream`: events have no place for
    it."""
    count = body.prompt_logprobs
    if count is None or count is False:
        return None
    if count is True or not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"prompt_logprobs must be an integer from 0 to {MAX_LOGPROBS}", "prompt_logprobs")
    if body.stream:
        raise InvalidRequest("prompt_logprobs is not available with stream: true", "prompt_logprobs")
    return count


def _num_logprobs(body: GenerationBody) -> int | None:
    """Return the number of most likely tokens per token; None if no logprobs are requested. Raise InvalidRequest if it
    is out of range, and for `top_logprobs` without `logprobs`."""
    if isinstance(body, CompletionBody):
        name, count = "logprobs", body.logprobs
        if count is None or count is False:
            return None
        if count is True:
            raise InvalidRequest(f"logprobs must be an integer from 0 to {MAX_LOGPROBS}", "logprobs")
    else:
        assert isinstance(body, ChatBody)
        name, count = "top_logprobs", body.top_logprobs or 0
        if not body.logprobs:
            if count:
                raise InvalidRequest("top_logprobs is allowed only with logprobs: true", "top_logprobs")
            return None
    if not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} must be from 0 to {MAX_LOGPROBS}, not {count}", name)
    return count


def wanted_tokens(body: GenerationBody) -> int | None:
    """Return `max_completion_tokens`, else `max_tokens`, as the client gave it. Raise InvalidRequest below 1."""
    name, value = "max_tokens", body.max_tokens
    if body.max_completion_tokens is not None:
        name, value = "max_completion_tokens", body.max_completion_tokens
    if value is not None and value < 1:
        raise InvalidRequest(f"{name} must be at least 1, not {value}", name)
    return value


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
