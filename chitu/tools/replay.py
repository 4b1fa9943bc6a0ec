"""`chitu replay FILE`: checks whether an engine reproduces the tokens of receipts (`protocol/receipt.py`) in saved
answers. Blocking; in the caller's thread.

The engine is a unified one with the model's folder that is started here, or any running cluster. It gets the prompt's
ids and the sampling of the receipt, and the images that it names, without its prefix cache, and its tokens are
compared. A prompt whose images are not found is not judged. At the first difference:

* A greedy answer that only logits decide is judged by `parity.compare`: every token, after those that were taken. The
  limit follows what rounding does to the engine's own answer to the same prompt.
* Otherwise the receipt is wrong in float32. In other dtypes a draw may fall another way by rounding
  alone, and the receipt is not judged.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import msgspec

from chitu.config.load import api_key
from chitu.known_types import known
from chitu.launch.plan import Entries
from chitu.launch.router_client import RouterClient
from chitu.models.config import read_model_spec
from chitu.protocol import KVLayout
from chitu.protocol.kept_request import DamagedFile, KeptRequest, base64_texts, unpack
from chitu.protocol.receipt import Receipt, changed_fields, sealed, why_other_images
from chitu.tools.replay_images import KnownFiles
from chitu.tools.verify.parity import Place, compare, damage_on_its_way, differences, limit_of
from chitu.tools.verify.probe import CheckedRequest, Impossible, MovedSums, Prober, Score
from chitu.tools.verify.run import EngineShape, engine, layout_of

Verdict = Literal["same", "different", "unjudged"]
EXIT_CODES: dict[Verdict, int] = {"same": 0, "different": 1, "unjudged": 2}
PLAIN = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "allowed_token_ids")
"""Fields of the sampling whose defaults leave a greedy choice to the logits, besides `grammar` and `min_tokens`."""
SNAPSHOT = re.compile(r"[0-9a-f]{64}\n")
AS_THEY_ARE = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
)
LEAST_IMAGE_CHARS = 40
"""Base64 of the smallest image of a snapshot's body that is looked for."""
PAGE_SIZE = 16
"""Page size of the engine that is started."""


class Saved(NamedTuple):
    """A receipt, and what else the saved answer shows."""

    receipt: Receipt
    damage: Place | None = None
    """First page that did not land on D as P wrote it, if the answer has checksums (`return_page_sums`)."""
    logprobs: tuple[float, ...] = ()
    """Logprobs of its tokens, if the answer has them; those of a stream are not read."""
    files: tuple[bytes, ...] = ()
    """What may be images of its prompt: of a snapshot, which has the body."""


class Replayed(msgspec.Struct, frozen=True):
    request_id: str
    verdict: Verdict
    says: str = ""
    place: int = -1
    """Position of the first token that differs, from 0; -1: none, or there was no replay."""


def read_receipts(name: str, text: str) -> list[Saved]:
    """Read the receipts from a receipt, an answer that has one, several of either as JSON lines, a saved stream, or a
    snapshot. Raise Impossible, with the line, for anything else."""
    if SNAPSHOT.match(text):
        try:
            record = unpack(text.encode())
            files = [data for _, _, data in base64_texts(record.body, LEAST_IMAGE_CHARS)] if record.images else []
            return [Saved(_of_snapshot(record), files=(*files, *record.fetched.values()))]
        except DamagedFile as error:
            raise Impossible(f"{name} is a damaged snapshot: {error}") from error
    try:
        lines = [(name, msgspec.Raw(msgspec.json.encode(msgspec.json.decode(text))))]
    except msgspec.DecodeError:
        lines = [(f"{name}:{n}", msgspec.Raw(line.encode())) for n, line in enumerate(text.splitlines(), 1)]
    found = [saved for where, line in lines for saved in _of_line(where, bytes(line).strip())]
    if not found:
        raise Impossible(f"{name} has no receipt: ask with return_proof: true and return_receipt: true")
    return found


def _of_snapshot(record: KeptRequest) -> Receipt:
    """Return a receipt of its tokens so far."""
    return sealed(
        Receipt(
            receipt=1,
            chitu=record.chitu,
            request_id=record.request_id,
            model="",
            model_hash=record.model_hash,
            adapter_hash=record.adapter_hash,
            dtype=cast(Any, record.dtype),
            served=[],
            prompt_token_ids=record.prompt_token_ids,
            images=record.images,
            sampling=record.sampling,
            token_ids=record.token_ids,
            finish=record.finish or "text",
        )
    )


def _of_line(where: str, line: bytes) -> Iterator[Saved]:
    is_event = line.startswith((b"data:", b"event:", b":"))
    data = line.removeprefix(b"data:").strip()
    if not line or data == b"[DONE]" or (is_event and data == line):
        return
    try:
        record, shown = msgspec.json.decode(data), _Shown()
        if isinstance(record, dict) and "receipt" not in record:
            answer = record.get("response", record)
            shown = msgspec.convert(answer, known(_Shown))
            proof = answer.get("chitu") if isinstance(answer, dict) else None
            record = proof.get("receipt") if isinstance(proof, dict) else None
        if record is None and is_event:
            return
        if record is None:
            raise Impossible(f"{where} has no receipt: ask with return_proof: true and return_receipt: true")
        yield Saved(msgspec.convert(record, known(Receipt), str_keys=True), shown.damage, shown.logprobs)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise Impossible(f"{where} is no receipt of this version of chitu: {error}") from error


class _ShownLogprob(msgspec.Struct, frozen=True):
    logprob: float


class _ShownLogprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float | None] = []
    """Of a completion."""
    content: list[_ShownLogprob] = []
    """Of a chat."""


class _ShownChoice(msgspec.Struct, frozen=True):
    logprobs: _ShownLogprobs | None = None


class _ShownAttempt(msgspec.Struct, frozen=True):
    transfer_sums: MovedSums | None = None


class _ShownAttempts(msgspec.Struct, frozen=True):
    attempts: list[_ShownAttempt] = []


class _ShownProof(msgspec.Struct, frozen=True):
    choices: list[_ShownAttempts] = []


class _Shown(msgspec.Struct, frozen=True):
    """What an answer shows beside its receipt."""

    choices: list[_ShownChoice] = []
    chitu: _ShownProof | None = None

    @property
    def damage(self) -> Place | None:
        attempts = [one for choice in self.chitu.choices for one in choice.attempts] if self.chitu is not None else []
        each = (damage_on_its_way(one.transfer_sums) for one in attempts if one.transfer_sums is not None)
        return next((damage for damage in each if damage is not None), None)

    @property
    def logprobs(self) -> tuple[float, ...]:
        found = self.choices[0].logprobs if self.choices else None
        each = (*found.token_logprobs, *(one.logprob for one in found.content)) if found is not None else ()
        return tuple(value for value in each if value is not None)


def replay(saved: Saved, prober: Prober, layout: KVLayout, files: KnownFiles) -> Replayed:
    """Replay a receipt and judge it. `layout`: that of the prober's engine. `files`: images that it may name."""
    receipt, model_hash, dtype = saved.receipt, layout.model_hash, layout.dtype
    if changed := changed_fields(receipt):
        says = f"changed since it was made: {', '.join(changed)}"
        return Replayed(receipt.request_id, "different", says)
    if saved.damage is not None:
        return Replayed(receipt.request_id, "different", f"over {receipt.served[-1]}, {saved.damage.says}")
    if receipt.weights:
        says = f"its weights changed while it was generated, at token {receipt.weights[1][0]} first"
        return Replayed(receipt.request_id, "unjudged", says)
    if model_hash != receipt.model_hash:
        says = f"the engine has another model than the receipt: model_hash {model_hash}, not {receipt.model_hash}"
        return Replayed(receipt.request_id, "unjudged", says)
    if receipt.adapter_hash:
        names = {digest: name for name, digest in layout.adapters}
        if receipt.adapter_hash not in names:
            says = f"the engine has no LoRA adapter with the hash {receipt.adapter_hash} ({receipt.model!r}); give its "
            return Replayed(receipt.request_id, "unjudged", f"{says}folder with --adapter, beside --model")
        prober = replace(prober, model=names[receipt.adapter_hash])
    if not receipt.prompt_token_ids or not receipt.token_ids:
        return Replayed(receipt.request_id, "unjudged", "it has no tokens")
    try:
        fields = fields_of(receipt)
        if receipt.images:
            prober = replace(prober, images=files.urls(receipt.images, saved.files))
            fields["return_receipt"] = True
        own = prober.ask(0, receipt.prompt_token_ids, False, **fields, logprobs=0)
        if own.error:
            raise Impossible(own.error)
        if own.images != tuple(receipt.images):
            why = why_other_images(receipt.images, own.images) or "their rows are others"
            raise Impossible(f"the engine does not have the images of the receipt: {why}")
        has_each = len(saved.logprobs) == len(receipt.token_ids)  # with `echo` there are more
        return judge(receipt, own, prober.scores, dtype, saved.logprobs if has_each else ())
    except Impossible as error:
        return Replayed(receipt.request_id, "unjudged", error.message)


def fields_of(receipt: Receipt) -> dict[str, Any]:
    """Return the fields of a `/v1/completions` body that requests the same. Raise Impossible if none does."""
    sampling = receipt.sampling
    fields: dict[str, Any] = {name: getattr(sampling, name) for name in AS_THEY_ARE}
    for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
        if value := getattr(sampling, name):
            fields[name] = value
    fields["max_tokens"] = sampling.max_tokens if receipt.finish != "text" else len(receipt.token_ids)
    fields["min_tokens"] = min(sampling.min_tokens, fields["max_tokens"])
    grammar = sampling.grammar
    if grammar is None:
        return fields
    if grammar.kind == "tool_calls" or grammar.reasoning is not None:
        what = "of tool calls" if grammar.kind == "tool_calls" else "after a reasoning"
        raise Impossible(f"sampling.grammar: one {what} cannot be requested again")
    if grammar.kind == "json_object":
        fields["response_format"] = {"type": "json_object"}
    elif grammar.kind == "choice":
        fields["guided_choice"] = msgspec.json.decode(grammar.text)
    else:
        name = {"json_schema": "guided_json", "regex": "guided_regex", "lark": "guided_grammar"}[grammar.kind]
        fields[name] = grammar.text
    return fields


def judge(
    receipt: Receipt,
    own: CheckedRequest,
    scores: Callable[[Sequence[int], int], list[Score]],
    dtype: str,
    logprobs: tuple[float, ...] = (),
) -> Replayed:
    """Judge the tokens, and their `logprobs` if there are any, by the engine's own answer. `scores(token_ids, count)`
    returns the engine's scores of the last tokens. `dtype`: of its K and V; if it and the receipt's are float32, no
    draw is excused."""
    tokens, replayed = receipt.token_ids, own.tokens
    place = next((n for n, pair in enumerate(zip(tokens, replayed, strict=False)) if pair[0] != pair[1]), -1)
    if place < 0 and len(tokens) == len(replayed) and not logprobs:
        return Replayed(receipt.request_id, "same")
    if place < 0 and len(tokens) != len(replayed):
        place = min(len(tokens), len(replayed))
        says = f"it has {len(tokens)} tokens, and the engine gives {len(replayed)}, equal up to the shorter one"
        return Replayed(receipt.request_id, "different", says, place)
    if place < 0 or _is_plain(receipt):
        prompt = receipt.prompt_token_ids
        noise = max(differences(own, scores([*prompt, *replayed], len(replayed))))
        limit = limit_of(noise, receipt.dtype, dtype)
        asked = CheckedRequest(0, tokens=tuple(tokens), logprobs=logprobs)
        drawn = None if _is_plain(receipt) else replayed
        judgement = compare(asked, scores([*prompt, *tokens], len(tokens)), drawn, limit)
        if judgement.outcome != "wrong":
            says = f"up to near-ties of two tokens: {judgement.says}" if judgement.says else ""
            return Replayed(receipt.request_id, "same", says, judgement.place)
        return Replayed(receipt.request_id, "different", judgement.says, judgement.place)
    (score,) = scores([*receipt.prompt_token_ids, *tokens[: place + 1]], 1)
    says = f"token {place} is {tokens[place]} (logprob {score.logprob:.4f}), where the engine has {replayed[place]}"
    says += f"; the likeliest is {score.top} ({score.top_logprob:.4f})"
    if receipt.dtype == dtype == "float32":
        return Replayed(receipt.request_id, "different", says, place)
    return Replayed(receipt.request_id, "unjudged", f"{says}; rounding alone may cause that", place)


def _is_plain(receipt: Receipt) -> bool:
    """Return whether each token must be the likeliest one."""
    sampling = receipt.sampling
    defaults = {field.name: field.default for field in msgspec.structs.fields(sampling)}
    is_free = all(getattr(sampling, name) == (defaults[name] if name != "logit_bias" else {}) for name in PLAIN)
    return is_free and sampling.temperature == 0 and sampling.grammar is None and not sampling.min_tokens


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    url: str | None
    """URL of a running cluster; None: an engine with `model` is started."""
    model: str | None = None
    """Checkpoint folder of the engine to start."""
    adapters: tuple[str, ...] = ()
    """Folders of its LoRA adapters."""
    images: tuple[str, ...] = ()
    """Folders with files of images."""
    device: str = "cpu"
    """Device of the engine that is started."""
    concurrency: int = 2
    """Number of requests at once."""
    timeout_s: float = 600.0
    """Timeout of one answer."""
    entries: Entries | None = None


def replay_receipts(options: ReplayOptions, saved: Sequence[Saved], say: Callable[[str], None]) -> list[Replayed]:
    """Return a result for each receipt. Raise Impossible if there is no engine for them, and the errors of
    `LocalCluster` and `RouterClient`."""
    files = KnownFiles(options.images)
    with contextlib.ExitStack() as stack:
        if options.url is not None:
            client = RouterClient(options.url, api_key())
        else:
            assert options.model is not None
            receipts = [one.receipt for one in saved]
            dtypes = {receipt.dtype for receipt in receipts}
            if len(dtypes) > 1:
                raise Impossible(f"receipts of {' and '.join(sorted(dtypes))}: replay those of one dtype at a time")
            longest = max(len(receipt.prompt_token_ids) + receipt.sampling.max_tokens for receipt in receipts)
            most = read_model_spec(options.model, None).max_model_len
            adapters = {f"adapter-{n}": folder for n, folder in enumerate(options.adapters, 1)}
            shape = EngineShape(receipts[0].dtype, min(longest + 1, most), PAGE_SIZE)
            client = stack.enter_context(engine(options.model, options.device, shape, options.entries, say, adapters))
        cluster = client.cluster()
        layout = layout_of(cluster)
        if layout is None:
            raise Impossible(f"{client.url} cannot serve")
        prober = Prober(client, cluster.model, 1, options.timeout_s)
        say(f"replaying {len(saved)} receipts at {client.url}")
        with ThreadPoolExecutor(options.concurrency) as pool:
            return list(pool.map(lambda one: replay(one, prober, layout, files), saved))
