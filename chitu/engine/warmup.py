"""Warm-up: runs the shapes of real steps before the first request, so that no request pays for lazy initialisation.

Goes through `launch` like everything else, on pages that have no owner yet. Called only by the step thread, before the
instance joins: libraries keep handles and plans per thread. It needs no router, bootstrap or peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chitu.engine.executor import Admit, Executor, FirstToken, PrefillChunk, StepPlan, StepResult, is_sound
from chitu.errors import ConfigError
from chitu.protocol import SamplingParams, pack_i32

WARMUP_PROMPT_TOKENS = 256
MAX_PROMPTS_TOKENS = 1 << 17
"""Limit on the tokens of all `Shapes.prompts`: seconds of a large model. The first request of a skipped length pays."""
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of the steps of an instance."""

    num_pages: int
    page_size: int
    samples: bool
    num_aux_slots: int
    """Number of aux rows for logits; 0 on a unified instance."""
    prompts: Sequence[tuple[int, ...]] = ()
    """Prompt lengths whose first step costs more than later ones; a tuple holds those of one step."""


def run_warmup(executor: Executor, shapes: Shapes) -> None:
    """Run one prefill in two chunks (the second sees the first) with its logits, a token from an aux row, decodes at
    batch 1 and at the widest batch that fits, and `shapes.prompts`. Raise ConfigError if logits are not finite, also
    those of a prompt of another token: no request could be served."""
    info, num_pages, page_size = executor.info, shapes.num_pages, shapes.page_size
    prompt_len = min(WARMUP_PROMPT_TOKENS, info.max_model_len - 2, num_pages * page_size - 2)
    if prompt_len < 2:
        return
    half = prompt_len // 2
    admit = _admit(shapes, 0, prompt_len, first_page=0, spare=2, sampling=RANDOM)
    _run(executor, StepPlan(admit=[admit], prefill=[PrefillChunk(0, 0, half)]))
    is_finite = is_sound(_run(executor, StepPlan(prefill=[_last(shapes, 0, half, prompt_len - half)])))
    if shapes.samples:
        _run(executor, StepPlan(decode=[0]))
    _run(executor, StepPlan(release=[0]))
    if not is_finite:
        _require_finite(executor, shapes)
    if shapes.samples and shapes.num_aux_slots:  # D: the KV and the logits of the last position came from P
        came = Admit(0, admit.token_ids, prompt_len, prompt_len, admit.pages, RANDOM)
        _run(executor, StepPlan(admit=[came], first_tokens=[FirstToken(0, 0)]))
        _run(executor, StepPlan(release=[0]))
    if shapes.samples:
        _decode_wide(executor, shapes)
    _long_prompts(executor, shapes)


def _require_finite(executor: Executor, shapes: Shapes) -> None:
    """Try a prompt of a token other than 0: no text may have that one."""
    admit = _admit(shapes, 0, 1, first_page=0, spare=0, sampling=GREEDY, token=executor.info.vocab_size // 2)
    result = _run(executor, StepPlan(admit=[admit], prefill=[_last(shapes, 0, 0, 1)]))
    _run(executor, StepPlan(release=[0]))
    if not is_sound(result):
        raise ConfigError(
            "model.path: the model's logits are not finite (NaN or infinite): its weights are damaged (`chitu doctor` "
            "looks at them), or too large for model.dtype"
        )


def _decode_wide(executor: Executor, shapes: Shapes) -> None:
    """Run one prompt token, then one decode step, in as many slots as the pages allow."""
    pages_each = 1 if shapes.page_size > 1 else 2
    slots = list(range(min(executor.info.num_slots, shapes.num_pages // pages_each)))
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
        if len(lengths) > info.num_slots or max(lengths) > info.max_model_len or starts[-1] > shapes.num_pages:
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
    """Return the admission of a prompt of equal tokens on consecutive pages, with room for `spare` more tokens."""
    pages = range(first_page, first_page - -(prompt_len + spare) // shapes.page_size)
    tokens = pack_i32([token] * prompt_len)
    return Admit(slot, tokens, prompt_len, 0, tuple(pages), sampling if shapes.samples else None)


def _last(shapes: Shapes, slot: int, start: int, length: int) -> PrefillChunk:
    """Return the last chunk of a prompt. It samples, or on P writes its logits to an aux row."""
    if shapes.samples:
        return PrefillChunk(slot, start, length, sample=True)
    return PrefillChunk(slot, start, length, aux_slot=slot if slot < shapes.num_aux_slots else -1)


def _run(executor: Executor, plan: StepPlan) -> StepResult:
    return executor.launch(plan).result()
