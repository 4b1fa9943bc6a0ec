"""The plans that an instance runs before its first request."""

from __future__ import annotations

import msgspec
import pytest

from chitu.engine.executor import (
    MAX_PROMPTS_TOKENS,
    WARMUP_PROMPT_TOKENS,
    DoneStep,
    ExecutorInfo,
    LayerCallback,
    Shapes,
    StepPlan,
    StepResult,
    run_warmup,
)
from chitu.errors import ConfigError


class PlanReader:
    """An `Executor`, as far as the warm-up needs one, that checks each plan against what a slot and the pages allow."""

    def __init__(self, num_slots: int, max_model_len: int, shapes: Shapes) -> None:
        self.info = ExecutorInfo(num_slots, max_model_len, 500, 2, (2,))
        self.shapes = shapes
        self.plans: list[StepPlan] = []
        self.slots: dict[int, tuple[int, ...]] = {}

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> DoneStep:
        self.plans.append(plan)
        for slot in plan.release:
            del self.slots[slot]
        for admit in plan.admit:
            assert 0 <= admit.slot < self.info.num_slots and admit.slot not in self.slots
            assert len(admit.token_ids) == 4 * admit.prompt_len <= 4 * self.info.max_model_len
            assert (admit.sampling is not None) == self.shapes.samples
            self.slots[admit.slot] = admit.pages
        pages = [page for pages in self.slots.values() for page in pages]
        assert len(set(pages)) == len(pages) and all(0 <= page < self.shapes.num_pages for page in pages)
        for chunk in plan.prefill:
            assert chunk.start + chunk.length <= len(self.slots[chunk.slot]) * self.shapes.page_size
            assert not chunk.sample or self.shapes.samples
            assert chunk.aux_slot < self.shapes.num_aux_slots
        assert {*plan.decode, *(first.slot for first in plan.first_tokens)} <= set(self.slots)
        return DoneStep(StepResult([], []))

    @property
    def chunks(self) -> list[list[tuple[int, int, bool]]]:
        """Return the chunks of each step: length, logits row, and whether it samples."""
        return [[(c.length, c.aux_slot, c.sample) for c in plan.prefill] for plan in self.plans if plan.prefill]


def plans_of(num_slots: int, max_model_len: int, shapes: Shapes) -> PlanReader:
    reader = PlanReader(num_slots, max_model_len, shapes)
    run_warmup(reader, shapes)  # type: ignore[arg-type]
    assert not reader.slots, "every slot is free again"
    return reader


def test_p_computes_logits_into_a_row_and_prompts_that_no_recording_holds() -> None:
    shapes = Shapes(1000, 16, samples=False, num_aux_slots=8, prompts=[(2049,), (1024, 1025)])
    half = WARMUP_PROMPT_TOKENS // 2
    expected = [[(half, -1, False)], [(half, 0, False)], [(2049, 0, False)], [(1024, 0, False), (1025, 1, False)]]
    assert plans_of(4, 8192, shapes).chunks == expected


def test_d_samples_a_token_from_a_row_as_the_first_request_does() -> None:
    reader = plans_of(4, 8192, Shapes(1000, 16, samples=True, num_aux_slots=8))
    first, greedy = (plan for plan in reader.plans if plan.first_tokens)
    assert greedy.admit[0].sampling.temperature == 0.0 < first.admit[0].sampling.temperature
    assert first.first_tokens[0].is_checked and greedy.first_tokens[0].is_checked
    assert first.admit[0].kv_len == first.admit[0].prompt_len, "its KV came from P"
    temperatures = {admit.sampling.temperature for plan in reader.plans for admit in plan.admit if admit.sampling}
    assert len(temperatures) == 2 and 0.0 in temperatures, "argmax, and the kernels of sampling"
    assert not any(plan.first_tokens for plan in plans_of(4, 99, Shapes(99, 16, True, 0)).plans)


@pytest.mark.parametrize("samples", [True, False])
def test_a_token_is_computed_with_each_adapter(samples: bool) -> None:
    reader = PlanReader(4, 99, Shapes(99, 16, samples, num_aux_slots=8))
    reader.info = msgspec.structs.replace(reader.info, adapters=(("sql", "1" * 32), ("tone", "2" * 32)))
    run_warmup(reader, reader.shapes)  # type: ignore[arg-type]
    numbers = [admit.adapter for plan in reader.plans for admit in plan.admit]
    assert numbers[-2:] == [1, 2] and not any(numbers[:-2])

    class Overflowing(PlanReader):
        def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> DoneStep:
            super().launch(plan)
            has_second = any(admit.adapter == 2 for admit in plan.admit)
            return DoneStep(StepResult([], [], unsound=[0] if has_second else []))

    broken = Overflowing(4, 99, reader.shapes)
    broken.info = reader.info
    with pytest.raises(ConfigError, match=r"^model\.adapters\.tone: .* not finite"):
        run_warmup(broken, broken.shapes)  # type: ignore[arg-type]


@pytest.mark.parametrize("samples", [True, False])
@pytest.mark.parametrize(
    ("num_slots", "max_model_len", "num_pages", "page_size"),
    [(1, 8192, 4, 16), (2, 2, 3, 1), (64, 40, 3, 16), (4, 2049, 129, 16), (4, 2048, 400, 16), (3, 4096, 128, 16)],
)
def test_whatever_the_limits_no_plan_is_beyond_them(num_slots, max_model_len, num_pages, page_size, samples) -> None:
    shapes = Shapes(num_pages, page_size, samples, 2, prompts=[(2049,), (1024, 1025, 3), (2048, 1)])
    plans_of(num_slots, max_model_len, shapes)


def test_the_prompts_of_a_warm_up_are_bounded_together() -> None:
    shapes = Shapes(1 << 16, 16, samples=False, num_aux_slots=1, prompts=[(MAX_PROMPTS_TOKENS // 4,)] * 5)
    reader = plans_of(2, 1 << 20, shapes)
    assert sum(length for step in reader.chunks for length, _, _ in step) == WARMUP_PROMPT_TOKENS + MAX_PROMPTS_TOKENS
