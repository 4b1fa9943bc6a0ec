"""The boundary between scheduling and computing: a plain `StepPlan` goes in, a plain `StepResult` comes out.

The scheduler owns which sequence does what; the executor owns tensors. Between the two nothing but integers and bytes
travels, so a plan can be broadcast to tensor-parallel followers as it is, and the scheduler runs without torch.

A sequence lives in a *slot* of the executor from `admit` to `release`. The slot holds, on the device, its token ids
(prompt and output), its page table, its length in the KV cache (`kv_len`) and its sampling state, so a decode step says
only which slots take part. Called by the step thread alone.

A step may still run when `launch` returns. Steps run in the order of their launches, and everything that a plan says of
slots holds from its launch on, so the next plan may be launched before the tokens of this one are read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import msgspec

from chitu.protocol import SamplingParams
from chitu.types import Ready


class PlanPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the records in a plan."""


class Admit(PlanPart, frozen=True):
    """Give a sequence a slot. `token_ids` (int32 LE) is prompt plus tokens emitted so far (for a resume)."""

    slot: int
    token_ids: bytes
    prompt_len: int
    """The first `prompt_len` of `token_ids` are the prompt; the rest is output, emitted here or elsewhere: it counts
    for penalties and as the seed's position."""
    kv_len: int
    """Tokens whose KV is (or will be, before the first forward) in the pages: of a prefill those in cached pages, which
    others may read too; all on D, all but the newest after a retraction."""
    pages: tuple[int, ...]
    sampling: SamplingParams | None
    """None on P, which never samples."""


class AppendPages(PlanPart, frozen=True):
    slot: int
    pages: tuple[int, ...]


class Offload(PlanPart, frozen=True):
    """Copy the pages that hold `kv_len` tokens of this slot to host memory under `key`, then release the slot."""

    slot: int
    key: int


class CopyPage(PlanPart, frozen=True):
    """Copy what lies in page `source` to `target`, a page of this slot, ahead of what the step computes."""

    slot: int
    source: int
    target: int


class Restore(PlanPart, frozen=True):
    """Copy the KV saved under `key` into the pages of this freshly admitted slot, and drop the saved copy."""

    slot: int
    key: int


class PrefillChunk(PlanPart, frozen=True):
    """Compute KV of `length` tokens of the slot's token ids from position `start` (== its kv_len so far)."""

    slot: int
    start: int
    length: int
    sample: bool = False
    """Last chunk on a unified instance: sample a token from the last position's logits."""
    aux_slot: int = -1
    """Last chunk on P, or of a prompt with forks: write the last position's logits (float32, vocab_size) to this aux
    row."""
    logprobs: int = -1
    """Not -1: logprobs of the tokens behind each position of the chunk, with so many most likely ones. Of a prompt's
    last position nothing: its token is not there."""


class FirstToken(PlanPart, frozen=True):
    """D, or a fork: sample token 1 of this slot from the logits in an aux row. Needs no KV."""

    slot: int
    aux_slot: int


class StepPlan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One step. The executor works through the fields in this order."""

    offload: list[Offload] = []
    release: list[int] = []
    """Slots to forget."""
    drop: list[int] = []
    """Saved host copies to forget (a retracted request was cancelled)."""
    admit: list[Admit] = []
    append: list[AppendPages] = []
    copy: list[CopyPage] = []
    restore: list[Restore] = []
    first_tokens: list[FirstToken] = []
    prefill: list[PrefillChunk] = []
    decode: list[int] = []
    """Slots that take one decode step: the newest token goes in at position kv_len, the next one is sampled."""


class StepResult(msgspec.Struct, array_like=True):
    """Sampled tokens, `tokens[i]` for `slots[i]`: first tokens, then sampled prefills, then decodes, in plan order."""

    slots: list[int]
    tokens: list[int]
    logprobs: dict[int, bytes] = {}
    """By place in `tokens`, ascending: of slots admitted with `SamplingParams.logprobs` (`protocol/logprobs.py`)."""
    prompt_logprobs: dict[int, bytes] = {}
    """By slot, of the chunks that ask: lines of equal length as in `logprobs`, in order of position."""
    failures: dict[int, str] = {}
    """By slot, why no token of the request can follow its grammar: its token here is none."""


class LayerCallback(Protocol):
    def __call__(self, layer: int, ready: Ready | None = None, /) -> None:
        """K and V of this layer of all chunks of the plan are in the pages, visible to a writer, once `ready` has
        passed; without it they are now. Events of later layers and steps never pass before those of earlier ones."""
        ...


class StepHandle(Protocol):
    """A step that was launched."""

    def is_done(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def result(self) -> StepResult:
        """Wait until all of the step is done: nothing touches its pages and aux rows any more, and what it writes is
        visible to everybody. Its tokens; call it once, and in the order of the launches. Raises what `launch` raises,
        where the device says so only now."""
        ...


@dataclass(slots=True, frozen=True)
class DoneStep:
    """Of an executor that computes within `launch`."""

    tokens: StepResult

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.tokens


MAX_UNREAD_STEPS = 2
"""One runs, one waits behind it."""


class ExecutorInfo(msgspec.Struct, frozen=True):
    num_slots: int
    max_model_len: int
    """Tokens (prompt plus output) that a slot can hold."""
    vocab_size: int
    num_layers: int
    eos_token_ids: tuple[int, ...]


class Executor(Protocol):
    @property
    def info(self) -> ExecutorInfo: ...

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepHandle:
        """Begin one step, with at most `MAX_UNREAD_STEPS` unread. When it returns, `on_layer` was called for every
        layer, and what the plan offloads is in host memory. Where it raises, the slots of the plan may be in any state,
        and the caller has them forgotten. Internal: what the plan says is impossible."""
        ...

    def forget(self, slots: Collection[int]) -> None:
        """After a launch that raised: what these slots hold, if anything, is gone. All else stays: other slots, the
        pages with their KV, and what is saved. With no step in flight. Raises Internal where that cannot be."""
        ...

    @property
    def saved_keys(self) -> frozenset[int]:
        """Under which KV is saved."""
        ...

    def warmup(self) -> None:
        """Run every shape once, on this instance alone: it needs no router, bootstrap or peer."""
        ...

    def close(self) -> None: ...
