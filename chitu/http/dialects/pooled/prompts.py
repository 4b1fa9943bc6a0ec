"""Bodies of `/v1/embeddings`, `/v1/score` and `/v1/rerank` made into prompts that are computed and pooled
(`answers.py`). Pure; part of `BodyWork`.

A prompt here is a request for one token, which is dropped. So no KV moves to D, and everything that holds for a request
holds for it: admission, priorities, retries, cancellation, tenants.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from chitu.errors import ContextLengthExceeded, InvalidRequest
from chitu.http.ask.answer_size import MAX_ANSWER_BYTES
from chitu.http.ask.bodies import MAX_PROMPTS, MAX_TOKENS
from chitu.http.ask.fields import TEXT_ONLY
from chitu.http.ask.parse import BodyParser
from chitu.http.ask.parsed import OutputOptions, ParseContext, ParsedRequest, Prompt
from chitu.http.ask.prompts import prompts_of
from chitu.http.ask.served_model import ModelLimits, ServedModel
from chitu.http.dialects.pooled.answers import PooledAnswer
from chitu.http.dialects.pooled.bodies import EmbeddingsBody, PooledBody, RerankBody, ScoreBody
from chitu.models.pooling import Pooling
from chitu.protocol import RequestOptions, SamplingParams, pack_i32

FLOAT_BYTES = 24
"""JSON of one number of an embedding, at most."""
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The published prompt of Qwen3-Reranker, for folders whose chat template does not have it."""
QUERY_NAMES, DOCUMENT_NAMES = ("text_1", "queries", "data_1"), ("text_2", "documents", "data_2")
"""Names of the two fields of a score, of which the first is this server's own."""
NO_TEXT = ("image", "multi_modal", "video")
"""Keys of a document that would be ranked, and are no text."""
PLAIN = OutputOptions(1, False, False, (), False, True, False)


def read_embeddings(
    parser: BodyParser, body: EmbeddingsBody, context: ParseContext, warnings: list[str]
) -> ParsedRequest:
    model = parser.model
    pooling = _pooling(model, ("last", "mean"))
    dimensions = body.dimensions
    if dimensions is not None and dimensions > model.hidden_size:
        raise InvalidRequest(f"dimensions: the model has {model.hidden_size}, not {dimensions}", "dimensions")
    inputs = prompts_of(body.input, "input")
    is_base64 = body.encoding_format == "base64"
    num_bytes = len(inputs) * (dimensions or model.hidden_size) * (6 if is_base64 else FLOAT_BYTES)
    if num_bytes > MAX_ANSWER_BYTES:
        raise InvalidRequest(f"input: the answer could have {num_bytes} bytes of JSON; send fewer at once", "input")
    given = [pooling.default_prompt + each if isinstance(each, str) else each for each in inputs]
    return _parsed(model, body, pooling, given, "input", context, warnings, dimensions=dimensions, is_base64=is_base64)


def read_score(parser: BodyParser, body: ScoreBody, context: ParseContext, warnings: list[str]) -> ParsedRequest:
    (queries, of_queries), (documents, param) = _texts(body, QUERY_NAMES), _texts(body, DOCUMENT_NAMES)
    if len(queries) not in (1, len(documents)):
        raise InvalidRequest(f"{of_queries} has {len(queries)} texts, and {param} {len(documents)}", of_queries)
    return _scores(parser.model, body, queries, documents, param, context, warnings)


def read_rerank(parser: BodyParser, body: RerankBody, context: ParseContext, warnings: list[str]) -> ParsedRequest:
    documents = [_text_of(each, f"documents[{i}]") for i, each in enumerate(body.documents)]
    texts = documents
    if body.max_tokens_per_doc is not None:
        limits = context.require_limits()
        texts = [_first_text(parser.model, text, body.max_tokens_per_doc, limits) for text in documents]
    parsed = _scores(parser.model, body, [body.query], texts, "documents", context, warnings, body.truncation is True)
    shown = [] if body.return_documents is False else body.documents
    top_n = body.top_n if body.top_n is not None and body.top_n > 0 else len(documents)
    parsed.for_answer = msgspec.structs.replace(
        parsed.for_answer, documents=tuple([_shown(each) for each in shown]), top_n=top_n
    )
    return parsed


def _text_of(given: str | dict[str, msgspec.Raw], where: str) -> str:
    """Return the text of a document. Raise InvalidRequest for one without text, and for one that has more than text to
    rank."""
    if isinstance(given, str):
        return given
    for name in NO_TEXT:
        if name in given and bytes(given[name]) != b"null":
            raise InvalidRequest(f"{where}.{name} is not supported yet; leave it out ({TEXT_ONLY})", f"{where}.{name}")
    try:
        return msgspec.json.decode(given["text"], type=str)
    except (KeyError, msgspec.ValidationError):
        raise InvalidRequest(f"{where}.text is required: the document's text", f"{where}.text") from None


def _shown(given: str | dict[str, msgspec.Raw]) -> bytes:
    return msgspec.json.encode({"text": given} if isinstance(given, str) else given)


def _first_text(model: ServedModel, text: str, num_tokens: int, limits: ModelLimits) -> str:
    """Return the beginning of a text that has so many tokens."""
    most = max(limits.max_model_len, MAX_TOKENS)
    if model.tokenizer.exceeds(text, most, bytes_per_token=1):
        raise ContextLengthExceeded(f"a document of {len(text)} characters has more than {most} tokens; shorten it")
    return model.tokenizer.first_text(text, num_tokens)


def _texts(body: ScoreBody, names: Sequence[str]) -> tuple[list[str], str]:
    """Return the texts of a field that has these names, and which one it has in the body."""
    given = [name for name in names if getattr(body, name) is not None]
    if not given:
        raise InvalidRequest(f"{names[0]} is required", names[0])
    if len(given) > 1:
        raise InvalidRequest(f"{given[1]} and {given[0]} are the same; give one", given[1])
    found: str | list[str] = getattr(body, given[0])
    texts = [found] if isinstance(found, str) else found
    if not 1 <= len(texts) <= MAX_PROMPTS:
        raise InvalidRequest(f"{given[0]}: 1 to {MAX_PROMPTS} texts are accepted", given[0])
    return texts, given[0]


def _scores(
    model: ServedModel,
    body: ScoreBody | RerankBody,
    queries: list[str],
    documents: list[str],
    param: str,
    context: ParseContext,
    warnings: list[str],
    cuts: bool = False,
) -> ParsedRequest:
    """`cuts`: documents that are too long with their query are cut."""
    pooling = _pooling(model, ("last", "mean", "logits"))
    if not 1 <= len(documents) <= MAX_PROMPTS:
        raise InvalidRequest(f"{param}: 1 to {MAX_PROMPTS} texts are accepted", param)
    if pooling.mode == "logits":
        each_query = queries * len(documents) if len(queries) == 1 else queries
        limits = context.require_limits()
        given = [
            _fitting_pair(model, query, document, body.instruction, _most(pooling, limits), limits)
            if cuts
            else _pair_prompt(model, query, document, body.instruction)
            for query, document in zip(each_query, documents, strict=True)
        ]
        return _parsed(model, body, pooling, given, param, context, warnings, adds_special=False)
    if body.instruction is not None:
        raise InvalidRequest("instruction: the model's folder declares embeddings, which take none", "instruction")
    before = [pooling.prompts.get(name, pooling.default_prompt) for name in ("query", "document")]
    prompts = [before[0] + query for query in queries] + [before[1] + document for document in documents]
    pairs = [(0 if len(queries) == 1 else i, len(queries) + i) for i in range(len(documents))]
    return _parsed(model, body, pooling, prompts, param, context, warnings, pairs=tuple(pairs), cuts=cuts)


def _fitting_pair(
    model: ServedModel, query: str, document: str, instruction: str | None, most: int, limits: ModelLimits
) -> str:
    """Return the prompt of a pair, with as much of the document as `most` tokens leave room for."""
    while True:
        prompt = _pair_prompt(model, query, document, instruction)
        over = len(model.encode_to_cut(prompt, False, limits)) - most
        kept = len(model.tokenizer.encode(document, False)) - over if over > 0 else 0
        if kept < 1:  # it fits, or even without the document it does not
            return prompt
        document = model.tokenizer.first_text(document, kept)


def _pair_prompt(model: ServedModel, query: str, document: str, instruction: str | None) -> str:
    """Return the prompt of a pair: by the folder's chat template if that knows queries and documents, else as published
    for Qwen3-Reranker."""
    source = model.tokenizer.template_source
    if "query" in source and "document" in source:
        system = [{"role": "system", "content": instruction}] if instruction is not None else []
        pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return model.tokenizer.apply_chat_template([*system, *pair], None, True, {})
    asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    head = f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n"
    return f"{head}{asked}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def _pooling(model: ServedModel, modes: Sequence[str]) -> Pooling:
    if isinstance(model.pooling, str):
        raise InvalidRequest(model.pooling)
    if model.pooling.mode not in modes:
        raise InvalidRequest("the model's folder declares scores (LogitScore), and no embeddings")
    return model.pooling


def _most(pooling: Pooling, limits: ModelLimits) -> int:
    """Return how many tokens a prompt may have."""
    most = limits.max_model_len - 1
    return most if pooling.max_tokens is None else min(most, pooling.max_tokens)


def _parsed(
    model: ServedModel,
    body: PooledBody,
    pooling: Pooling,
    given: Sequence[str] | Sequence[list[int]] | Sequence[str | list[int]],
    param: str,
    context: ParseContext,
    warnings: list[str],
    adds_special: bool = True,
    *,
    dimensions: int | None = None,
    is_base64: bool = False,
    pairs: tuple[tuple[int, int], ...] = (),
    cuts: bool = False,
) -> ParsedRequest:
    adapter, limits = model.adapter_of(body.model), context.require_limits()
    most = _most(pooling, limits)
    cut = -1 if cuts and body.truncate_prompt_tokens is None else body.truncate_prompt_tokens
    if cut is not None and cut > most:
        raise InvalidRequest(f"truncate_prompt_tokens: at most {most}, not {cut}", "truncate_prompt_tokens")
    sampling = SamplingParams(
        *(1,), temperature=0.0, ignore_eos=True, pooling=pooling.mode, pooled_ids=pooling.token_ids
    )
    prompts = []
    for each in given:
        context.require_client()
        ids = _ids(model, each, adds_special, limits, cut if cut is None or cut > 0 else most)
        if not ids:
            raise InvalidRequest(f"{param}: a text must have at least one token", param)
        if len(ids) > most:
            raise ContextLengthExceeded(
                f"{param}: {len(ids)} tokens; this model takes at most {most} at once (truncate_prompt_tokens cuts)",
                param,
            )
        model.require_known(ids, limits, param, isinstance(each, str))
        prompts.append(Prompt(pack_i32(ids), len(ids), ""))
    counts = tuple(prompt.num_tokens for prompt in prompts)
    answer = PooledAnswer(
        *(pooling.mode, counts, model.hidden_size, pooling.normalizes, dimensions, is_base64, pairs, pooling.is_sigmoid)
    )
    options = msgspec.structs.replace(PLAIN)
    asked = RequestOptions(body.cache_salt or "", body.priority or 0, adapter=adapter)
    parsed = ParsedRequest(prompts, [sampling] * len(prompts), options, asked=asked, for_answer=answer)
    parsed.warnings = warnings
    return parsed


def _ids(
    model: ServedModel, given: str | list[int], adds_special: bool, limits: ModelLimits, most: int | None
) -> list[int]:
    """Return the tokens of an input, cut to its first `most`. Tokens that end every text stay."""
    if not isinstance(given, str):
        return given if most is None else given[:most]
    if most is None:
        return model.encode(given, adds_special, limits)
    ids = model.encode_to_cut(given, adds_special, limits)
    if len(ids) <= most:
        return ids
    around = model.tokenizer.encode("", True) if adds_special else []
    num_before = next((i for i, token in enumerate(around) if ids[i] != token), len(around))
    tail = around[num_before:] if ids[len(ids) - len(around) + num_before :] == around[num_before:] else []
    return ids[: max(0, most - len(tail))] + tail
