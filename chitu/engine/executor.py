"""The boundary between scheduling and computing: a plain `StepPlan` goes in, a plain `StepResult` comes out.

The scheduler decides what each sequence does; the executor owns the tensors. Only integers and bytes pass between them,
so a plan can be broadcast unchanged to tensor-parallel followers, and the scheduler runs without torch.

A sequence lives in a *slot* of the executor from `admit` to `release`. The slot holds, on the device, its token ids
(prompt and output), its page table, its length in the KV cache (`kv_len`) and its sampling state, so a decode step
names only the slots that take part. Called only by the step thread.

A step may still run when `launch` returns. Steps run in launch order, and a plan's changes to slots hold from its
launch on, so the next plan may be launched before the tokens of this one are read.

*Warm-up* runs the shapes of real steps before the instance joins, so that no request pays for lazy initialisation. It
goes through `launch` like everything else, on pages that have no owner yet, on the step thread: libraries keep handles
and plans per thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from chitu.errors import ConfigError
from chitu.protocol import Pooled, SamplingParams, pack_i32
from chitu.types import Ready

MAX_UNREAD_STEPS = 2
"""Steps launched and not read, at most: one runs, one waits behind it."""
WARMUP_PROMPT_TOKENS = 256
MAX_DRAFT = 15
"""Most tokens of one draft."""
MAX_PROMPTS_TOKENS = 1 << 17
"""Limit on the tokens of all `Shapes.prompts`: seconds of a large model. The first request of a skipped length pays."""
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, ignore_eos=True)
EDITED = SamplingParams(
    max_tokens=3,
    min_tokens=2,
    temperature=0.8,
    top_k=3,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logit_bias={0: 1.0},
    stop_token_ids=(1,),
    ignore_eos=True,
    allowed_token_ids=(0, 1, 2),
    bad_words=((0, 1),),
    logprobs=1,
)
"""All that a request may ask of the sampler, but for a grammar: a device loads the kernels for it when first used."""


class PlanPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the records in a plan."""


class ImageSpan(PlanPart, frozen=True):
    """Rows of a prompt that are of an image: `length` of them, from position `start` on."""

    start: int
    length: int
    grid: tuple[int, int, int] = (0, 0, 0)
    """As in `ImagePart`."""
    rows: bytes = b""
    """Rows of the feature region (`ExecutorInfo.image_rows`) with its features, int32 LE; empty if they are not known
    yet (`PlaceImage` names them) or if none of its rows is computed here. The steps that compute its rows read them."""
    time: int = 0
    continues: bool = False
    """Both as in `ImagePart`."""


class EncodeImage(PlanPart, frozen=True):
    """Computes the features of one image into rows of the feature region, before the step computes anything else; or
    begins to, if the plan has a `turn`."""

    patches: str
    """As in `PreparedImage`."""
    rows: bytes
    """A row for each feature row of the image, int32 LE."""


class SaveImage(PlanPart, frozen=True):
    """Copies rows of the feature region (int32 LE) to host memory under a number, with their checksums. Waits for the
    device."""

    number: int
    rows: bytes


class LoadImage(PlanPart, frozen=True):
    """Copies what was saved under a number to rows of the feature region (int32 LE), before the step encodes. The copy
    stays. Raises DamagedFeatures if it is not what was saved."""

    number: int
    rows: bytes


class TowerTurn(PlanPart, frozen=True):
    """Computes the vision tower up to a block (`blocks` of `of`), for all images that the newest plan with some in
    `encode` named. With all blocks the features are in their rows. With none the images are given up."""

    blocks: int
    of: int

    @property
    def is_last(self) -> bool:
        return self.blocks >= self.of


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
    """None on P, unless it draws the first token, too."""
    state_slot: int = -1
    """Row of the sequence's recurrent state, which belongs to it alone; -1 without one. The executor zeroes it if
    `kv_len` is 0: it then computes from the first token."""
    adapter: int = 0
    """Number of the LoRA adapter that computes with the model, from 1; 0: none."""
    images: tuple[ImageSpan, ...] = ()
    """All rows of images in `token_ids`, in order of position: also those whose KV is in the pages, since they decide
    how later rows are rotated."""


class PlaceImage(PlanPart, frozen=True):
    """Names the rows of the feature region with the features of an admitted slot's span, whose place among
    `Admit.images` is `index`."""

    slot: int
    index: int
    rows: bytes


class AppendPages(PlanPart, frozen=True):
    slot: int
    pages: tuple[int, ...]


class Offload(PlanPart, frozen=True):
    """Copies the pages that hold `kv_len` tokens of this slot, and its state row, to host memory under `key`, then
    releases the slot."""

    slot: int
    key: int


class CopyPage(PlanPart, frozen=True):
    """Copies page `source` to page `target` of this slot, before the step computes."""

    slot: int
    source: int
    target: int


class CopyState(PlanPart, frozen=True):
    """Copies state row `source` to the row of this slot, before the step computes. If the slot has tokens to prefill,
    the row was kept by `KeepState` behind the slot's first `kv_len` tokens."""

    slot: int
    source: int


class KeepState(PlanPart, frozen=True):
    """Copies the state row of this slot, which has taken in `num_tokens`, to row `target`, which no slot has: before
    the step computes, and after `CopyState`."""

    slot: int
    target: int
    num_tokens: int


class Restore(PlanPart, frozen=True):
    """Copies the KV and the state saved under `key` into the pages and the state row of this newly admitted slot, and
    drops the saved copy."""

    slot: int
    key: int


class PrefillChunk(PlanPart, frozen=True):
    """Computes KV of `length` tokens of the slot's token ids from position `start` (its kv_len so far)."""

    slot: int
    start: int
    length: int
    sample: bool = False
    """True for the last chunk on a unified instance: sample a token from the last position's logits. With an `aux_slot`
    (on P) the sequence ends here, and D samples the same token from that row."""
    aux_slot: int = -1
    """Aux row for the last position's logits (float32, vocab_size), for the last chunk on P or of a prompt with forks;
    -1 for none."""
    logprobs: int = -1
    """Number of most likely tokens to report with the logprob of the next token at each position; -1 for no logprobs.
    A prompt's last position has none: its next token is not known."""
    pooling: Pooled = ""
    """What to report of the hidden states behind the final norm, in the place of logprobs: that of the chunk's last
    position (`last`), their sum (`mean`), or its logits of `pooled_ids` (`logits`)."""
    pooled_ids: tuple[int, ...] = ()


class FirstToken(PlanPart, frozen=True):
    """Samples token 1 of this slot from the logits in an aux row, on D or for a fork. Needs no KV."""

    slot: int
    aux_slot: int
    has_kv: bool = False
    """Whether the prompt's KV is here, so that the model can draft behind the token."""
    is_checked: bool = False
    """Whether the step also reports what it found in the row (`StepResult.rows`), if `ExecutorInfo.checks_rows`."""


class Draft(PlanPart, frozen=True):
    """Tokens that may follow the newest one of a slot in `decode`, at most `MAX_DRAFT`. The step computes a row for
    each, too, and draws behind every row whose tokens were all drawn so: 1 to `len(tokens) + 1` tokens."""

    slot: int
    tokens: tuple[int, ...]


class StepSizes(PlanPart, frozen=True):
    """Rows of one member of a group that shares experts, in one step."""

    prompt_rows: int = 0
    decode_rows: int = 0

    @property
    def rows(self) -> int:
        return self.prompt_rows + self.decode_rows


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
    copy_state: list[CopyState] = []
    keep_state: list[KeepState] = []
    restore: list[Restore] = []
    drop_images: list[int] = []
    """Saved features to forget, if there are such."""
    save_images: list[SaveImage] = []
    load_images: list[LoadImage] = []
    encode: list[EncodeImage] = []
    """None while the tower computes others in turns."""
    turn: list[TowerTurn] = []
    """One at most. Without one, the images of `encode` are computed in this step, in one piece."""
    place: list[PlaceImage] = []
    first_tokens: list[FirstToken] = []
    prefill: list[PrefillChunk] = []
    decode: list[int] = []
    """Slots that decode: each feeds its newest token at position kv_len and samples the next one."""
    drafts: list[Draft] = []
    """Of some slots in `decode`, in its order. Such a step is read before the next one is launched."""
    sizes: list[StepSizes] = []
    """What each member of a group that shares experts computes in this step (`lockstep.py`); empty unless one of them
    computes rows. A member without rows lends its experts to the others."""

    @property
    def rows(self) -> StepSizes:
        """Rows that this plan computes."""
        num_drafted = sum([len(draft.tokens) for draft in self.drafts])
        return StepSizes(sum([chunk.length for chunk in self.prefill]), len(self.decode) + num_drafted)


class StepResult(msgspec.Struct, array_like=True):
    """Sampled tokens, `tokens[i]` for `slots[i]`: first tokens, then prefills, then decodes, in plan order. A slot with
    a draft occurs once for each token that it drew, in a row. A token is negative if none can be drawn: a logit of its
    row is NaN or infinite."""

    slots: list[int]
    tokens: list[int]
    logprobs: dict[int, bytes] = {}
    """Logprobs by index in `tokens`, if `SamplingParams` ask for them (`protocol/logprobs.py`)."""
    prompt_logprobs: dict[int, bytes] = {}
    """Logprobs by slot, for chunks that ask: lines of equal length as in `logprobs`, in order of position. Or pooled
    states: a vector `[D]`, float32 LE."""
    failures: dict[int, str] = {}
    """Reasons, by slot, why no token can follow the request's grammar. Its last token in `tokens` is then invalid."""
    unsound: list[int] = []
    """Slots of prefill chunks that sample nothing and end in numbers that are not finite: neither is their KV."""
    drafts: dict[int, list[int]] = {}
    """What the model itself drafts behind the newest token, by slot (`engine/mtp.py`)."""
    rows: dict[int, bytes] = {}
    """Header and checksum of the aux row, by slot, for first tokens that ask (`MetadataBuffers.judge`)."""


def is_sound(result: StepResult) -> bool:
    """Return whether all numbers of a step are finite, as far as it was checked."""
    return not result.unsound and min(result.tokens, default=0) >= 0


class LayerCallback(Protocol):
    def __call__(self, layer: int, ready: Ready | None = None, first_layer: int | None = None, /) -> None:
        """Note that K and V of this layer, or of those from `first_layer` to it, for all chunks of the plan, are in the
        pages once `ready` has passed, or now if it is None. Events of later layers and steps never pass before those of
        earlier ones."""
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


class TowerCost(msgspec.Struct, frozen=True):
    """About what a block of the vision tower costs, in tokens of a prompt: those whose layers multiply as many
    numbers."""

    blocks: int
    row: float
    """For each feature row of an image."""
    square: float
    """For each pair of rows of an image: they attend to each other."""

    def tokens(self, counts: Iterable[int]) -> float:
        """Return what a block costs for images with so many rows each."""
        return sum([self.row * count + self.square * count * count for count in counts])


class ExecutorInfo(msgspec.Struct, frozen=True):
    num_slots: int
    max_model_len: int
    """Tokens (prompt plus output) that a slot can hold."""
    vocab_size: int
    num_layers: int
    eos_token_ids: tuple[int, ...]
    adapters: tuple[tuple[str, str], ...] = ()
    """Name and hash of each LoRA adapter. Its number in `Admit` is its place, from 1."""
    most_drafts: int = 0
    """Most tokens of a draft; 0: it takes none, as a recurrent state cannot go back."""
    guesses: int = 0
    """Most tokens that the model itself drafts (`StepResult.drafts`); 0: none."""
    samples: bool = True
    """Whether it can sample tokens; False on a P that draws no first tokens."""
    image_rows: int = 0
    """Rows of the region for features of images; 0: the model has no vision here."""
    tower: TowerCost | None = None
    """None: the tower is computed in one piece only."""
    whole_images: bool = False
    """Whether a row of an image attends to all rows of it, so that no chunk may end inside one (Gemma 3)."""
    checks_rows: bool = False
    """Whether a step checks the rows that it draws first tokens from, because another thread would wait for its
    device."""


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


class PromptLane(Protocol):
    """An executor with a second lane, in which the chunks of prompts compute while steps go on."""

    def launch_beside(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> tuple[StepHandle, StepHandle]:
        """Launch a step whose chunks compute in the lane of prompts. Return the handle of everything else, to be read
        as that of `launch`, and that of the chunks, to be read in any order with those of the steps launched meanwhile,
        none of which has chunks. Raises as `launch` does, and then nothing computes in the lane. What the chunks raise
        is raised by their `result`. `on_layer` may be called by another thread."""
        ...


class Lockstep(Protocol):
    """The steps of a member of a group that shares experts (`lockstep.py`). Step thread only."""

    @property
    def must_step(self) -> bool:
        """Whether the other members wait for this one: the next turn takes a step, or lends."""
        ...

    @property
    def is_agreed(self) -> bool:
        """Whether every member has offered to change to the same weights: change before the next step."""
        ...

    @property
    def others(self) -> Sequence[StepSizes]:
        """What the other members compute in the newest turn; complete once its step is done."""
        ...

    def lend(self) -> None:
        """Take part in a step of the others without rows of its own, to its end. No step is unread."""
        ...

    def offer(self, weights: int) -> None:
        """Say whether this member may change its weights, and to which (`waves.offer_of`, or `NO_OFFER`). No step is
        unread."""
        ...


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of the steps of an instance."""

    num_pages: int
    page_size: int
    samples: bool
    """Whether they decode."""
    num_aux_slots: int
    """Number of aux rows for logits; 0 on a unified instance."""
    num_state_slots: int = 0
    """Number of state rows; 0 if the model has no recurrent state."""
    prompts: Sequence[tuple[int, ...]] = ()
    """Prompt lengths whose first step costs more than later ones; a tuple holds those of one step."""
    draws_first: bool = False
    """Whether an instance that does not decode draws first tokens."""


def run_warmup(executor: Executor, shapes: Shapes) -> None:
    """Run one prefill in two chunks (the second sees the first) with its logits, a token from an aux row, decodes at
    batch 1 with a draft and at the widest batch that fits, `shapes.prompts`, and a token with each LoRA adapter. Raise
    ConfigError if logits are not finite, also those of a prompt of another token: no request could be served."""
    info, num_pages, page_size = executor.info, shapes.num_pages, shapes.page_size
    prompt_len = min(WARMUP_PROMPT_TOKENS, info.max_model_len - 2, num_pages * page_size - 2)
    if prompt_len < 2:
        return
    half = prompt_len // 2
    admit = _admit(shapes, 0, prompt_len, first_page=0, spare=2, sampling=EDITED)
    _run(executor, StepPlan(admit=[admit], prefill=[PrefillChunk(0, 0, half)]))
    is_finite = is_sound(_run(executor, StepPlan(prefill=[_last(shapes, 0, half, prompt_len - half)])))
    if shapes.samples:
        _run(executor, StepPlan(decode=[0], drafts=[Draft(0, (0,))] if info.most_drafts else []))
    _run(executor, StepPlan(release=[0]))
    if not is_finite:
        _require_finite(executor, shapes, 0)
    if shapes.samples and shapes.num_aux_slots:  # D: the KV and the logits of the last position came from P
        for sampling in (RANDOM, GREEDY):
            came = msgspec.structs.replace(admit, kv_len=prompt_len, sampling=sampling)
            _run(executor, StepPlan(admit=[came], first_tokens=[FirstToken(0, 0, is_checked=True)]))
            _run(executor, StepPlan(release=[0]))
    if shapes.samples:
        _decode_wide(executor, shapes)
    _long_prompts(executor, shapes)
    for number in range(1, len(info.adapters) + 1):
        _require_finite(executor, shapes, number)


def _require_finite(executor: Executor, shapes: Shapes, adapter: int) -> None:
    """Try a prompt of a token other than 0: no text may have that one. With an adapter, try a decode, too."""
    admit = _admit(shapes, 0, 1, 0, spare=1 if adapter else 0, sampling=GREEDY, token=executor.info.vocab_size // 2)
    admit = msgspec.structs.replace(admit, adapter=adapter)
    is_finite = is_sound(_run(executor, StepPlan(admit=[admit], prefill=[_last(shapes, 0, 0, 1)])))
    if shapes.samples and adapter:
        is_finite &= is_sound(_run(executor, StepPlan(decode=[0])))
    _run(executor, StepPlan(release=[0]))
    if not is_finite and adapter:
        name = executor.info.adapters[adapter - 1][0]
        raise ConfigError(
            f"model.adapters.{name}: the model's logits with this LoRA adapter are not finite (NaN or infinite): it is "
            "damaged, or too large for model.dtype"
        )
    if not is_finite:
        raise ConfigError(
            "model.path: the model's logits are not finite (NaN or infinite): its weights are damaged (`chitu doctor` "
            "checks them), or too large for model.dtype"
        )


def _decode_wide(executor: Executor, shapes: Shapes) -> None:
    """Run one prompt token, then one decode step, in as many slots as the pages allow."""
    pages_each = 1 if shapes.page_size > 1 else 2
    num_slots = min(executor.info.num_slots, shapes.num_state_slots or executor.info.num_slots)
    slots = list(range(min(num_slots, shapes.num_pages // pages_each)))
    admitted = [_admit(shapes, slot, 1, slot * pages_each, spare=1, sampling=GREEDY) for slot in slots]
    _run(executor, StepPlan(admit=admitted, prefill=[PrefillChunk(slot, 0, 1, sample=True) for slot in slots]))
    _run(executor, StepPlan(decode=slots))
    _run(executor, StepPlan(release=slots))


def _long_prompts(executor: Executor, shapes: Shapes) -> None:
    info, left = executor.info, MAX_PROMPTS_TOKENS
    for lengths in shapes.prompts:
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] - -length // shapes.page_size)
        num_slots = min(info.num_slots, shapes.num_state_slots or info.num_slots)
        if len(lengths) > num_slots or max(lengths) > info.max_model_len or starts[-1] > shapes.num_pages:
            continue
        left -= sum(lengths)
        if left < 0:
            return
        slots = list(range(len(lengths)))
        admitted = [_admit(shapes, slot, lengths[slot], starts[slot], spare=0, sampling=GREEDY) for slot in slots]
        chunks = [_last(shapes, slot, 0, lengths[slot]) for slot in slots]
        _run(executor, StepPlan(admit=admitted, prefill=chunks))
        _run(executor, StepPlan(release=slots))


def _admit(
    shapes: Shapes,
    slot: int,
    prompt_len: int,
    first_page: int,
    spare: int,
    sampling: SamplingParams,
    token: int = 0,
) -> Admit:
    """Return the admission of a prompt of equal tokens on consecutive pages, with room for `spare` more tokens. The
    state row has the number of the slot."""
    pages = range(first_page, first_page - -(prompt_len + spare) // shapes.page_size)
    tokens = pack_i32([token] * prompt_len)
    state_slot = slot if shapes.num_state_slots else -1
    return Admit(
        slot,
        tokens,
        prompt_len,
        0,
        tuple(pages),
        sampling if shapes.samples or shapes.draws_first else None,
        state_slot,
    )


def _last(shapes: Shapes, slot: int, start: int, length: int) -> PrefillChunk:
    """Return the last chunk of a prompt. It samples, or on P writes its logits to an aux row, too or only."""
    if shapes.samples:
        return PrefillChunk(slot, start, length, sample=True)
    aux_slot = slot if slot < shapes.num_aux_slots else -1
    return PrefillChunk(slot, start, length, sample=shapes.draws_first, aux_slot=aux_slot)


def _run(executor: Executor, plan: StepPlan) -> StepResult:
    return executor.launch(plan).result()
