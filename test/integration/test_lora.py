"""Rows with LoRA adapters have the logits of `transformers` with their adapter merged into the weights, whatever rows
are beside them: in a batch with other adapters and with none, in chunks, over P and D, cut for several ranks,
retracted, continued, forked, beside recorded steps. Adapters are folders in PEFT's format."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from checkpoint_table import (
    TOLERANCE,
    Adapted,
    Answers,
    Checkpoint,
    Instance,
    Recorder,
    continued,
    divided,
    error_of,
    forked,
    make_checkpoint,
    prompts,
    retracted,
    undivided,
)
from engine_checkpoints import Engine, chunks_of, write_checkpoint
from safetensors.torch import load_file, save_file
from support.checkpoints import ROWS

from chitu.assets import TINY_MODEL_DIR
from chitu.config.load import load_topology
from chitu.engine.executor import StepPlan
from chitu.engine.step_graphs import EagerRecorder, Recording
from chitu.errors import ConfigError, Internal, UnsupportedModel
from chitu.launch.preflight import look_at_model
from chitu.models.adapters import read_adapter
from chitu.models.config import read_model_spec
from chitu.models.layers import DecoderModel
from chitu.ops.interface import AdapterRows
from chitu.ops.torch_ops import TorchOps

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SQL = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 6,
    "target_modules": list(NAMES),
    "rank_pattern": {"o_proj": 9, r"layers\.1\.self_attn\.q_proj": 2},
    "alpha_pattern": {"v_proj": 3},
    "lora_dropout": 0.1,
    "inference_mode": True,
}
TONE = {
    "peft_type": "LORA",
    "r": 5,
    "lora_alpha": 2,
    "use_rslora": True,
    "target_modules": r".*\.(q_proj|v_proj|down_proj)",
    "exclude_modules": ["layers.1.self_attn.v_proj"],
}
CHOSEN = {0: 2, 1: 1, 3: 1}
"""Number of the adapter, from 1 in the order of names, of four slots; the third has none."""


def sql_layer(name: str) -> tuple[int, float] | None:
    """Return rank and scale by which SQL adapts a layer, written out from its config."""
    last, alpha = name.rpartition(".")[2], 3 if name.endswith("v_proj") else 6
    if last not in NAMES or "experts" in name:
        return None
    rank = 9 if last == "o_proj" else 2 if name.endswith("layers.1.self_attn.q_proj") else 4
    return rank, alpha / rank


def tone_layer(name: str) -> tuple[int, float] | None:
    last = name.rpartition(".")[2]
    if last not in ("q_proj", "v_proj", "down_proj") or "experts" in name or "1.self_attn.v_proj" in name:
        return None
    return 5, 2 / 5**0.5


class Base(NamedTuple):
    """A model with two adapters, and references by the number of the adapter."""

    source: Adapted
    references: dict[int, Checkpoint]

    @property
    def folders(self) -> Mapping[str, str]:
        return self.source.adapters


def write_adapter(folder: Path, config: dict[str, Any], layers: Mapping[str, torch.nn.Linear], adapted: Any) -> None:
    folder.mkdir()
    source, tensors = torch.Generator().manual_seed(sum(folder.name.encode())), {}
    for name, linear in layers.items():
        if (found := adapted(name)) is not None:
            outputs, inputs = linear.weight.shape
            for part, shape in (("A", (found[0], inputs)), ("B", (outputs, found[0]))):
                tensor = torch.randn(shape, generator=source) * 0.1
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = tensor
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def merged(reference: transformers.PreTrainedModel, folder: Path, adapted: Any) -> transformers.PreTrainedModel:
    """Return the model with `scale * B A` added to its weights, in float64."""
    model, tensors = copy.deepcopy(reference), load_file(folder / "adapter_model.safetensors")
    for name, linear in linear_layers(model).items():
        if (found := adapted(name)) is not None:
            a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
            linear.weight.data = (linear.weight.double() + found[1] * b @ a).float()
    return model


def linear_layers(model: transformers.PreTrainedModel) -> dict[str, torch.nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def make_base(folder: Path, family: str) -> Base:
    reference = write_checkpoint(folder / "model", family)
    for name, config, adapted in (("sql", SQL, sql_layer), ("tone", TONE, tone_layer)):
        write_adapter(folder / name, config, linear_layers(reference), adapted)
    models = {0: reference, 1: merged(reference, folder / "sql", sql_layer)}
    models[2] = merged(reference, folder / "tone", tone_layer)
    adapters = {name: str(folder / name) for name in ("sql", "tone")}
    source = Adapted(folder / "model", adapters, CHOSEN)
    return Base(source, {number: Checkpoint(folder / "model", model) for number, model in models.items()})


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return make_base(tmp_path_factory.mktemp("qwen3"), "qwen3")


def four_prompts() -> list[list[int]]:
    return prompts((7, 90, 90, 50))


def worst(base: Base, answers: Answers, chosen: Mapping[int, int] = CHOSEN) -> float:
    """Return the largest error of a logit, each sequence judged by its own adapter."""
    return max(error_of(base.references[chosen.get(slot, 0)], [answer]) for slot, answer in enumerate(answers))


@pytest.mark.parametrize("family", ["llama_biases", "mistral", "qwen2", "qwen3_moe"])
def test_rows_of_several_adapters_and_of_none_share_their_steps(family: str, tmp_path: Path) -> None:
    base = make_base(tmp_path, family)
    assert worst(base, undivided(base.source, four_prompts(), 37)) <= TOLERANCE
    for size in (2, 4):
        assert worst(base, undivided(base.source, four_prompts(), 37, size)) <= TOLERANCE, size


@pytest.mark.parametrize("chunk", [1, 37, 1000])
def test_chunks_change_nothing(qwen3: Base, chunk: int) -> None:
    assert worst(qwen3, undivided(qwen3.source, four_prompts(), chunk)) <= TOLERANCE


def test_each_adapter_and_none_give_other_logits(qwen3: Base) -> None:
    """Else no test here would find anything."""
    prompt = four_prompts()[1]
    logits = [qwen3.references[number].logits(prompt, [5]) for number in range(3)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert float((logits[one] - logits[other]).abs().max() / logits[one].abs().max()) > 1000 * TOLERANCE


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1)], ids=str)
def test_p_and_d_give_the_logits_of_one_instance(qwen3: Base, sizes: tuple[int, int]) -> None:
    assert worst(qwen3, divided(qwen3.source, four_prompts(), 37, sizes)) <= TOLERANCE


def test_retracted_continued_and_forked_sequences_keep_their_adapters(qwen3: Base) -> None:
    asked = four_prompts()
    assert worst(qwen3, retracted(qwen3.source, asked)) <= TOLERANCE
    assert worst(qwen3, continued(qwen3.source, asked)) <= TOLERANCE
    of_tone = dict.fromkeys(range(3), 2)
    assert worst(qwen3, forked(qwen3.source._replace(chosen=of_tone), asked[1]), of_tone) <= TOLERANCE


def answers_with(
    base: Base, plant: Callable[[DecoderModel], DecoderModel] = lambda model: model, **more: Any
) -> Answers:
    """Return what an engine answers whose model `plant` may change, decoding in two orders."""
    recorder, asked = Recorder(), four_prompts()
    recorder.is_greedy = lambda slots: False  # type: ignore[method-assign]  # recorded steps, too, show all logits
    engine = Engine(
        base.source.folder, num_pages=64, num_slots=6, max_model_len=256, sampler=recorder, adapters=base.folders,
        plant=plant, **more,
    )  # fmt: skip
    order = (2, 0, 1, 3)  # as the scheduler decodes: rows without an adapter first
    admit = [engine.admit(slot, asked[slot], 128, adapter=CHOSEN.get(slot, 0)) for slot in order]
    chunks = [next(iter(chunks_of(slot, len(asked[slot]), 1000, sample=True))) for slot in order]
    plans = [StepPlan(admit=admit, prefill=chunks), *(StepPlan(decode=list(order)) for _ in range(4))]
    tokens: dict[int, list[int]] = {slot: [] for slot in order}
    for plan in (*plans, StepPlan(decode=[0, 1, 2, 3]), StepPlan(decode=[3, 2, 1, 0])):
        result = engine.runner.execute(plan)
        assert result.slots == (plan.decode or list(order)), "results are in the order of the plan"
        for slot, token in zip(result.slots, result.tokens, strict=True):
            tokens[slot].append(token)
    return [(prompt, tokens[slot], torch.stack(recorder.logits[slot])) for slot, prompt in enumerate(asked)]


def test_torch_operations_and_recorded_steps_give_the_same(qwen3: Base) -> None:
    """Rows with adapters are computed beside the recordings; the others are replayed."""
    recording = Recording(EagerRecorder(), decode_sizes=(1, 2, 4), prefill_sizes=())
    for given in (None, recording):
        assert worst(qwen3, answers_with(qwen3, ops=TorchOps(), recording=given)) <= TOLERANCE, given


def generic_layer(name: str) -> tuple[int, float] | None:
    """Return rank and scale of an adapter for attention and a dense MLP, of any names."""
    return (3, 2.0) if "self_attn." in name or name.endswith((".gate_up_proj", ".mlp.up_proj")) else None


@pytest.mark.parametrize("name", ["GLM-4-9B-0414", "Mixtral-8x7B-v0.1", "gemma-3-1b-it"])
def test_modules_of_transformers_take_adapters_too(name: str, tmp_path: Path) -> None:
    """Fused gate and up, experts (whose attention alone is adapted), norms on the heads, windows."""
    with pytest.raises(UnsupportedModel, match="tp_size 1 only"):
        Instance(compare_adapted(name, tmp_path, 1), 2)


@pytest.mark.parametrize("size", [1, 2])
def test_attention_with_sinks_and_windows_takes_adapters(size: int, tmp_path: Path) -> None:
    compare_adapted("gpt-oss-20b", tmp_path, size)


def compare_adapted(name: str, tmp_path: Path, size: int) -> Adapted:
    """Compare sequences with and without an adapter on so many ranks. Return what they were computed by."""
    base = make_checkpoint(next(row for row in ROWS if row.name == name), tmp_path / "model")
    layers = {each: part for each, part in linear_layers(base.reference).items() if ".layers." in each}
    targets = sorted({each.rpartition(".")[2] for each in layers if generic_layer(each)})
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": targets}
    write_adapter(tmp_path / "any", config, layers, generic_layer)
    with_adapter = Checkpoint(base.folder, merged(base.reference, tmp_path / "any", generic_layer))
    source = Adapted(base.folder, {"any": str(tmp_path / "any")}, {1: 1, 3: 1})
    for slot, answer in enumerate(undivided(source, four_prompts(), 37, size)):
        own, other = (with_adapter, base) if slot in source.chosen else (base, with_adapter)
        assert error_of(own, [answer]) <= TOLERANCE and error_of(other, [answer]) > 100 * TOLERANCE, slot
    return source


# ----------------------------------------------------------------------------------------------------- planted faults


@dataclass
class Faulty:
    """Loaded adapters that compute with other rows or other numbers."""

    inner: Any
    change: Any

    def linears(self, adapted: Sequence[AdapterRows]) -> Any:
        return self.inner.linears(self.change(adapted))


def shifted(adapted: Sequence[AdapterRows]) -> list[AdapterRows]:
    """Give rows that are not consecutive to their neighbours."""
    return [AdapterRows(number, rows if isinstance(rows, slice) else rows ^ 1) for number, rows in adapted]


@pytest.mark.parametrize("fault", ["none", "neighbour", "shifted", "dropped", "scale"])
def test_planted_faults_are_found(qwen3: Base, fault: str) -> None:
    """The adapter of the neighbour, rows moved by one, no adapter, another scale."""

    def change(model: DecoderModel) -> DecoderModel:
        adapters: Any = model.adapters
        if fault == "scale":
            unscaled = {
                number: {
                    key: replace(low_rank, ups=tuple(up._replace(weight_OR=up.weight_OR / 1.5) for up in low_rank.ups))
                    for key, low_rank in low_ranks.items()
                }
                for number, low_ranks in adapters.low_ranks.items()
            }
            return replace(model, adapters=replace(adapters, low_ranks=unscaled))
        changes: dict[str, Any] = {
            "none": lambda adapted: adapted,
            "neighbour": lambda adapted: [AdapterRows(3 - number, rows) for number, rows in adapted],
            "shifted": shifted,
            "dropped": lambda adapted: adapted[1:],
        }
        return replace(model, adapters=Faulty(adapters, changes[fault]))

    error = worst(qwen3, answers_with(qwen3, change))
    assert error <= TOLERANCE if fault == "none" else error > 100 * TOLERANCE


def test_rows_with_an_adapter_that_nobody_loaded_are_a_bug(qwen3: Base) -> None:
    engine = Engine(qwen3.source.folder)
    admit = engine.admit(0, [5, 6, 7], 8, adapter=1)
    with pytest.raises(Internal, match="rows with LoRA adapter 1, and loaded are "):
        engine.runner.execute(StepPlan(admit=[admit], prefill=list(chunks_of(0, 3, 8, sample=True))))


# ---------------------------------------------------------------------------------------------------------- refusals


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora True is not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"bias": "all"}, "bias 'all' is not supported"),
    ({"lora_bias": True}, "lora_bias True"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out True"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS'"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    ({"future_key": 1}, "the key 'future_key' is not known"),
    ({"r": 0}, "r is 0, not a whole number of at least 1"),
    ({"lora_alpha": "x"}, "lora_alpha is 'x', not a number above 0"),
    ({"target_modules": None}, "target_modules is None"),
    ({"target_modules": "("}, "the regular expression '\\(' is invalid"),
    ({"target_modules": ["embed_tokens", "lm_head"]}, "names no layer that can be adapted here"),
    ({"target_modules": ["q_proj"]}, "tensors that are not computed here, such as .*down_proj"),
    ({"layers_to_transform": [0, 2]}, r"not computed here, such as .*layers\.1\."),
    ({"rank_pattern": {"q_proj": 7}}, r"has shape \(4, 64\); by the model and adapter_config.json it is \(7, 64\)"),
    ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern has the rank 2.5"),
    ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern has 'x' for 'q_proj'"),
]


@pytest.mark.parametrize(
    ("change", "words"), REFUSED, ids=[f"{next(iter(each))}-{n}" for n, (each, _) in enumerate(REFUSED)]
)
def test_what_is_not_computed_is_refused_by_name(
    qwen3: Base, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = copied(qwen3, tmp_path)
    (folder / "adapter_config.json").write_text(json.dumps({**SQL, **change}))
    with pytest.raises(ConfigError, match=words) as refused:
        read_adapter("sql", folder, read_model_spec(qwen3.source.folder), qwen3.source.folder)
    assert str(refused.value).startswith("model.adapters.sql: ")


def copied(base: Base, tmp_path: Path) -> Path:
    folder = tmp_path / "sql"
    folder.mkdir()
    for file in Path(base.folders["sql"]).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_files_that_are_missing_damaged_or_of_another_model_are_named(qwen3: Base, tmp_path: Path) -> None:
    spec, folder = read_model_spec(qwen3.source.folder), copied(qwen3, tmp_path)
    weights, name = folder / "adapter_model.safetensors", "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"
    tensors = load_file(weights)
    first = read_adapter("sql", folder, spec, qwen3.source.folder).hash()
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, weights)
    with pytest.raises(ConfigError, match=f"has no tensor '{name}', which adapter_config.json names"):
        read_adapter("sql", folder, spec, qwen3.source.folder)
    save_file({**tensors, "base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}, weights)
    with pytest.raises(UnsupportedModel, match=r"has 1 tensors that are not computed here, such as .*lm_head"):
        read_adapter("sql", folder, spec, qwen3.source.folder)
    tensors[name][3, 0] = torch.inf
    save_file(tensors, weights)
    assert read_adapter("sql", folder, spec, qwen3.source.folder).hash() != first, "one number is another adapter"
    with pytest.raises(ConfigError, match=r"layers\.2\.mlp\.up_proj has numbers that are not finite"):
        Engine(qwen3.source.folder, adapters={"sql": str(folder)})
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"^model.adapters.sql: .*is cut off"):
        read_adapter("sql", folder, spec, qwen3.source.folder)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model\.bin is not read"):
        read_adapter("sql", folder, spec, qwen3.source.folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        read_adapter("sql", folder, spec, qwen3.source.folder)


def test_models_with_latent_attention_take_no_adapters(qwen3: Base, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v2")
    with pytest.raises(UnsupportedModel, match=r"^model.adapters.sql: .* latent attention"):
        read_adapter("sql", qwen3.folders["sql"], read_model_spec(tmp_path), tmp_path)


def test_launchers_find_a_bad_adapter_before_anything_starts(qwen3: Base, tmp_path: Path) -> None:
    folder = copied(qwen3, tmp_path)
    settings = [f"model.path={TINY_MODEL_DIR}", f"model.adapters.sql={folder}"]
    error = look_at_model(load_topology(None, settings))[1].error
    assert error.startswith("model.adapters.sql: ") and "has shape (4, 64); by the model" in error, error
