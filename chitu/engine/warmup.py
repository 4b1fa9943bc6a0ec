"""Runs the shapes of real steps once before the first request, so that no request pays for lazy initialisation.

Goes through `launch` like everything else, on pages that nobody owns yet. Called by the step thread, alone, before the
instance joins; it needs no router, bootstrap or peer.
"""

from __future__ import annotations

from chitu.engine.executor import Admit, Executor, PrefillChunk, StepPlan, StepResult
from chitu.messages import SamplingParams, pack_i32

WARMUP_PROMPT_TOKENS = 256


def run_warmup(executor: Executor, num_pages: int, page_size: int, samples: bool) -> None:
    """One prefill in two chunks (the second sees the first), then decodes at batch 1 and at the widest that fits."""
    info = executor.info
    prompt_len = min(WARMUP_PROMPT_TOKENS, info.max_model_len - 2, num_pages * page_size - 2)
    if prompt_len < 2:
        return
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True) if samples else None
    prompt = [index % info.vocab_size for index in range(prompt_len)]
    pages = tuple(range((prompt_len + 2 + page_size - 1) // page_size))
    half = prompt_len // 2
    admit = Admit(0, pack_i32(prompt), prompt_len, 0, pages, sampling)
    _run(executor, StepPlan(admit=[admit], prefill=[PrefillChunk(0, 0, half)]))
    _run(executor, StepPlan(prefill=[PrefillChunk(0, half, prompt_len - half, sample=samples)]))
    if samples:
        _run(executor, StepPlan(decode=[0]))
    _run(executor, StepPlan(release=[0]))
    if samples:
        _decode_wide(executor, num_pages, page_size, sampling)


def _decode_wide(executor: Executor, num_pages: int, page_size: int, sampling: SamplingParams | None) -> None:
    """Every slot that the pages allow: one prompt token each, then one decode step."""
    pages_each = 1 if page_size > 1 else 2
    slots = list(range(min(executor.info.num_slots, num_pages // pages_each)))
    admitted = [
        Admit(slot, pack_i32([0]), 1, 0, tuple(range(slot * pages_each, (slot + 1) * pages_each)), sampling)
        for slot in slots
    ]
    _run(executor, StepPlan(admit=admitted, prefill=[PrefillChunk(slot, 0, 1, sample=True) for slot in slots]))
    _run(executor, StepPlan(decode=slots))
    _run(executor, StepPlan(release=slots))


def _run(executor: Executor, plan: StepPlan) -> StepResult:
    return executor.launch(plan).result()
