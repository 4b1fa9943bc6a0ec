"""Requests to a running cluster for verifiable completions: token ids, text, logprobs, and proof of the pair that
served.

Used by `chitu verify` (`tools/verify/run.py`) and by `test/verify_xpyd_topology.py`. Everything a check needs is in the
answer itself (`return_proof`), so other clients may be served meanwhile.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from chitu.errors import ChituError, Integrity
from chitu.known_types import known
from chitu.launch.router_client import RouterClient
from chitu.net.client import EventParser
from chitu.protocol.receipt import ReceiptImage

Pair = tuple[str | None, str]
"""Names of P and D; P is None with a unified instance."""


class Impossible(ChituError):
    """The check cannot run: there is nothing to check, or no reference."""

    code = "impossible"


class MovedSums(msgspec.Struct, frozen=True):
    """Checksums of the pages that P wrote, in hex, layer by layer; see `pages.py`."""

    first_page: int
    layers: int
    """1 if each checksum covers all layers."""
    sent: str
    """From P's memory."""
    landed: str
    """From D's memory."""


class Served(msgspec.Struct, frozen=True):
    """Router's report of a finished request."""

    prefill: str | None
    """Name of P; None: a unified instance served it."""
    decode: str
    prompt_tokens: int
    output_tokens: int
    continued_tokens: int
    """Output tokens of an attempt whose instance was lost, prefilled again by this pair."""
    cached_tokens: int
    kv_bytes: int | None
    ttft_s: float
    """Time from the dispatch to the first token, on the router."""
    page_sums: str = ""
    """Checksums of the pages that it left on D, if requested; see `pages.py`."""
    moved: MovedSums | None = None
    """Checksums of the pages that P wrote, if requested and P wrote any."""
    refused: tuple[Pair, ...] = ()
    """Pairs of earlier attempts whose D rejected P's data (`integrity`)."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """One request, as its client received it and as the router proves it."""

    prompt: int
    """Number of its prompt: greedy answers to one prompt must be equal."""
    request_id: str = ""
    tokens: tuple[int, ...] = ()
    error: str = ""
    served: Served | None = None
    text: str = ""
    """Text of the answer; of a stream its deltas, concatenated."""
    logprobs: tuple[float, ...] = ()
    """Logprobs of `tokens`, if requested."""
    images: tuple[ReceiptImage, ...] = ()
    """Its images, if a receipt was requested."""

    @property
    def pair(self) -> Pair | None:
        return (self.served.prefill, self.served.decode) if self.served is not None else None


class Score(msgspec.Struct, frozen=True):
    """Logprob that an engine gives one token after the prompt and the tokens before it."""

    logprob: float
    top: int
    """The engine's own likeliest token at this position."""
    top_logprob: float


@dataclass(slots=True)
class Prober:
    """Sends verification requests to the router. Thread-safe: each call has a connection of its own."""

    client: RouterClient
    model: str
    max_tokens: int
    timeout_s: float
    images: tuple[str, ...] = ()
    """Images of its prompts of token ids, as URLs."""

    def ask(self, number: int, prompt: str | Sequence[int], stream: bool, **options: Any) -> CheckedRequest:
        """Send one request, greedy and without the prefix cache unless `options` override it. Return errors, too."""
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": self.max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "return_proof": True, "cache_prompt": False}
        body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        body |= self._images
        request_id = uuid.uuid4().hex
        try:
            _, reply = self.client.post("/v1/completions", body | options, self.timeout_s, request_id)
            return read_answer(number, request_id, reply, stream)
        except ChituError as error:
            return CheckedRequest(number, request_id, error=f"{error.code}: {error.message}")
        except (ValueError, msgspec.ValidationError) as error:
            return CheckedRequest(number, request_id, error=str(error) or type(error).__name__)

    def scores(self, token_ids: Sequence[int], count: int) -> list[Score]:
        """Return the scores of the last `count` of these tokens. Raise Impossible if the engine does not give them."""
        body = {"model": self.model, "prompt": list(token_ids), "max_tokens": 1, "prompt_logprobs": 1, **self._images}
        try:
            reply = json.loads(self._post("/v1/completions", body)[1])
            entries = reply["choices"][0]["prompt_logprobs"][len(token_ids) - count :]
            return [_score(entry, token) for entry, token in zip(entries, token_ids[-count:], strict=True)]
        except ChituError as error:
            raise Impossible(f"{self.client.url}: {error.code}: {error.message}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise Impossible(f"{self.client.url} gave no logprobs of a prompt: {error!r}") from error

    @property
    def _images(self) -> dict[str, Any]:
        return {"images": self.images} if self.images else {}

    def token_ids(self, text: str) -> list[int]:
        ids: list[int] = json.loads(self._post("/tokenize", {"model": self.model, "prompt": text})[1])["tokens"]
        return ids

    def fitting_prompt(self, number: int, max_model_len: int) -> str:
        """Return a list of numbers that starts to repeat, so that any model has a clear favourite for the next token.
        Lengths differ, from less than a page to several, and leave room for the answer."""
        rng = random.Random(number)
        count = (60, 3, 20, 120)[number % 4]
        while count:
            numbers = " ".join(str(rng.randrange(1000)) for _ in range(count))
            prompt = f"{number}: {numbers}\n{number}: {numbers[:12]}"
            if len(self.token_ids(prompt)) + self.max_tokens <= max_model_len:
                return prompt
            count //= 2
        raise Impossible(
            f"max_tokens is {self.max_tokens}, which leaves no room for a prompt: {self.model} takes {max_model_len} "
            "tokens, prompt and answer together"
        )

    def _post(self, path: str, body: dict[str, Any]) -> tuple[str, bytes]:
        return self.client.post(path, body, self.timeout_s)


class _ProvenAttempt(msgspec.Struct, frozen=True):
    prefill: str | None
    decode: str
    continued_tokens: int
    cached_tokens: int
    kv_bytes: int | None
    first_token_s: float | None
    page_sums: str = ""
    transfer_sums: MovedSums | None = None
    error: str = ""


class _ProvenChoice(msgspec.Struct, frozen=True):
    attempts: list[_ProvenAttempt]


class _ProvenReceipt(msgspec.Struct, frozen=True):
    images: list[ReceiptImage] = []


class _ProvenAnswer(msgspec.Struct, frozen=True):
    choices: list[_ProvenChoice]
    receipt: _ProvenReceipt = _ProvenReceipt()


class _ProvenUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


def read_answer(number: int, request_id: str, reply: bytes, is_stream: bool) -> CheckedRequest:
    """Parse an answer. Raise ValueError if it is malformed, ends with an error or has no proof."""
    events = EventParser().feed(reply) if is_stream else [reply.decode()]
    if is_stream and events[-1:] != ["[DONE]"]:
        raise ValueError(f"the stream was cut off: ...{reply[-80:].decode(errors='replace')!r}")
    tokens: list[int] = []
    logprobs: list[float] = []
    text, proof, usage = "", None, None
    for event in events[:-1] if is_stream else events:
        record = json.loads(event)
        if "error" in record:
            raise ValueError(f"{record['error']['code']}: {record['error']['message']}")
        proof, usage = record.get("chitu", proof), record.get("usage") or usage
        for choice in record["choices"]:
            tokens += choice["token_ids"]
            text += choice["text"]
            logprobs += (choice.get("logprobs") or {"token_logprobs": []})["token_logprobs"]
    if proof is None or usage is None:
        raise ValueError("the answer came without return_proof's object: this is no router of this version of chitu")
    proven = msgspec.convert(proof, known(_ProvenAnswer))
    served = _served(proven, msgspec.convert(usage, known(_ProvenUsage)))
    images = tuple(proven.receipt.images)
    return CheckedRequest(number, request_id, tuple(tokens), "", served, text, tuple(logprobs), images)


def _served(proof: _ProvenAnswer, usage: _ProvenUsage) -> Served:
    """Return the report of the last attempt of the one choice."""
    (choice,) = proof.choices
    last = choice.attempts[-1]
    used = (usage.prompt_tokens, usage.completion_tokens)
    return Served(
        last.prefill,
        last.decode,
        *used,
        last.continued_tokens,
        last.cached_tokens,
        last.kv_bytes,
        last.first_token_s or 0.0,
        last.page_sums,
        last.transfer_sums,
        tuple((one.prefill, one.decode) for one in choice.attempts[:-1] if one.error == Integrity.code),
    )


def _score(entry: dict[str, dict[str, Any]], token: int) -> Score:
    top, best = max(entry.items(), key=lambda item: item[1]["logprob"])
    return Score(entry[str(token)]["logprob"], int(top), best["logprob"])
