"""The boundary between scheduling and computing: a plain `StepPlan` goes in, a plain `StepResult` comes out.

The scheduler decides what each sequence does; the executor owns the tensors. Only integers and bytes pass between them,
so a plan can be broadcast unchanged to tensor-parallel followers, and the scheduler runs without torch.

A sequence lives in a *slot* of the executor from `admit` to `release`. The slot holds, on the device, its token ids
(prompt and output), its page table, its length in the KV cache (`kv_len`) and its sampling state, so a decode step
names only the slots that take part. Called only by the step thread.

A step may still run when `launch` returns. Steps run in launch order, and a plan's changes to slots hold from its
launch on, so the next plan may be launched before the tokens of this one are read.
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
    """Gives a sequence a slot. `token_ids` (int32 LE): the prompt, then the tokens emitted so far (on a resume)."""

    slot: int
    token_ids: bytes
    prompt_len: int
    """Number of prompt tokens in `token_ids`. The rest is output, emitted here or elsewhere; it counts for penalties
    and for the position in the random sequence of the seed."""
    kv_len: int
    """Tokens whose KV is in the pages before the first forward: for a prefill those in cached pages, which other
    sequences may read too; all of them on D; all but the newest after a retraction."""
    pages: tuple[int, ...]
    sampling: SamplingParams | None
    """None on P, which never samples."""


class AppendPages(PlanPart, frozen=True):
    slot: int
    pages: tuple[int, ...]


class Offload(PlanPart, frozen=True):
    """Copies the pages that hold `kv_len` tokens of this slot to host memory under `key`, then releases the slot."""

    slot: int
    key: int


class CopyPage(PlanPart, frozen=True):
    """Copies page `source` to page `target` of this slot, before the step computes."""

    slot: int
    source: int
    target: int


class Restore(PlanPart, frozen=True):
    """Copies the KV saved under `key` into the pages of this newly admitted slot, and drops the saved copy."""

    slot: int
    key: int


class PrefillChunk(PlanPart, frozen=True):
    """Computes KV of `length` tokens of the slot's token ids from position `start` (its kv_len so far)."""

    slot: int
    start: int
    length: int
    sample: bool = False
    """True for the last chunk on a unified instance: sample a token from the last position's logits."""
    aux_slot: int = -1
    """Aux row for the last position's logits (float32, vocab_size), for the last chunk on P or of a prompt with forks;
    -1 for none."""
    logprobs: int = -1
    """Number of most likely tokens to report with the logprob of the next token at each position; -1 for no logprobs.
    A prompt's last position has none: its next token is not known."""


class FirstToken(PlanPart, frozen=True):
    """Samples token 1 of this slot from the logits in an aux row, on D or for a fork. Needs no KV."""

    slot: int
    aux_slot: int


class StepPlan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One step. The executor processes the fields in this order."""

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
    """Slots that decode: each feeds its newest token at position kv_len and samples the next one."""


class StepResult(msgspec.Struct, array_like=True):
    """Sampled tokens, `tokens[i]` for `slots[i]`: first tokens, then prefills, then decodes, in plan order. A token is
    negative if none can be drawn: a logit of its row is NaN or infinite."""

    slots: list[int]
    tokens: list[int]
    logprobs: dict[int, bytes] = {}
    """Logprobs by index in `tokens`, ascending, if `SamplingParams` ask for them (`protocol/logprobs.py`)."""
    prompt_logprobs: dict[int, bytes] = {}
    """Logprobs by slot, for chunks that ask: lines of equal length as in `logprobs`, in order of position."""
    failures: dict[int, str] = {}
    """Reasons, by slot, why no token can follow the request's grammar. Its token in `tokens` is then invalid."""
    unsound: list[int] = []
    """Slots of prefill chunks that sample nothing and end in numbers that are not finite: neither is their KV."""


def is_sound(result: StepResult) -> bool:
    """Return whether all numbers of a step are finite, as far as it was checked."""
    return not result.unsound and min(result.tokens, default=0) >= 0


class LayerCallback(Protocol):
    def __call__(self, layer: int, ready: Ready | None = None, /) -> None:
        """Note that K and V of this layer, for all chunks of the plan, are in the pages once `ready` has passed, or now
        if it is None. Events of later layers and steps never pass before those of earlier ones."""
        ...


class StepHandle(Protocol):
    """A step that was launched."""

    def is_done(self) -> bool:
        """Return whether `result` would return without waiting."""
        ...

    def result(self) -> StepResult:
        """Wait until the step is done and return its tokens. Then nothing touches its pages and aux rows any more, and
        its writes are visible to every reader. Call it once, in launch order. Raises what `launch` raises, if the
        device reports an error only now."""
        ...


@dataclass(slots=True, frozen=True)
class DoneStep:
    """A step of an executor that computes within `launch`."""

    tokens: StepResult

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.tokens


MAX_UNREAD_STEPS = 2
"""Steps launched and not read, at most: one runs, one waits behind it."""


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
        """Start one step, with at most `MAX_UNREAD_STEPS` unread. On return, `on_layer` was called for every layer, and
        what the plan offloads is in host memory. If it raises, the plan's slots may be in any state, and the caller
        must `forget` them. Raises Internal if the plan is impossible."""
        ...

    def forget(self, slots: Collection[int]) -> None:
        """Drop the contents of these slots, if any, after a launch that raised. Other slots, the KV pages and the saved
        copies stay. No step may be in flight. Raises Internal if the executor cannot do that."""
        ...

    @property
    def saved_keys(self) -> frozenset[int]:
        """Keys under which KV is saved."""
        ...

    def warmup(self) -> None:
        """Run every shape once. Needs no router, bootstrap or peer."""
        ...

    def close(self) -> None: ...
