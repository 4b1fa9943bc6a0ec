"""The executor that computes: a `StepPlan` in, sampled tokens out (`executor.py` defines order and meaning).

Owns the slots, the model and the use of the pool's pages. The pages are the only store of K and V: transfers write into
them without this module's knowledge. Called only by the step thread. Launching a step waits for nothing, unless the
plan offloads: the host knows lengths and everything else it needs without asking the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch

from chitu.engine.batch import SlotTable, upload
from chitu.engine.draft_waves import DraftWaves, Drawn
from chitu.engine.executor import (
    MAX_DRAFT,
    Admit,
    ExecutorInfo,
    FirstToken,
    LayerCallback,
    PrefillChunk,
    Shapes,
    StepHandle,
    StepPlan,
    StepResult,
    run_warmup,
)
from chitu.engine.expert_group import ExpertGroup
from chitu.engine.first_tokens import numbers_of
from chitu.engine.image_features import ImageSteps, tower_cost
from chitu.engine.lanes import Lanes
from chitu.engine.mtp import Forwarded, MtpDrafts
from chitu.engine.pool_moves import PoolMoves
from chitu.engine.sampler import Sampler
from chitu.engine.sampling_ops import is_finite, is_sound
from chitu.engine.shared_draws import SharedDraws, share_draws
from chitu.engine.step_graphs import Recording, StepGraphs
from chitu.engine.step_tokens import (
    ROWS_AT_ONCE,
    Checks,
    FoundRows,
    Guesses,
    Lines,
    Mark,
    StepLogprobs,
    StepTokens,
    joined,
    logprob_lines,
)
from chitu.errors import ConfigError, Internal
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES
from chitu.kv_cache.device_rows import RowSums
from chitu.kv_cache.pool import KVPool
from chitu.models.config import ModelSpec
from chitu.models.layers import DecoderModel, Shard
from chitu.models.model import Model
from chitu.models.tensors import copy_numbers
from chitu.ops.image_rows import ImageTable
from chitu.ops.interface import Ops, Span
from chitu.types import Ready

if TYPE_CHECKING:
    from chitu.ops.kernels.greedy import GreedyKernels


class ModelRunner:
    """An `Executor` on one device.

    `max_model_len`: tokens (prompt plus output) that a slot can hold; at most as many as the model was loaded for.
    `sampler`: None on a P whose plans never sample; `decodes`: False on P, which samples first tokens at most.
    `recording`: how to record steps, which needs a pool with a scratch page; None launches every step operation by
    operation. `warmup_prompts`: see `warmup.Shapes`.
    `mtp_tokens`: tokens that a layer of the model drafts in a row, if it has one for that.
    `experts`: the ranks among which the model's experts are spread.
    `checks_rows`: as in `ExecutorInfo`. `greedy`: kernels for greedy tokens; None for torch's operations.
    `images`: features of images (`image_table`); None if it sees none.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model: Model,
        pool: KVPool,
        num_slots: int,
        max_model_len: int,
        sampler: Sampler | None,
        recording: Recording | None = None,
        warmup_prompts: Sequence[tuple[int, ...]] = (),
        mtp_tokens: int = 1,
        decodes: bool = True,
        experts: ExpertGroup | None = None,
        checks_rows: bool = False,
        greedy: GreedyKernels | None = None,
        images: ImageTable | None = None,
    ) -> None:
        covered = model.num_positions
        if max_model_len > covered:
            raise ConfigError(f"model.max_model_len: {max_model_len} tokens, the model was loaded for {covered}")
        own = {(each.layer, each.name) for each in spec.state if each.dtype == "auto"}
        if pool.layout.groups != spec.groups or any(pool.states[key].dtype != model.dtype for key in own):
            raise Internal("the KV pool was made for another model")
        self._spec = spec
        self._model = model
        self._pool = pool
        self._sampler = sampler
        self._decodes = decodes and sampler is not None
        self._device = pool.device
        places = pool.layout.page_size, pool.num_pages, pool.device, pool.scratch_page, pool.num_state_slots
        self._slots = SlotTable(num_slots, max_model_len, *places, images)
        self._lanes: Lanes | None = None
        self._beside_ops: Ops | None = None
        """What computes in the lane of prompts."""
        self._graphs: StepGraphs | None = None
        if recording is not None:
            if pool.scratch_page is None:
                raise Internal("recorded steps need a scratch page")
            graphs = model, self._slots, pool, recording, spec.has_draft_layer, experts, greedy
            self._graphs = StepGraphs(*graphs)
        self._mtp: MtpDrafts | None = None
        if spec.has_draft_layer:
            if not isinstance(model, DecoderModel):
                raise Internal("a layer that drafts is computed by our own code only")
            self._mtp = MtpDrafts(self._slots, model.hidden_size, model.dtype, mtp_tokens)
        self._draws: SharedDraws | None = None
        """What the main rank drew in the last step, which may still be on its way."""
        self._forwarded: list[Forwarded] = []
        """Forwards of the step that is being launched, before the final norm, for drafts by the model."""
        self._warmup_prompts = warmup_prompts
        self._experts = experts
        self._moves = PoolMoves(self._slots, pool)
        self._images = ImageSteps(images)
        self._least_rows: int | None = None
        """Rows that a recording must have in the step that is being launched (`_recorded_rows`)."""
        self._drafts: dict[int, tuple[int, ...]] = {}
        """Drafts of the step that is being launched, by slot."""
        self._failures: dict[int, str] = {}
        """Reasons, by slot, why its draws have no token."""
        self._logprobs = StepLogprobs(spec.vocab_size, self._device)
        self._waves = DraftWaves(self._slots, self._logprobs)
        self._prompt_lines: dict[int, torch.Tensor] = {}
        """Logprobs, by slot, of the prompt chunks of the step that is being launched."""
        self._lines: list[Lines] = []
        """Logprobs of the sampled tokens of the step that is being launched."""
        self._checks: list[Checks] = []
        """Whether the rows of its chunks that sample nothing are finite."""
        self._greedy = greedy
        self._row_sums = RowSums(pool.aux_row_bytes, pool.device) if checks_rows else None
        self._rows: FoundRows | None = None
        """What was found in the aux rows from which the step that is being launched draws."""
        self._tokens = StepTokens((2 + MAX_DRAFT) * num_slots, self._mark if self._device.type == "cuda" else None)
        self.info = ExecutorInfo(
            num_slots,
            max_model_len,
            spec.vocab_size,
            spec.num_layers + spec.has_draft_layer,
            spec.eos_token_ids,
            pool.layout.adapters,
            most_drafts=0 if pool.num_state_slots else MAX_DRAFT,
            guesses=mtp_tokens if spec.has_draft_layer else 0,
            samples=sampler is not None,
            image_rows=images.num_rows if images is not None else 0,
            tower=tower_cost(model) if images is not None else None,
            whole_images=images is not None and images.shape.whole_images,
            checks_rows=checks_rows,
        )

    @property
    def model(self) -> Model:
        return self._model

    def change_model(self, model: Model) -> None:
        """Compute with the numbers of a model like the present one (`tensors.why_unlike`) from now on. No step is in
        flight. On a GPU, and with recorded steps, tensors stay where they are, and the numbers are copied there."""
        self._images.drop()
        if self._graphs is None and self._device.type == "cpu":
            self._model = model
        else:
            copy_numbers(self._model, model)

    def use_sampler(self, sampler: Sampler) -> None:
        """Sample and decode from now on, as an instance that was P. No step is in flight."""
        self._sampler, self._decodes = sampler, True
        self.info = msgspec.structs.replace(self.info, samples=True)

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def shapes(self) -> Shapes:
        """Shapes of its steps, for the warm-up."""
        pool, draws_first = self._pool, self._sampler is not None and not self._decodes
        rows = pool.num_aux_slots, pool.num_state_slots
        return Shapes(pool.num_pages, pool.layout.page_size, self._decodes, *rows, self._warmup_prompts, draws_first)

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepHandle:
        with torch.inference_mode():
            self._take_draws()
            slots, tokens_N, lines = self._launch(plan, on_layer)
            drawn = slots if self._model.shard is None else self._share(self._model.shard, plan, slots, tokens_N)
            guesses = self._guess(self._mtp, plan, drawn, on_layer) if self._mtp is not None else None
            if self._sampler is not None:
                self._failures.update(self._sampler.take_failures())
            found = self._prompt_lines, self._failures, self._checks, guesses, self._rows
            return self._tokens.launched(slots, tokens_N, lines, *found)

    def use_lanes(self, threads: int) -> None:
        """Have a second lane (`launch_beside`), which shares these threads of the CPU with the step thread."""
        why = "" if isinstance(self._model, DecoderModel) and self._model.shard is None else "the model"
        why = why or ("a group that shares experts" if self._experts is not None else "")
        why = why or ("a device with a queue" if self._device.type != "cpu" else "")
        why = why or ("a recurrent state" if self._pool.num_state_slots else "")
        if why := why or ("a layer that drafts" if self._mtp is not None else ""):
            raise Internal(f"{why} allows no second lane")
        self._lanes = Lanes(threads, torch.set_num_threads)

    def launch_beside(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> tuple[StepHandle, StepHandle]:
        lanes, model = self._lanes, self._model
        if lanes is None or not isinstance(model, DecoderModel):
            raise Internal("there is no lane for prompts")
        with torch.inference_mode():
            self._begin(plan)
            batch, token_ids_T = self._slots.build(plan.prefill, ())
        if self._beside_ops is None:
            self._beside_ops = model.ops.beside()
        beside = replace(model, ops=self._beside_ops)

        def compute() -> torch.Tensor:
            with torch.inference_mode():
                return beside.forward(token_ids_T, batch, self._pool, on_layer)

        chunks = lanes.start(compute, partial(self._read_beside, plan.prefill, batch.spans))
        try:
            rest = StepPlan(first_tokens=plan.first_tokens, decode=plan.decode, drafts=plan.drafts)
            return self.launch(rest), chunks
        except BaseException:
            chunks.drop()
            raise

    def _read_beside(self, chunks: list[PrefillChunk], spans: Sequence[Span], hidden_TD: torch.Tensor) -> StepResult:
        """Draw the first tokens of chunks that were computed in the lane of prompts: the step thread alone touches the
        slots and the sampler."""
        with torch.inference_mode():
            self._forget_step()
            ends = [span.row + span.length - 1 for span in spans]
            slots = [chunk.slot for chunk in chunks if chunk.sample]
            drawn = self._draw(chunks, [], slots, 0, (hidden_TD, ends, hidden_TD.shape[0]))
            tokens_N = drawn.tokens_N if drawn is not None else None
            if self._sampler is not None:
                self._failures.update(self._sampler.take_failures())
            found = self._prompt_lines, self._failures, self._checks
            return self._tokens.launched(
                slots if drawn is not None else [], tokens_N, joined(self._lines), *found
            ).result()

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        """Launch a step and return its result."""
        return self.launch(plan, on_layer).result()

    def warmup(self) -> None:
        run_warmup(self, self.shapes)
        self.record(self._decodes)

    def record(self, is_decoding: bool) -> None:
        """Record every step that is recorded; those that decode only if `is_decoding`. Collective. No step is in
        flight."""
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.record_all(is_decoding)
                if self._mtp is not None and isinstance(self._model, DecoderModel):
                    self._mtp.warm_up(self._model, self._pool, self._graphs.decode_sizes)

    def forget(self, slots: Collection[int]) -> None:
        self._images.drop()
        for slot in slots:
            self._slots.forget(slot)
            if self._mtp is not None:
                self._mtp.forget(slot)
            self._logprobs.release(slot)
            if self._sampler is not None:
                self._sampler.release(slot)
        if self._graphs is not None:
            self._graphs.forget_rows()

    @property
    def saved_keys(self) -> frozenset[int]:
        return self._moves.saved_keys

    def close(self) -> None:
        """Drop saved copies, and what the tower computes. The pool belongs to the service."""
        self._moves.clear()
        self._images.close()
        if self._lanes is not None:
            self._lanes.close()

    # --------------------------------------------------------------------------------------------- the step, in order

    def _launch(
        self, plan: StepPlan, on_layer: LayerCallback | None
    ) -> tuple[list[int], torch.Tensor | None, Lines | None]:
        """Launch the plan. Return the slots that sample, and their tokens and logprobs on the device."""
        numbers_4R = self._begin(plan)
        slots: list[int] = []
        tokens: list[torch.Tensor] = []
        if plan.first_tokens and self._model.is_main:
            tokens.append(self._draw_first(plan.first_tokens, numbers_4R))
            slots.extend(first.slot for first in plan.first_tokens)
        for chunks, decoding in self._forwards(plan):
            sampled_slots = [chunk.slot for chunk in chunks if chunk.sample] + decoding
            drawn = self._forward(chunks, decoding, sampled_slots, len(slots), on_layer)
            if drawn is not None:
                tokens.append(drawn.tokens_N)
                slots.extend(drawn.slots)
        if plan.sizes and not (plan.prefill or plan.decode):
            if self._graphs is not None and self._least_rows:
                self._graphs.decode([], [], self._least_rows)
            else:
                self._model.lend()
        if not tokens:
            return [], None, None
        return slots, tokens[0] if len(tokens) == 1 else torch.cat(tokens), joined(self._lines)

    def _forget_step(self) -> None:
        """Forget what was noted of the step launched last."""
        self._lines, self._prompt_lines, self._checks, self._failures = [], {}, [], {}
        self._forwarded, self._drafts, self._rows = [], {}, None

    def _begin(self, plan: StepPlan) -> torch.Tensor:
        """Change the slots as the plan says, before it computes. Return the numbers of the first tokens, on the
        device."""
        self._forget_step()
        self._drafts = {draft.slot: draft.tokens for draft in plan.drafts}
        self._require_possible(plan)
        self._least_rows = self._recorded_rows(plan)
        if self._experts is not None:
            self._experts.begin(plan.sizes)
        for offload in plan.offload:
            self._moves.save(offload.slot, offload.key)
            self._release(offload.slot)
        for slot in plan.release:
            self._release(slot)
        for key in plan.drop:
            self._moves.drop(key)
        numbers = self._admit_all(plan)
        self._moves.move(plan)
        self._images.see(self._model, plan)
        return numbers

    def _share(
        self, shard: Shard, plan: StepPlan, slots: Sequence[int], tokens_N: torch.Tensor | None
    ) -> Sequence[int]:
        """Give what the main rank drew to every other rank, too. Return its slots. `slots`, `tokens_N`: of the main
        rank."""
        if plan.copy or plan.copy_state:
            # Once the step is done here, the pages may be announced: a peer would overwrite what others still copy.
            shard.all_reduce(torch.zeros(1, device=self._device))
        self._draws = share_draws(shard, plan, self._device, slots, tokens_N)
        drawn = self._draws.slots if self._draws is not None else []
        if self._mtp is not None:
            self._take_draws()
        return drawn

    def _take_draws(self) -> None:
        """Append what the main rank drew in the last step, if it is another rank."""
        draws, self._draws = self._draws, None
        if draws is None:
            return
        draws.wait()
        if self._model.is_main:
            return
        self._slots.append_tokens(draws.slots, draws.tokens_N.clamp(min=0))
        for slot, count in Counter(draws.slots).items():
            if count > 1:
                self._slots.settle(slot, count - 1)

    def _draw_first(self, first_tokens: Sequence[FirstToken], numbers_4R: torch.Tensor) -> torch.Tensor:
        """Draw first tokens from aux rows, and append them. `numbers`: as `GreedyKernels.first_tokens` has them. Note
        what is found in the rows that are to be checked: of the bytes that the tokens are drawn from."""
        slots, greedy = [first.slot for first in first_tokens], self._greedy
        sampler = self._sampler_of(slots)
        is_greedy = sampler.is_greedy(slots)
        draws = None if greedy is None or is_greedy else sampler.draws_of(slots)
        if greedy is None or self._logprobs.has(slots) or not (is_greedy or draws is not None):
            return self._sample(self._first_logits(first_tokens, numbers_4R[0]), slots, 0).tokens_N
        tokens_R, found_RC, both = greedy.first_tokens(self._pool.aux, numbers_4R, self._slots.token_ids, draws)
        self._slots.count_tokens(slots)
        if self._row_sums is not None:
            self._note_rows(first_tokens, found_RC, both)
        return tokens_R

    def _note_rows(self, first_tokens: Sequence[FirstToken], found_RC: torch.Tensor, both: torch.Tensor | None) -> None:
        checked = [row for row, first in enumerate(first_tokens) if first.is_checked]
        if len(checked) == len(first_tokens):
            self._rows = FoundRows([first.slot for first in first_tokens], found_RC, both)
        elif checked:
            self._rows = FoundRows([first_tokens[row].slot for row in checked], found_RC[upload(checked, self._device)])

    def _first_logits(self, first_tokens: Sequence[FirstToken], aux_slots_R: torch.Tensor) -> torch.Tensor:
        """Return the logits of aux rows, and note what is found in them."""
        pool = self._pool
        rows_RB = pool.aux[aux_slots_R]
        if self._row_sums is not None and any(first.is_checked for first in first_tokens):
            found_RC = self._row_sums.checked(rows_RB, AUX_HEADER_BYTES + 4 * pool.layout.aux_numbers)
            self._note_rows(first_tokens, found_RC, None)
        logits_RB = rows_RB[:, AUX_HEADER_BYTES : AUX_HEADER_BYTES + 4 * self._spec.vocab_size]
        return logits_RB.view(torch.float32)

    def _guess(
        self, mtp: MtpDrafts, plan: StepPlan, drawn: Sequence[int], on_layer: LayerCallback | None
    ) -> Guesses | None:
        """Compute the drafting layer behind a step, and write the hidden states of prompts to their aux rows. `drawn`:
        slots of the tokens that the step drew, which are appended on every rank."""
        model = self._model
        assert isinstance(model, DecoderModel)
        forward, self._forwarded = _joined(model, self._forwarded), []
        leaving = {chunk.slot for chunk in plan.prefill if chunk.aux_slot >= 0}  # nothing follows their tokens here
        drawn = [slot for slot in drawn if slot not in leaving] if leaving else drawn
        if plan.first_tokens:
            mtp.take_hidden([first.slot for first in plan.first_tokens], self._hidden_of(model, plan.first_tokens))
        if forward is not None:
            for chunk, span in zip(plan.prefill, forward.spans, strict=True):
                if chunk.aux_slot >= 0 and model.is_main:
                    self._pool.aux_hidden[chunk.aux_slot] = forward.hidden_TD[span.row + span.length - 1]
        waiting = {first.slot for first in plan.first_tokens if not first.has_kv}
        callback = self._with_event(on_layer) if plan.prefill else None
        return mtp.compute(model, self._pool, forward, drawn, waiting, callback)

    def _hidden_of(self, model: DecoderModel, first_tokens: Sequence[FirstToken]) -> torch.Tensor:
        """Return the hidden states `[R, D]` of aux rows, float32. The main rank has these rows, and all get them."""
        if model.is_main:
            hidden_RD = self._pool.aux_hidden[upload([first.aux_slot for first in first_tokens], self._device)]
        else:
            hidden_RD = torch.zeros(len(first_tokens), model.hidden_size, device=self._device)
        return hidden_RD if model.shard is None else model.shard.all_reduce(hidden_RD)

    def _require_possible(self, plan: StepPlan) -> None:
        """Raise Internal for drafts that this model cannot take."""
        for draft in plan.drafts:
            known = draft.slot in plan.decode and 0 < len(draft.tokens) <= self.info.most_drafts
            if not known or not 0 <= min(draft.tokens) <= max(draft.tokens) < self._spec.vocab_size:
                raise Internal(f"a draft of {len(draft.tokens)} tokens for slot {draft.slot} is impossible: {draft}")

    def _recorded_rows(self, plan: StepPlan) -> int | None:
        """Return the least rows of a recording of this step's decodes: those of the member with most rows; 0 if no
        other member has a part in it. None if the step is not recorded. All members of a group return the same."""
        if self._graphs is None or not plan.sizes:
            return None if self._graphs is None else 0
        most = max(each.decode_rows for each in plan.sizes)
        has_prompts = any(each.prompt_rows for each in plan.sizes)
        return None if has_prompts or most > self._graphs.most_decode_rows else most

    def _num_rows(self, decoding: Sequence[int]) -> int:
        """Return how many rows these slots decode."""
        num_drafted = sum(len(self._drafts.get(slot, ())) for slot in decoding) if self._drafts else 0
        return len(decoding) + num_drafted

    def _forwards(self, plan: StepPlan) -> list[tuple[list[PrefillChunk], list[int]]]:
        """Return what is computed together, in the order of the plan: everything; or if the step is recorded, chunks,
        decodes, and decodes from the first one with a LoRA adapter on, which no recording has."""
        if self._least_rows is None:
            return [(plan.prefill, plan.decode)] if plan.prefill or plan.decode else []
        first = len(plan.decode)
        if self._slots.has_adapter(plan.decode):
            first = next(i for i, slot in enumerate(plan.decode) if self._slots.has_adapter((slot,)))
        decoding, adapted = plan.decode[:first], plan.decode[first:]
        forwards = [(plan.prefill, list[int]()), ([], decoding), ([], adapted)]
        return [(chunks, slots) for chunks, slots in forwards if chunks or slots]

    def _forward(
        self,
        chunks: list[PrefillChunk],
        decoding: list[int],
        sampled_slots: list[int],
        first_place: int,
        on_layer: LayerCallback | None,
    ) -> Drawn | None:
        """Compute a forward, with logits only of rows that need them. Return the sampled tokens, or None.

        `first_place`: index of the first of them among the step's tokens.
        """
        is_recorded = self._least_rows is not None and decoding
        if is_recorded and self._graphs is not None and self._is_recorded(self._graphs, decoding):
            return self._replay_decode(self._graphs, decoding, first_place)
        return self._draw(chunks, decoding, sampled_slots, first_place, self._compute(chunks, decoding, on_layer))

    def _draw(
        self,
        chunks: list[PrefillChunk],
        decoding: list[int],
        sampled_slots: list[int],
        first_place: int,
        computed: tuple[torch.Tensor, list[int], int],
    ) -> Drawn | None:
        """Do what `_forward` does behind the layers. `computed`: as `_compute` returns it."""
        hidden_TD, ends, decode_row = computed
        for chunk, end in zip(chunks, ends, strict=True):
            if chunk.logprobs >= 0:
                self._note_prompt_logprobs(chunk, hidden_TD[end + 1 - chunk.length : end + 1])
            elif chunk.pooling:
                self._note_pooled(chunk, hidden_TD[end + 1 - chunk.length : end + 1])
        wanted = [(chunk, row) for chunk, row in zip(chunks, ends, strict=True) if chunk.sample or chunk.aux_slot >= 0]
        self._check_ends(chunks, ends, hidden_TD)
        rows = [row for _, row in wanted] + list(range(decode_row, decode_row + self._num_rows(decoding)))
        if not rows:
            return None
        if len(rows) < hidden_TD.shape[0]:
            hidden_TD = hidden_TD[upload(rows, self._device)]
        logits_RV = self._model.logits(hidden_TD)
        if logits_RV is None:
            return None  # on a tensor-parallel follower: the main rank samples
        in_aux = [(index, chunk) for index, (chunk, _) in enumerate(wanted) if chunk.aux_slot >= 0]
        for index, chunk in in_aux:
            self._pool.aux_logits[chunk.aux_slot] = logits_RV[index]
        if in_aux:  # checked again by whoever samples from there; their KV must not be cached meanwhile
            rows_RV = logits_RV if len(in_aux) == len(rows) else logits_RV[upload([i for i, _ in in_aux], self._device)]
            self._checks.append(Checks([chunk.slot for _, chunk in in_aux], is_sound(rows_RV)))
        if not sampled_slots:
            return None
        picked = [i for i, (chunk, _) in enumerate(wanted) if chunk.sample] + list(range(len(wanted), len(rows)))
        if len(picked) < len(rows):
            logits_RV = logits_RV[upload(picked, self._device)]
        if self._drafts:
            return self._sample_drafts(logits_RV, sampled_slots, first_place)
        return self._sample(logits_RV, sampled_slots, first_place)

    def _is_recorded(self, graphs: StepGraphs, decoding: list[int]) -> bool:
        """Return whether a recording has room for the rows of these slots."""
        return not self._slots.has_adapter(decoding) and self._num_rows(decoding) <= graphs.most_decode_rows

    def _check_ends(self, chunks: list[PrefillChunk], ends: list[int], hidden_TD: torch.Tensor) -> None:
        """Check the last row of chunks without logits: NaN in K or V of a row, or infinity in V, is so in all later
        rows (infinity in K may get no weight). Followers read no step, so the main rank alone checks."""
        parts = zip(chunks, ends, strict=True)
        open_ends = [(chunk.slot, end) for chunk, end in parts if not chunk.sample and chunk.aux_slot < 0]
        if open_ends and self._model.is_main:
            rows_RD = hidden_TD[upload([end for _, end in open_ends], self._device)]
            self._checks.append(Checks([slot for slot, _ in open_ends], is_finite(rows_RD)))

    def _compute(
        self, chunks: list[PrefillChunk], decoding: list[int], on_layer: LayerCallback | None
    ) -> tuple[torch.Tensor, list[int], int]:
        """Return the hidden states of all rows, the last row of each chunk, and the first row of the decodes."""
        is_recorded = self._least_rows is not None and not self._has_adapter(chunks)
        if is_recorded and self._graphs is not None and self._graphs.fits(chunks):
            spans = self._slots.advance_prefill(chunks)
            hidden_TD = self._graphs.prefill(spans)
            self._note_forward(hidden_TD, spans, ())
            if on_layer is not None:  # a recording shows no single layers: they are one write, not many
                on_layer(self._spec.num_layers - 1, self._event(), 0)
            return hidden_TD, [span.row + span.length - 1 for span in spans], hidden_TD.shape[0]
        batch, token_ids_T = self._slots.build(chunks, decoding, self._drafts)
        callback = self._with_event(on_layer) if chunks else None
        hidden_TD = self._model.forward(token_ids_T, batch, self._pool, callback)
        self._note_forward(hidden_TD, batch.spans, batch.decode_slots)
        if self._pool.num_state_slots and batch.spans:
            self._moves.stamp(batch.spans)
        return hidden_TD, [span.row + span.length - 1 for span in batch.spans], batch.decode_row

    def _note_forward(self, hidden_TD: torch.Tensor, spans: Sequence[Span], decode_slots: Sequence[int]) -> None:
        if self._mtp is not None:
            self._forwarded.append(Forwarded(hidden_TD, spans, decode_slots))

    def _has_adapter(self, chunks: list[PrefillChunk]) -> bool:
        return self._slots.has_adapter(chunk.slot for chunk in chunks)

    def _replay_decode(self, graphs: StepGraphs, slots: list[int], first_place: int) -> Drawn | None:
        rows, positions = slots, self._slots.advance_decode(slots)
        if any(slot in self._drafts for slot in slots):
            rows, positions = self._slots.with_drafts(slots, positions, self._drafts)
        logits_BV, greedy_B, hidden_BD = graphs.decode(rows, positions, self._least_rows or 0)
        if hidden_BD is not None:
            self._note_forward(hidden_BD, (), rows)
        if not self._model.is_main:
            return None
        if len(rows) > len(slots):
            return self._sample_drafts(logits_BV, slots, first_place)
        if not self._sampler_of(slots).is_greedy(slots):
            return self._sample(logits_BV, slots, first_place)
        self._slots.count_tokens(slots)
        self._note_logprobs(logits_BV, slots, greedy_B, first_place)
        return Drawn(slots, greedy_B)

    def _sample(self, logits_RV: torch.Tensor, slots: list[int], first_place: int) -> Drawn:
        tokens = self._sampler_of(slots).sample(logits_RV, slots)
        self._slots.append_tokens(slots, tokens.clamp(min=0))  # the next step may read it before the host has
        self._note_logprobs(logits_RV, slots, tokens, first_place)
        return Drawn(slots, tokens)

    def _sample_drafts(self, logits_RV: torch.Tensor, slots: list[int], first_place: int) -> Drawn:
        sampler = self._sampler_of(slots)
        drawn, lines, failures = self._waves.draw(sampler, logits_RV, slots, self._drafts, first_place)
        self._lines += lines
        self._failures.update(failures)
        return drawn

    def _note_prompt_logprobs(self, chunk: PrefillChunk, hidden_TD: torch.Tensor) -> None:
        """Note the chunk's prompt logprobs, from logits of at most `ROWS_AT_ONCE` rows at a time. With tensor
        parallelism every rank computes its part of the logits, and only the main rank gets lines."""
        num_rows = min(chunk.length, self._slots[chunk.slot].num_tokens - 1 - chunk.start)
        targets_T = self._slots.token_ids[chunk.slot, chunk.start + 1 : chunk.start + 1 + num_rows]
        lines = []
        for row in range(0, num_rows, ROWS_AT_ONCE):
            logits_RV = self._model.logits(hidden_TD[row : min(row + ROWS_AT_ONCE, num_rows)])
            if logits_RV is not None:
                most = min(chunk.logprobs, self._spec.vocab_size)
                lines.append(logprob_lines(logits_RV, targets_T[row : row + ROWS_AT_ONCE], most))
        if lines:
            self._prompt_lines[chunk.slot] = torch.cat(lines)

    def _note_pooled(self, chunk: PrefillChunk, hidden_TD: torch.Tensor) -> None:
        """Note what the chunk has of its prompt's pooled states, as the bits of float32. Every rank has all hidden
        states, and computes its part of logits."""
        if chunk.pooling == "logits":
            logits_RV = self._model.logits(hidden_TD[-1:])
            pooled_RD = None if logits_RV is None else logits_RV[:, upload(chunk.pooled_ids, self._device)]
        else:
            rows_RD = hidden_TD[-1:] if chunk.pooling == "last" else hidden_TD
            pooled_RD = self._model.normed(rows_RD).float().sum(0, keepdim=True)
        if pooled_RD is not None and self._model.is_main:
            self._prompt_lines[chunk.slot] = pooled_RD.contiguous().view(torch.int32)

    def _note_logprobs(self, logits_RV: torch.Tensor, slots: list[int], tokens: torch.Tensor, first_place: int) -> None:
        lines = self._logprobs.lines(logits_RV, slots, tokens, first_place)
        if lines is not None:
            self._lines.append(lines)

    def _sampler_of(self, slots: list[int]) -> Sampler:
        """Return the sampler. Raises Internal if a sequence has no sampling parameters."""
        if self._sampler is None or not all(self._slots[slot].samples for slot in slots):
            raise Internal(f"slots {slots}: a plan samples a sequence that was admitted without sampling parameters")
        return self._sampler

    # ------------------------------------------------------------------------------------------------ slots and pages

    def _admit_all(self, plan: StepPlan) -> torch.Tensor:
        """Fill slots and append pages. Return the numbers of the first tokens on the device, where all of it gets by
        one copy."""
        first = plan.first_tokens if self._model.is_main else []
        more, lengths = numbers_of(first, plan.admit, self._slots, self._sampler)
        token_ids, numbers = self._slots.admit(plan.admit, plan.append, more)
        firsts, *drawn = torch.split(numbers, lengths)
        for admit, row, own in zip(plan.admit, token_ids, drawn, strict=True):
            self._admit(admit, row, own if len(own) else None)
        return firsts.view(4, -1)

    def _admit(self, admit: Admit, token_ids: torch.Tensor, numbers: torch.Tensor | None) -> None:
        if self._mtp is not None:
            self._mtp.admit(admit.slot, admit.kv_len)
        if admit.state_slot >= 0:
            self._moves.take_state(admit.state_slot, is_new=not admit.kv_len)
        if admit.sampling is not None:
            if self._sampler is None:
                raise Internal("this executor has no sampler")
            self._sampler.admit(admit.slot, token_ids, admit.prompt_len, admit.sampling, numbers)
            self._logprobs.admit(admit.slot, admit.sampling.logprobs)

    def _release(self, slot: int) -> None:
        if self._mtp is not None:
            self._mtp.forget(slot)
        if self._slots.release(slot).samples and self._sampler is not None:
            self._sampler.release(slot)
            self._logprobs.release(slot)

    def _with_event(self, on_layer: LayerCallback | None) -> LayerCallback | None:
        """Return the callback that also passes an event behind the layer's writes, on a device with its own queue. The
        host goes on launching; the thread that sends the layer waits for the event."""
        if on_layer is None or self._device.type == "cpu":
            return on_layer
        return lambda layer, _ready=None, first_layer=None: on_layer(layer, self._event(), first_layer)

    def _event(self) -> Ready | None:
        """Return an event behind everything launched so far, or None on a device without a queue."""
        if self._device.type != "cuda":
            return None
        # Blocking: a thread that waits for it sleeps.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _mark(self) -> Mark:
        """Return the same for the step thread, which spins if it waits for tokens and sleeps on P, whose transfer
        threads need the CPU."""
        event = torch.cuda.Event(blocking=not self._decodes)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _joined(model: DecoderModel, parts: Sequence[Forwarded]) -> Forwarded | None:
    """Return the forwards of a step as one, behind the final norm. Only the first may have spans."""
    if not parts:
        return None
    hidden_TD = parts[0].hidden_TD if len(parts) == 1 else torch.cat([part.hidden_TD for part in parts])
    decode_slots = [slot for part in parts for slot in part.decode_slots]
    return Forwarded(model.normed(hidden_TD).clone(), parts[0].spans, decode_slots)
