"""Models with recurrent layers, by the modules of transformers over our state rows: logits equal those of transformers,
and a state that is lost, old, another's or mixed up shows in them. Tokens would not show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from checkpoint_table import Checkpoint, Instance, error_of, prompts, undivided_by
from engine_checkpoints import GREEDY, PAGE_SIZE, chunks_of
from recurrent_checkpoints import FAMILIES, write_family

from chitu.engine.build import load_model
from chitu.engine.executor import CopyState, FirstToken, KeepState, PrefillChunk, StepPlan
from chitu.errors import Internal, UnsupportedModel
from chitu.kv_cache.state_row import read_stamp, stamp_of
from chitu.models.config import read_model_spec
from chitu.models.generic.check import check
from chitu.models.model import KVViews
from chitu.ops.interface import Batch
from chitu.protocol import pack_i32

TOLERANCE = 1e-5
SEEN = 1e-3
"""Least error of a planted fault."""
ONE_BLOCK = ("lfm2", "lfm2_moe", "jamba")
"""Families whose convolutions do not run over several blocks side by side."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            made[name] = write_family(tmp_path_factory.mktemp(name), FAMILIES[name])
        return made[name]

    return get


pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]


IN_CI = ("qwen3_next", "kimi_linear", "granite_4_h", "jamba", "lfm2")
"""One of each kind of state: gated delta nets, Kimi's, Mamba-2, Mamba-1, short convolutions."""
FAMILY = pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.by_hand) for name in FAMILIES]
)


@FAMILY
def test_logits_are_those_of_transformers_whatever_the_chunks(checkpoints: Any, name: str) -> None:
    """Ragged prompts, one below a convolution's kernel, then tokens of all sequences together."""
    checkpoint, asked = checkpoints(name), prompts((3, 75, 44))
    instance = Instance(checkpoint.folder)
    for chunk in (1, 37, 512):
        some = asked if chunk > 1 else [prompt[:20] for prompt in asked]
        assert error_of(checkpoint, undivided_by(instance, some, chunk)) < TOLERANCE, chunk


def _row(instance: Instance, slot: int) -> int:
    row: int = instance.engine.state_slot(slot)
    return row


class _HandOver:
    """Two prompts computed by P in chunks of 30, and D, which gets their pages and state rows."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.asked = checkpoint, prompts((90, 75))
        self.source, self.target = Instance(checkpoint.folder, sampling=False), Instance(checkpoint.folder)
        self._here = [self.source.engine.admit(s, p, len(p), sampling=None) for s, p in enumerate(self.asked)]
        pending = [list(chunks_of(slot, len(prompt), 30, aux_slot=slot)) for slot, prompt in enumerate(self.asked)]
        self.before: dict[tuple[int, str], torch.Tensor] = {}
        """The states of P one chunk before the end."""
        admit = self._here
        while any(pending):
            if len(pending[0]) == 1:
                self.before = {key: states.clone() for key, states in self.source.pools[0].states.items()}
            self.source.step(StepPlan(admit=admit, prefill=[chunks.pop(0) for chunks in pending if chunks]))
            admit = []
        self._there = [
            self.target.engine.admit(slot, prompt, len(prompt) + 24, kv_len=len(prompt), sampling=GREEDY)
            for slot, prompt in enumerate(self.asked)
        ]

    @property
    def states(self) -> dict[tuple[int, str], torch.Tensor]:
        return self.target.pools[0].states

    def error(self, fault: Callable[[_HandOver], None] | None = None) -> float:
        """Hand over, plant a fault, decode, and return the error of the logits."""
        mine, theirs, target = self.source.pools[0], self.target.pools[0], self.target
        for sent, received in zip(self._here, self._there, strict=True):
            for region, other in zip(mine.regions, theirs.regions, strict=True):
                other[list(received.pages[: len(sent.pages)])] = region[list(sent.pages)]
            theirs.state_rows[received.state_slot] = mine.state_rows[sent.state_slot]
            theirs.aux[received.slot] = mine.aux[sent.slot]
        target.step(StepPlan(admit=self._there, first_tokens=[FirstToken(slot, slot) for slot in (0, 1)]))
        if fault is not None:
            fault(self)
        target.decode((0, 1), 4)
        answers = [
            (prompt, target.tokens.pop(s), torch.stack(target.recorder.logits.pop(s)))
            for s, prompt in enumerate(self.asked)
        ]
        target.step(StepPlan(release=[0, 1]))
        return error_of(self.checkpoint, answers)


def _no_state(there: _HandOver) -> None:
    for states in there.states.values():
        states.zero_()


def _one_chunk_old(there: _HandOver) -> None:
    for key, states in there.states.items():
        states[_row(there.target, 0)] = there.before[key][_row(there.source, 0)]


def _of_another(there: _HandOver, kind: str) -> None:
    for (_, name), states in there.states.items():
        if name == kind:
            states[_row(there.target, 0)] = states[_row(there.target, 1)].clone()


def _blocks_swapped(there: _HandOver) -> None:
    """Swap the first two blocks of one layer's convolution, as a cut of it as one block would do."""
    tensor = next(each for each in there.target.pools[0].layout.state if each.name == "conv")
    states_SCK = there.states[tensor.layer, "conv"]
    first, second, *rest = states_SCK.split(tensor.cut, 1)
    states_SCK.copy_(torch.cat((second, first, *rest), 1))


FAULTS: dict[str, Callable[[_HandOver], None]] = {
    "no state": _no_state,
    "one chunk old": _one_chunk_old,
    "convolution of another": lambda there: _of_another(there, "conv"),
    "recurrent state of another": lambda there: _of_another(there, "recurrent"),
    "blocks swapped": _blocks_swapped,
}


@FAMILY
def test_pages_and_a_state_row_are_all_that_another_instance_needs(checkpoints: Any, name: str) -> None:
    """And a fault in the state shows in the logits, which are right again without it."""
    there = _HandOver(checkpoints(name))
    assert there.error() < TOLERANCE
    for fault, plant in FAULTS.items():
        if name not in ONE_BLOCK or fault in ("no state", "one chunk old", "convolution of another"):
            assert there.error(plant) > SEEN, fault
    assert there.error() < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_3", "lfm2"])
def test_a_state_row_of_an_earlier_request_is_new_for_the_next(checkpoints: Any, name: str) -> None:
    """Requests come and go in the slots; one goes on while its neighbours change."""
    checkpoint, asked = checkpoints(name), prompts((40, 23, 66, 30, 51))
    instance = Instance(checkpoint.folder)
    engine = instance.engine

    def start(slot: int, prompt: list[int]) -> StepPlan:
        instance.recorder.logits.pop(slot, None)
        instance.tokens.pop(slot, None)
        admit = engine.admit(slot, prompt, len(prompt) + 20)
        return StepPlan(admit=[admit], prefill=list(chunks_of(slot, len(prompt), 512, sample=True)))

    def check(slot: int, prompt: list[int]) -> None:
        logits = torch.stack(instance.recorder.logits[slot])
        assert error_of(checkpoint, [(prompt, instance.tokens[slot], logits)]) < TOLERANCE

    for slot in (0, 1, 2):
        instance.step(start(slot, asked[slot]))
    instance.decode((0, 1, 2), 3)
    for slot, prompt in ((0, asked[3]), (2, asked[4])):
        check(slot, asked[slot])
        assert any(bool(states[_row(instance, slot)].any()) for states in instance.pools[0].states.values())
        instance.step(StepPlan(release=[slot]))
        plan = start(slot, prompt)
        plan.decode.append(1)
        instance.step(plan)
    instance.decode((2, 0, 1), 3)
    for slot, prompt in ((0, asked[3]), (1, asked[1]), (2, asked[4])):
        check(slot, prompt)


@FAMILY
def test_a_prompt_goes_on_from_the_kept_state_of_another(checkpoints: Any, name: str) -> None:
    """With its pages up to there. The state of another place or prompt shows in the logits, and no plan can have it."""
    checkpoint, border = checkpoints(name), 4 * PAGE_SIZE
    first, second, other = prompts((100, 90, 70))
    second = first[:border] + second[border:]
    instance = Instance(checkpoint.folder)
    engine, rows, kept = instance.engine, instance.pools[0].state_rows, instance.engine.state_slot(5)
    origin = engine.admit(0, first, len(first) + 8)
    instance.step(StepPlan(admit=[origin], prefill=[PrefillChunk(0, 0, border)]))
    keep = [KeepState(0, kept, border)]
    instance.step(StepPlan(keep_state=keep, prefill=[PrefillChunk(0, border, len(first) - border, sample=True)]))
    instance.decode((0,), 2)
    assert read_stamp(bytes(rows[kept].numpy())) == stamp_of(pack_i32(first), border)
    for slot, prompt, length in ((2, first, border - PAGE_SIZE), (3, first, border + PAGE_SIZE), (4, other, border)):
        admit = [engine.admit(slot, prompt, len(prompt))]
        instance.step(StepPlan(admit=admit, prefill=[PrefillChunk(slot, 0, length)]))

    def go_on(wrong_slot: int = -1) -> float:
        whole = border // PAGE_SIZE
        admit = engine.admit(1, second, len(second) + 8, kv_len=border)
        admit = msgspec.structs.replace(admit, pages=origin.pages[:whole] + admit.pages[whole:])
        instance.step(StepPlan(admit=[admit], copy_state=[CopyState(1, kept)]))
        if wrong_slot >= 0:
            rows[admit.state_slot] = rows[engine.state_slot(wrong_slot)]
        instance.step(StepPlan(prefill=[PrefillChunk(1, border, len(second) - border, sample=True)]))
        instance.decode((1,), 3)
        answer = second, instance.tokens.pop(1), torch.stack(instance.recorder.logits.pop(1))
        instance.step(StepPlan(release=[1]))
        return error_of(checkpoint, [answer])

    assert go_on() < TOLERANCE
    for slot, fault in ((2, "a page early"), (3, "a page late"), (4, "of another prompt")):
        assert go_on(slot) > SEEN, fault
    assert go_on() < TOLERANCE
    with pytest.raises(Internal, match="is 80 tokens in row"):
        instance.step(StepPlan(keep_state=[KeepState(3, kept, border)]))
    instance.step(StepPlan(keep_state=[KeepState(4, kept, border)]))
    with pytest.raises(Internal, match=f"state row {kept} holds"):
        go_on()


def test_jamba_goes_on_token_by_token_because_its_scan_begins_with_nothing(checkpoints: Any) -> None:
    """The own cache of transformers is wrong here, so that a continued scan must never be used."""
    checkpoint = checkpoints("jamba")
    prompt = prompts((60,))[0]
    cache = transformers.DynamicCache(config=checkpoint.reference.config)
    with torch.inference_mode():
        for start in (0, 30):
            ids, positions = torch.tensor([prompt[start : start + 30]]), torch.arange(start, start + 30).unsqueeze(0)
            out = checkpoint.reference(ids, position_ids=positions, past_key_values=cache, use_cache=True)
        theirs = checkpoint.logits(prompt, [0])[0]
    assert float((out.logits[0, -1] - theirs).abs().max() / theirs.abs().max()) > SEEN


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Zamba2", "recurrent state of 'zamba2' is not known"),
        ("MiniMax", "layers of the kind 'linear_attention'"),
        ("Lfm3", "recurrent state of 'lfm3' is not known"),
        ("Qwen4Exp", "recurrent state of 'qwen4_exp_text' is not known"),
    ],
)
def test_other_recurrent_models_are_refused_by_name(tmp_path: Path, name: str, words: str) -> None:
    config = getattr(transformers, f"{name}Config")().get_text_config()
    config.architectures = [f"{name}ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=words):
        read_model_spec(tmp_path)


@pytest.mark.parametrize("fault", ["nothing is carried", "rows of another"])
@pytest.mark.parametrize("name", ["qwen3_next", "granite_4_h", "nemotron_3", "kimi_linear", "lfm2"])
def test_the_self_check_finds_wrong_states(checkpoints: Any, name: str, fault: str) -> None:
    folder = checkpoints(name).folder
    spec, model = read_model_spec(folder), load_model(folder, "float32")
    right = model.forward

    def wrong(token_ids_T: torch.Tensor, batch: Batch, cache: KVViews, on_layer: Any = None) -> torch.Tensor:
        if fault == "rows of another":
            batch = replace(batch, decode_states=tuple((row + 1) % 3 for row in batch.decode_states))
        else:
            for states in cache.states.values():
                states.zero_()
        return right(token_ids_T, batch, cache, on_layer)

    model.forward = wrong  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModel, match="of the largest away from those of transformers"):
        check(model, spec, torch.device("cpu"))  # type: ignore[arg-type]
