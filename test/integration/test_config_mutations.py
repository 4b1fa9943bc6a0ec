"""Every key of every family's config.json, mutated: the logits are those of `transformers`, or the error names the
refused key. Keys are the fields of transformers' config class and all keys in `config_keys.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_table import make_checkpoint
from engine_checkpoints import FAMILIES, GREEDY, Engine, GreedySampler, make_prompt, write_checkpoint
from safetensors.torch import load_file, save_file
from support.checkpoints import ROWS

from chitu.engine.executor import PrefillChunk, StepPlan
from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.config import read_model_spec
from chitu.models.config_keys import ARCHITECTURES, NO_EFFECT, REQUIRED
from chitu.models.generic.key_reads import keys_read

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]

IS_BEFORE_5 = transformers.__version__ < "5"
PROMPTS = [make_prompt(5), make_prompt(90)]
MAX_MODEL_LEN = 128
TOLERANCE = 2e-4
"""Bound on the error as a share of the largest logit. A key with an effect changes more than a hundred times as
much."""
REFUSED_BEFORE_5 = {"quantization_config", "original_max_position_embeddings", "beta_fast", "beta_slow"}
"""Keys with a value that transformers before version 5 refuses and transformers 5 accepts."""
REMOVED = "(removed)"
NEVER_READ = """
    _model_name_or_path unk_token_id cls_token_id model_name neftune_noise_alpha flash_attn use_flash_attention_2
    dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout_prob attention_probs_dropout_prob residual_dropout
    bos_token add_bos_token seq_length max_seq_len n_ctx rope_ratio rotary_dim logits_scaling final_logit_softcapping
    attn_logit_softcapping query_pre_attn_scalar embedding_multiplier qk_norm use_logn_attn quantization lora_alpha
    dual_chunk_attention_config rope_tetha norm_eps tie_embeddings bias lm_head_bias no_bias task language
    num_key_value_groups softmax_scale"""
"""Keys that folders have, or could have, and transformers reads for none of our families."""
READ = """
    is_causal attention_chunk_size per_layer_config kv_sharing_modes number_of_conv_states attribute_map
    get_text_config decoder text_config hidden_activation min_p cache_implementation quant_config base_model_tp_plan
    _attn_implementation attn_implementation experts_implementation"""
"""Keys that the code of all models reads."""
ALL_IDLE = "(all without effect)"
"""Name of the mutation of all keys without effect at once, which saves time: none of them may change anything."""
WITHOUT_EFFECT = {key for keys in NO_EFFECT.values() for key in keys.split()}
OTHERS: dict[str, list[Any]] = {
    "architectures": [["MistralForCausalLM"], ["LlamaForCausalLM"]],
    "cache_implementation": ["static"],
    "model_type": ["mistral"],
    "dtype": ["bfloat16"],
    "torch_dtype": ["float16"],
    "eos_token_id": [5, [5, 6]],
    "head_dim": [8, 16, 64],
    "hidden_act": ["gelu", "relu"],
    "hidden_activation": ["silu"],
    "id2label": [{"0": "a", "1": "b", "2": "c"}],
    "is_encoder_decoder": [True],
    "label2id": [{"a": 0}],
    "layer_types": [
        ["full_attention"] * 2,
        ["sliding_attention"] * 2,
        ["full_attention"],
        ["full_attention", "sliding_attention"],
    ],
    "mlp_only_layers": [[], [0], [0, 1]],
    "n_group": [1, 2, 4],
    "num_experts_per_tok": [1, 2, 4],
    "num_mtp_layers": [2],
    "original_max_position_embeddings": [128],
    "pad_token_id": [4],
    "partial_rotary_factor": [0.5, 1.0],
    "problem_type": ["regression"],
    "pruned_heads": [{"0": [0]}],
    "q_lora_rank": [24],
    "quantization_config": [{"quant_method": "fp8"}],
    "rope_theta": [5000.0],
    "scoring_func": ["softmax", "sigmoid"],
    "sliding_window": [64, 256],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "transformers_version": ["9.9.9"],
}
ROPE_VALUES: dict[str, list[Any]] = {
    "attention_factor": [0.7],
    "attn_factor": [0.7, 1.0],
    "beta_fast": [8.0],
    "beta_slow": [3.0],
    "factor": [2.0, 16],
    "finetuned": [True],
    "high_freq_factor": [6.0],
    "low_freq_factor": [2.0],
    "mrope_section": [[1, 1, 2]],
    "mscale": [0.5],
    "mscale_all_dim": [0.5],
    "original_max_position_embeddings": [32],
    "partial_rotary_factor": [0.5, 1.0],
    "rope_theta": [5000.0],
    "rope_type": ["default", "dynamic", "linear", "llama3", "longrope", "yarn"],
    "truncate": [False],
    "type": ["linear", "yarn"],
}
OWN_IN_CI = ("llama3", "qwen3_moe", "deepseek_v3")
"""One of each kind: dense with a scaled rope, experts, latent attention."""
COUNT = {
    "llama3": "rms_norm_eps rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "mistral": "rms_norm_eps",
    "qwen2": "rms_norm_eps rope_theta rope_scaling",
    "qwen3": "rms_norm_eps",
    "qwen3_moe": "rms_norm_eps num_experts_per_tok norm_topk_prob",
    "gpt_oss": "rms_norm_eps num_experts_per_tok sliding_window layer_types swiglu_alpha swiglu_limit factor truncate",
    "deepseek_v2": "rms_norm_eps routed_scaling_factor num_experts_per_tok attention_factor mscale truncate beta_slow",
    "deepseek_v2_groups": "topk_group n_group topk_method",
    "deepseek_v3": "topk_group n_group routed_scaling_factor norm_topk_prob rope_interleave factor mscale_all_dim",
}
"""Keys, among others, that must change the logits: they show that the comparison can fail."""


class Recorder(GreedySampler):
    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.empty(0)

    def sample(self, logits: torch.Tensor, slots: list[int]) -> torch.Tensor:
        self.logits = logits.clone()
        return super().sample(logits, slots)


def own_logits(folder: Path) -> torch.Tensor:
    """Return `[prompts, vocabulary]`: the logits of each prompt's last token."""
    sampler = Recorder()
    engine = Engine(folder, num_pages=16, num_slots=2, max_model_len=MAX_MODEL_LEN, sampler=sampler)
    admit = [engine.admit(slot, prompt, len(prompt), sampling=GREEDY) for slot, prompt in enumerate(PROMPTS)]
    prefill = [PrefillChunk(slot, 0, len(prompt), sample=True) for slot, prompt in enumerate(PROMPTS)]
    engine.runner.execute(StepPlan(admit=admit, prefill=prefill))
    return sampler.logits


class Reference:
    """The logits of `transformers`, computed once for all configs that it reads alike."""

    def __init__(self, architecture: str) -> None:
        self._model_class = getattr(transformers, architecture)
        self._known: dict[str, torch.Tensor] = {}

    def read(self, folder: Path) -> str:
        """Return what the library reads from config.json."""
        read = self._model_class.config_class.from_pretrained(folder).to_dict()
        return json.dumps(read, sort_keys=True, default=str)

    def logits(self, folder: Path) -> torch.Tensor:
        alike = self.read(folder)
        if alike not in self._known:
            model = self._model_class.from_pretrained(folder, dtype=torch.float32).eval()
            with torch.inference_mode():
                self._known[alike] = torch.cat([model(torch.tensor([prompt])).logits[:, -1] for prompt in PROMPTS])
        return self._known[alike]


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference over the largest logit; 1 if shapes differ or numbers are missing."""
    if ours.shape != theirs.shape:
        return 1.0
    found = float((ours - theirs).abs().max() / theirs.abs().max())
    return found if found == found else 1.0


def class_defaults(architecture: str) -> dict[str, Any]:
    """Return the default of each field of transformers' config class; older classes are no dataclasses."""
    config_class = getattr(transformers, architecture).config_class
    if dataclasses.is_dataclass(config_class):
        return {field.name: field.default for field in dataclasses.fields(config_class)}
    stated = inspect.signature(config_class.__init__).parameters.values()
    own = {each.name: each.default for each in stated if each.name not in ("self", "kwargs")}
    return {**transformers.PretrainedConfig().to_dict(), **own}


def others(key: str, value: Any) -> list[Any]:
    """Return other values of the same type."""
    if key in OTHERS:
        return [other for other in OTHERS[key] if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value]
    if isinstance(value, float):
        return [1.5 * value + 0.25, 0.5 * value]
    return [True, 3]


def mutations(
    config: dict[str, Any], architecture: str, of_all_models: bool
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield key, current value and whole config of each mutation. `of_all_models`: also of keys that the code of all
    models reads."""
    known, dictionary = ARCHITECTURES[architecture].keys, "rope_parameters"
    if config.get("rope_scaling"):
        dictionary = "rope_scaling"
    default = class_defaults(architecture)
    fields = {*default, *known.used, *known.only, *known.aliases, *config}
    idle = fields & WITHOUT_EFFECT - {"architectures", "model_type", "return_dict"}
    values = {key: config.get(key, default.get(key)) for key in sorted(idle)}
    changed = {key: others(key, value)[0] for key, value in values.items() if key in OTHERS or value is not None}
    yield ALL_IDLE, changed, {**config, **changed}
    yield ALL_IDLE, REMOVED, {key: value for key, value in config.items() if key not in idle}
    for key in sorted(fields - idle - {"rope_parameters", "rope_scaling", "return_dict"}):
        if key in config:
            yield key, REMOVED, {name: value for name, value in config.items() if name != key}
        for other in [None, *others(key, config.get(key, default.get(key)))]:
            yield key, other, {**config, key: other}
    yield ALL_IDLE, "(never read)", {**config, **dict.fromkeys(NEVER_READ.split(), 3)}
    for key in READ.split() if of_all_models else ():
        for other in (True, 3, "sdpa", None):
            yield key, other, {**config, key: other}
    yield ALL_IDLE, "(of other versions)", {**config, **dict.fromkeys(WITHOUT_EFFECT - fields, 3)}
    rope = config.get(dictionary) or {}
    for key in sorted({*ROPE_VALUES, *rope}):
        changed = [(f"{dictionary}.{key}", other, {**rope, key: other}) for other in [None, *ROPE_VALUES[key]]]
        if key in rope:
            changed.append((f"{dictionary}.{key}", REMOVED, {name: rope[name] for name in rope if name != key}))
        for name, other, inner in changed:
            yield name, other, {**config, dictionary: inner}
    yield dictionary, None, {**config, dictionary: None}
    yield from both_dictionaries(config, rope)


def both_dictionaries(config: dict[str, Any], rope: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the two spellings of rope, side by side and each alone."""
    inner = {key: value for key, value in rope.items() if key != "rope_theta"}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    old = {key: value for key, value in config.items() if key != "rope_parameters"} | {"rope_theta": theta}
    yield "rope_scaling", "(old)", {**old, "rope_scaling": inner or None}
    yield "rope_scaling", "(README)", {**old, "rope_scaling": yarn}
    if IS_BEFORE_5:
        return
    new = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {**inner, "rope_theta": theta}
    yield "rope_parameters", "(new)", new
    for name, scaling in (("(same)", inner), ("(yarn)", yarn), ("(linear)", {"type": "linear", "factor": 2.0})):
        yield "rope_scaling", f"{name} beside rope_parameters", {**new, "rope_scaling": scaling, "rope_theta": theta}
        yield "rope_scaling", f"{name} beside rope_parameters, no rope_theta", {**new, "rope_scaling": scaling}


OTHER_NAMES = (
    *("tensor '", "tensors", "a tensor that", "tensor for"),  # a key that asks for others
    *("transformers cannot use it: ", "the code of transformers"),  # and what the library says to it
    "attends to later positions",
)
"""Words of a refusal that names what a key leads to instead of the key."""


def verdict(folder: Path, reference: Reference, names: set[str], base: torch.Tensor) -> tuple[str, bool]:
    """Return what is wrong, empty if nothing; and whether the mutation changed the logits."""
    try:
        ours = own_logits(folder)
    except ConfigError as error:
        is_named = any(named in str(error) for named in (*names, *OTHER_NAMES))
        return "" if is_named else f"refused without its name: {error}", False
    except Exception as error:
        return f"no refusal but {error!r}", False
    try:
        theirs = reference.logits(folder)
    except Exception as error:
        if IS_BEFORE_5 and names & REFUSED_BEFORE_5:
            return "", False
        return f"served, and transformers refuses: {error!r}"[:300], False
    apart = distance(ours, theirs)
    return "" if apart < TOLERANCE else f"logits are apart by {apart:.2g}", distance(ours, base) > 100 * TOLERANCE


@pytest.mark.parametrize(
    "family", [family if family in OWN_IN_CI else pytest.param(family, marks=pytest.mark.by_hand) for family in COUNT]
)
def test_a_mutated_key_gives_the_logits_of_transformers_or_is_refused_by_name(family, tmp_path, request):
    """In CI what the code of all models reads is mutated for one of them."""
    prefix, _ = FAMILIES[family]
    if IS_BEFORE_5 and family == "deepseek_v2":
        pytest.skip("transformers 4 leaves mscale_all_dim of DeepSeek-V2 out, which DeepSeek's own code has")
    write_checkpoint(tmp_path, family, num_layers=2)
    architecture = f"{prefix}ForCausalLM"
    config = json.loads((tmp_path / "config.json").read_text())
    base = own_logits(tmp_path)
    reference, aliases = Reference(architecture), ARCHITECTURES[architecture].keys.aliases
    assert distance(base, reference.logits(tmp_path)) < TOLERANCE
    wrong, seen, num = [], set(), 0
    of_all_models = family == OWN_IN_CI[0] or request.config.option.by_hand
    for key, value, mutated in mutations(config, architecture, of_all_models):
        (tmp_path / "config.json").write_text(json.dumps(mutated))
        name = key.rpartition(".")[2]
        what, is_seen = verdict(tmp_path, reference, {name, aliases.get(name, name)}, base)
        num += 1
        if what:
            wrong.append(f"{key} = {value!r}: {what}")
        if is_seen:
            seen.add(name)
    assert not wrong, "\n".join([f"{len(wrong)} of {num}", *wrong])
    assert seen >= set(COUNT[family].split()), seen


@pytest.mark.skipif(IS_BEFORE_5, reason="classes of older versions cannot be traced alike")
@pytest.mark.parametrize(
    "family", [family if family in OWN_IN_CI else pytest.param(family, marks=pytest.mark.by_hand) for family in COUNT]
)
def test_every_name_that_transformers_asks_a_config_for_is_found_in_its_source(family, tmp_path, monkeypatch):
    """By this, unknown keys are told from those without effect: a name that is asked for and not found would be
    ignored, and change tokens."""
    write_checkpoint(tmp_path, family, num_layers=2)
    asked: set[str] = set()
    usual = transformers.PreTrainedConfig.__getattribute__

    def traced(self: Any, name: str) -> Any:
        asked.add(name)
        return usual(self, name)

    monkeypatch.setattr(transformers.PreTrainedConfig, "__getattribute__", traced)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=2, do_sample=False)
    monkeypatch.undo()
    names = {name for name in asked if not name.startswith("__")}
    assert names >= {"hidden_size", "is_causal", "layer_types", "sliding_window"}, "it is traced"
    read = keys_read(names, json.loads((tmp_path / "config.json").read_text())["model_type"])
    assert read is not None
    assert not names - read


GENERIC = {
    "gemma-3-1b-it": "sliding_window query_pre_attn_scalar hidden_activation",
    "GLM-4.5": "partial_rotary_factor routed_scaling_factor",
    "GLM-4-9B-0414": "partial_rotary_factor rope_theta",
    "phi-4": "rope_theta",
    "Olmo-3-32B-Think": "sliding_window layer_types",
    "granite-3.3-8b-instruct": "attention_multiplier embedding_multiplier logits_scaling residual_multiplier",
    "Mixtral-8x7B-v0.1": "num_experts_per_tok",
    "EXAONE-4.0-32B": "sliding_window rope_theta",
    "Seed-OSS-36B-Instruct": "rope_theta rms_norm_eps",
    "Qwen3-Next-80B-A3B-Instruct": "partial_rotary_factor num_experts_per_tok",
    "granite-4.0-h-small": "attention_multiplier logits_scaling",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "norm_topk_prob routed_scaling_factor",
    "Kimi-Linear-48B-A3B": "routed_scaling_factor num_experts_per_token",
}
"""Rows of the list that the modules of transformers compute, with keys that must change the logits."""
IN_CI = ("gemma-3-1b-it",)


def generic_mutations(config: dict[str, Any], fields: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield each key of the file and of the library's config class, removed and with another value."""
    for key in sorted({*config, *fields} - WITHOUT_EFFECT - {"rope_parameters", "rope_scaling", "return_dict"}):
        if key in config:
            yield key, REMOVED, {name: value for name, value in config.items() if name != key}
        given = config.get(key, fields.get(key))
        if key == "layer_types":
            if given:
                yield key, "(reversed)", {**config, key: given[::-1]}
        elif key in OTHERS or given is not None:
            for other in others(key, given)[:1]:  # none of an object
                yield key, other, {**config, key: other}
    yield "unheard_of", 3, {**config, "unheard_of": 3}
    for dictionary in ("rope_parameters", "rope_scaling"):
        for key, value in (config.get(dictionary) or {}).items():
            if key in ROPE_VALUES:
                for other in [other for other in ROPE_VALUES[key] if other != value][:1]:
                    yield key, other, {**config, dictionary: {**config[dictionary], key: other}}


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.by_hand) for name in GENERIC]
)
def test_a_mutated_key_of_a_model_that_transformers_computes_is_served_exactly_or_refused(name, tmp_path):
    """What the library reads alike, and gives the same spec, need not be computed again."""
    row = next(row for row in ROWS if row.name == name)
    checkpoint = make_checkpoint(row._replace(form=""), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("quantization_config", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    architecture, base = type(checkpoint.reference).__name__, own_logits(tmp_path)
    reference, spec = Reference(architecture), read_model_spec(tmp_path, MAX_MODEL_LEN)
    read = reference.read(tmp_path)
    assert distance(base, reference.logits(tmp_path)) < TOLERANCE
    wrong, seen, num, num_computed = [], set(), 0, 0
    for key, value, mutated in generic_mutations(config, class_defaults(architecture)):
        (tmp_path / "config.json").write_text(json.dumps(mutated))
        num += 1
        with contextlib.suppress(Exception):
            if reference.read(tmp_path) == read and read_model_spec(tmp_path, MAX_MODEL_LEN) == spec:
                continue
        num_computed += 1
        what, is_seen = verdict(tmp_path, reference, {key}, base)
        if what:
            wrong.append(f"{key} = {value!r}: {what}")
        if is_seen:
            seen.add(key)
    assert not wrong, "\n".join([f"{len(wrong)} of {num}", *wrong])
    assert seen >= set(GENERIC[name].split()), seen


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_defaults_are_those_of_the_config_class(architecture):
    stated = class_defaults(architecture)
    for key, wanted in ARCHITECTURES[architecture].keys.used.items():
        if wanted.default not in (REQUIRED, None) and key in stated:
            assert wanted.default == stated[key], key


def test_a_head_of_its_own_beside_tied_embeddings_is_refused_unless_it_is_the_same(tmp_path):
    model = write_checkpoint(tmp_path, "llama2", num_layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(UnsupportedModel, match="tie_word_embeddings"):
        own_logits(tmp_path)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert distance(own_logits(tmp_path), Reference("LlamaForCausalLM").logits(tmp_path)) < TOLERANCE


def test_a_tensor_in_two_files_is_refused_unless_model_safetensors_decides(tmp_path):
    write_checkpoint(tmp_path, "qwen3", num_layers=1)
    expected = own_logits(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: -tensor for name, tensor in tensors.items()}, tmp_path / "model_backup.safetensors")
    assert torch.equal(own_logits(tmp_path), expected)
    (tmp_path / "model.safetensors").rename(tmp_path / "model_0.safetensors")
    with pytest.raises(ConfigError, match=r"model_backup\.safetensors and in model_0\.safetensors"):
        own_logits(tmp_path)


def test_the_error_of_a_wrong_or_missing_tensor_names_its_file_or_folder(tmp_path):
    write_checkpoint(tmp_path, "qwen3", num_layers=1)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    (tmp_path / "model.safetensors").unlink()
    wrong = tensors.pop(name).t().contiguous()
    save_file(tensors, tmp_path / "model-1.safetensors")
    with pytest.raises(ConfigError, match=rf"model\.path: {tmp_path} has no tensor '{name}'"):
        own_logits(tmp_path)
    save_file({name: wrong}, tmp_path / "model-2.safetensors")
    with pytest.raises(ConfigError, match=rf"model-2\.safetensors: tensor '{name}' has shape .*the config asks for"):
        own_logits(tmp_path)


def test_yarn_as_in_the_readme_of_qwen_lengthens_the_context(tmp_path):
    write_checkpoint(tmp_path, "qwen2", num_layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    theta = config.pop("rope_parameters", config)["rope_theta"]
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    changed = {**config, "max_position_embeddings": 64, "rope_theta": theta, "rope_scaling": yarn}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    assert distance(own_logits(tmp_path), Reference("Qwen2ForCausalLM").logits(tmp_path)) < TOLERANCE
    with pytest.raises(ConfigError, match="max_model_len is 257"):
        Engine(tmp_path, max_model_len=257)
