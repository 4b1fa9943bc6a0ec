"""What the fields of a body ask of sampling and of the answer: parameters, options, grammar, size. Pure; part of
`BodyWork`, called by `parse.py` once per request.

Ranges are checked as the body is decoded (`bodies.py`); here are defaults, and what depends on the model or on other
fields. Every error names its field. `response_format`, `structured_outputs` and `guided_*` express the same, so a
request may give one of them; compilation checks the grammar's text (`grammars/compiler.py`). The size of an answer
(prompts times choices times tokens times candidates) is bounded before anything is computed. A stream is counted like a
whole answer: if its client reads slowly, all of it waits here.
"""

from __future__ import annotations

import random

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import ChatBody, CompletionBody, GenerationBody, ResponseFormat, StructuredOutputs
from chitu.http.ask.decoder import cut_character
from chitu.http.ask.parsed import OutputOptions
from chitu.protocol import MAX_GRAMMAR_CHARS, MAX_LOGPROBS, Grammar, GrammarKind, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; a chat's default is the rest of the context."""
SEED_MASK = (1 << 63) - 1
MAX_ID_DIGITS = 20
"""A token id that is given as text has fewer digits than this."""
MAX_ANSWER_BYTES = 64 << 20
"""Largest answer, in bytes of JSON."""
ENTRY_BYTES = 72
"""One token, or one candidate for it, in a list of logprobs."""
TEXT_BYTES = 4
"""A generated token in the text."""
ID_BYTES = 8
"""A generated token in `token_ids`."""
_NOT_GUIDED = (msgspec.UNSET, None, None, None)


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
        raise InvalidRequest(
            "allowed_token_ids must not be empty; leave it out to allow all tokens", "allowed_token_ids"
        )
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
            "allowed_token_ids: no token remains after bad_words and the stop tokens that min_tokens suppresses",
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


class AnswerSize:
    """Size of one request's answer, as far as its prompts are added."""

    def __init__(self, body: GenerationBody, options: OutputOptions, num_prompts: int) -> None:
        self._body = body
        self._options = options
        self._num_prompts = num_prompts
        self._copies = 1 if isinstance(body, ChatBody) else options.num_returned or options.n
        """How often the answer has what belongs to a prompt."""
        self._repeats_logprobs = options.echo and options.logprobs is not None
        counts = (options.prompt_logprobs, options.logprobs if self._repeats_logprobs else None)
        self._prompt_token_bytes = sum([ENTRY_BYTES * (1 + count) for count in counts if count is not None])
        # `best_of` ranks by logprobs, even if the client does not want them.
        candidates = 0 if options.logprobs is None and options.num_returned else options.logprobs
        self._token_bytes = (
            TEXT_BYTES
            + (ID_BYTES if options.return_token_ids else 0)
            + (ENTRY_BYTES * (1 + candidates) if candidates is not None else 0)
        )
        self._of_prompts = self._of_tokens = 0
        self._most_tokens = self._num_prompt_tokens = 0

    def most_tokens(self, num_tokens: int) -> int:
        """Return how many tokens each choice may have after a prompt of `num_tokens`; at least one."""
        left = MAX_ANSWER_BYTES - self._copies * num_tokens * self._prompt_token_bytes
        return max(1, left // (self._options.n * self._token_bytes))

    def add(self, num_tokens: int, max_tokens: int, echo: str) -> None:
        """Add a prompt, its choices of up to `max_tokens`, and its text `echo` that they repeat. Raise InvalidRequest,
        which names what makes the answer large, if it may become too large."""
        echoed = len(msgspec.json.encode(echo)) if echo else 0
        self._of_prompts += self._copies * (num_tokens * self._prompt_token_bytes + echoed)
        self._of_tokens += self._options.n * max_tokens * self._token_bytes
        self._num_prompt_tokens += num_tokens
        self._most_tokens = max(self._most_tokens, max_tokens)
        num_bytes = self._of_prompts + self._of_tokens
        if num_bytes > MAX_ANSWER_BYTES:
            factors = self._factors()
            told = ", ".join([f"{count:,} {what} ({name})" for name, count, what in factors])
            raise InvalidRequest(
                f"the answer may have {num_bytes:,} bytes or more, and at most {MAX_ANSWER_BYTES:,} are given: it "
                f"multiplies {told}; ask for less of one of these",
                factors[0][0],
            )

    def _factors(self) -> list[tuple[str, int, str]]:
        """Return the fields that make the answer large, each with its number and what it counts."""
        body, options, factors = self._body, self._options, []
        of_prompts = self._of_prompts > self._of_tokens
        choices = self._copies if of_prompts else options.n
        if choices > 1:
            name = "best_of" if options.num_returned and choices == options.n else "n"
            factors.append((name, choices, "choices"))
        if self._num_prompts > 1:
            factors.append(("prompt", self._num_prompts, "prompts"))
        if of_prompts and options.prompt_logprobs is not None:
            factors.append(("prompt_logprobs", options.prompt_logprobs, "candidates"))
        if options.logprobs is not None and (self._repeats_logprobs or not of_prompts):
            name = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
            factors.append((name, options.logprobs, "candidates"))
        if of_prompts:
            name = "messages" if isinstance(body, ChatBody) else "echo" if options.echo else "prompt"
            factors.append((name, self._num_prompt_tokens, "prompt tokens"))
        else:
            name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
            factors.append((name, self._most_tokens, "tokens of an answer"))
        return factors


def grammar_of(body: GenerationBody, calls: tuple[Grammar, str] | None = None) -> tuple[Grammar, str] | None:
    """Return the grammar of the answer and the name of its field; None if the answer is free. `calls`: grammar and
    field of tool calls. Raise InvalidRequest for two grammars, and for one that cannot be served."""
    found = [] if calls is None else [calls]
    if body.response_format is not None:
        found += _of_format(body.response_format)
    if body.structured_outputs is not None:
        found += _of_outputs(body.structured_outputs, "structured_outputs.")
        if not found:
            raise InvalidRequest(
                "structured_outputs must have one of json, json_object, regex, choice and grammar",
                "structured_outputs",
            )
    guided = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    if guided != _NOT_GUIDED:
        json, regex, choice, grammar = guided
        found += _of_outputs(StructuredOutputs(json=json, regex=regex, choice=choice, grammar=grammar), "guided_")
    if not found:
        return None
    param = found[0][1]
    if len(found) > 1:
        raise InvalidRequest(f"{found[1][1]} and {param} both define the format of the answer; give one", found[1][1])
    if body.ignore_eos:
        raise InvalidRequest(
            f"ignore_eos cannot be combined with {param}, which determines where the answer ends", "ignore_eos"
        )
    return found[0]


def _of_format(wanted: ResponseFormat) -> list[tuple[Grammar, str]]:
    param = "response_format.json_schema" if wanted.json_schema is not None else "response_format.schema"
    if wanted.json_schema is None and _is_left_out(wanted.schema):
        if wanted.type == "json_schema":
            raise InvalidRequest("response_format.json_schema is required", "response_format.json_schema")
        return [_grammar("json_object", "", "response_format")] if wanted.type == "json_object" else []
    if wanted.type == "text":
        raise InvalidRequest(f"{param} defines a JSON schema, but the type is 'text'; use json_schema", param)
    if wanted.json_schema is None:
        return [_grammar("json_schema", _schema(wanted.schema, param), param)]
    if not _is_left_out(wanted.schema):
        raise InvalidRequest("response_format.schema and response_format.json_schema are the same; give one", param)
    param = f"{param}.schema"
    return [_grammar("json_schema", _schema(wanted.json_schema.schema, param), param)]


def _of_outputs(outputs: StructuredOutputs, name: str) -> list[tuple[Grammar, str]]:
    found = []
    if not _is_left_out(outputs.json):
        found.append(_grammar("json_schema", _schema(outputs.json, f"{name}json"), f"{name}json"))
    if outputs.json_object:
        found.append(_grammar("json_object", "", f"{name}json_object"))
    if outputs.regex is not None:
        found.append(_grammar("regex", outputs.regex, f"{name}regex"))
    if outputs.choice is not None:
        found.append(_grammar("choice", msgspec.json.encode(outputs.choice).decode(), f"{name}choice"))
    if outputs.grammar is not None:
        found.append(_grammar("lark", outputs.grammar, f"{name}grammar"))
    return found


def _grammar(kind: GrammarKind, text: str, param: str) -> tuple[Grammar, str]:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{param}: {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are accepted", param)
    return Grammar(kind, text), param


def _is_left_out(value: msgspec.Raw | msgspec.UnsetType) -> bool:
    return value is msgspec.UNSET or bytes(value) == b"null"


def _schema(value: msgspec.Raw | msgspec.UnsetType, param: str) -> str:
    """Return the schema as JSON. It is given as an object, or as a text that holds one."""
    if _is_left_out(value):
        raise InvalidRequest(f"{param} is required", param)
    assert value is not msgspec.UNSET
    given = bytes(value)
    try:
        text = msgspec.json.decode(given, type=str) if given[:1] == b'"' else given.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise cut_character(given, param) or InvalidRequest(f"{param} is not valid JSON: {error}", param) from error
    if not text.lstrip().startswith("{"):
        raise InvalidRequest(f"{param} must be a JSON schema: an object, or a text that holds one", param)
    return text
