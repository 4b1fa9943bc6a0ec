"""GGUF files: their numbers, names and config are those of the checkpoint that they were made of; what does not fit is
an error that names it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import PUBLISHED
from support.gguf_files import (
    ARCHITECTURES,
    Stored,
    Typed,
    convert,
    metadata_of,
    rope_factors,
    stored,
    tensors_of,
    write_gguf,
)

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.checkpoint import check_checkpoint, damaged_tensor
from chitu.models.config import read_model_spec
from chitu.models.gguf import BLOCKS, SCALES, TYPES, read_header, read_headers
from chitu.models.gguf_blocks import dequantise_blocks
from chitu.models.gguf_config import config_of, generation_of
from chitu.models.weights import Rows, WeightSource

RECORDED = {
    "F32": "4bacc8b4ed138c3a05d916daf1b4c15a",
    "F16": "e0cff3045d72f86b8f9b45de34f71bb0",
    "BF16": "1642a59c988050635c79b7cf9001c26e",
    "Q4_0": "8dd3f8fe68705b5f66d4c5f93834cdc6",
    "Q4_1": "f1e203fc85c40670676e625927c457f1",
    "Q5_0": "44e174ee43e9bb0bd5d8488a143ab997",
    "Q5_1": "ed4cd7d2c7cca1c7737a8ac629bdbcf2",
    "Q8_0": "e503d4cc853797621c27ef69ba5f04f2",
    "Q2_K": "d7e32ed86d89f51fe8745edf85ab3e80",
    "Q3_K": "00453482dee5aaa30618a5f97bb120a4",
    "Q4_K": "6a258114f848bd5796f4b83facc69b0f",
    "Q5_K": "978e36ae1c86232630179e8ee567b59f",
    "Q6_K": "b088762df17e8c1f9a1c9e637f795f68",
    "IQ4_NL": "8e91e86060a2fd43b7e9d24a37c1d98d",
    "IQ4_XS": "b0e31f4e902d7b83709e9fd179dcb459",
    "MXFP4": "530649ed6133913e7ae14c9e11283d73",
}
"""SHA-256, 32 digits, of what `gguf.dequantize` (version 0.19) makes of `vector_of(name)`, with one kind of NaN."""
SOURCES = {
    name: config
    for name, config in PUBLISHED.items()
    if config["architectures"][0] in ARCHITECTURES
    and "0528" not in name
    and "Ministral-8B" not in name
    and "mini" not in name
}
"""Published configs of architectures that are read: all but two that are refused for their ropes, and one whose windows
llama.cpp's converter does not write."""


def vector_of(dtype: str) -> np.ndarray:
    """Return random bytes: four rows of 2,048 numbers."""
    numbers, num_bytes = BLOCKS[dtype]
    data = hashlib.shake_256(dtype.encode()).digest(4 * (2048 // numbers) * num_bytes)
    return np.frombuffer(data, np.uint8).reshape(4, -1)


def test_every_type_that_is_read_has_a_recorded_vector() -> None:
    assert set(RECORDED) == set(BLOCKS) == set(TYPES.values())


@pytest.mark.parametrize("dtype", RECORDED)
def test_blocks_are_the_numbers_of_ggml_to_the_bit(dtype: str) -> None:
    numbers = dequantise_blocks(torch.from_numpy(vector_of(dtype).copy()), dtype)
    assert numbers.shape == (4, 2048)
    bits = torch.where(numbers.isnan(), 0x7FC00000, numbers.view(torch.int32)).to(torch.int32)
    assert hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:32] == RECORDED[dtype]


# -------------------------------------------------------------------------------------------------------------- config


def header_file(file: Path, config: Mapping[str, Any], **more: Any) -> Path:
    """Write the metadata of a published config, and of the tensors those that a config is made of."""
    hidden = config["hidden_size"]
    tensors = {"token_embd.weight": stored(np.zeros((config["vocab_size"], hidden)), "F16")}
    if not config.get("tie_word_embeddings", config["architectures"][0].startswith("Gemma")):
        tensors["output.weight"] = tensors["token_embd.weight"]
    if config.get("attention_bias"):
        tensors["blk.0.attn_q.bias"] = stored(np.zeros(hidden))
    for layer in range(config["num_hidden_layers"]):
        tensors[f"blk.{layer}.attn_norm.weight"] = stored(np.ones(hidden))
    factors = rope_factors(config, config.get("head_dim") or hidden // config["num_attention_heads"])
    if factors is not None:
        tensors["rope_freqs.weight"] = stored(factors)
    eos = config.get("eos_token_id") or 0
    eos = eos[0] if isinstance(eos, list) else eos
    metadata = {**metadata_of(config), "tokenizer.ggml.eos_token_id": eos, **more}
    return write_gguf(file, {key: each for key, each in metadata.items() if each is not None}, tensors)


def of_header(file: Path) -> dict[str, Any]:
    return config_of(read_headers([file]))


def spec_of(folder: Path, config: Mapping[str, Any]) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_spec(folder)


@pytest.mark.parametrize("name", SOURCES)
def test_the_config_of_a_file_is_the_published_one(name: str, tmp_path: Path) -> None:
    published = {key: each for key, each in SOURCES[name].items() if key != "quantization_config"}
    made = of_header(header_file(tmp_path / "x.gguf", published))
    if published["model_type"] == "mistral" and published.get("sliding_window"):
        published["sliding_window"] = None  # its converter does not write it
    found, wanted = spec_of(tmp_path / "made", made), spec_of(tmp_path / "published", published)
    unlike = {
        field.name: (getattr(found, field.name), getattr(wanted, field.name))
        for field in dataclasses.fields(wanted)
        if getattr(found, field.name) != getattr(wanted, field.name)
    }
    if published["model_type"] == "mistral":  # a Llama to llama.cpp: the same computation
        assert unlike.pop("architecture") == ("LlamaForCausalLM", "MistralForCausalLM")
    unlike.pop("dtype", None)
    if isinstance(published.get("eos_token_id"), list):
        unlike.pop("eos_token_ids", None)  # the others come from the vocabulary
    assert not unlike


GENERIC = [name for name in SOURCES if SOURCES[name]["model_type"] in ("gemma3_text", "gpt_oss", "mixtral", "phi3")]
NOT_COMPUTED = {
    "eos_token_id", "bos_token_id", "pad_token_id", "transformers_version", "dtype", "router_aux_loss_coef",
    "quantization_config", "use_cache", "initializer_range", "cache_implementation", "torch_dtype", "experts_per_token",
    "_name_or_path", "initial_context_length", "sliding_window_pattern", "auto_map",
}  # fmt: skip


@pytest.mark.parametrize("name", GENERIC)
def test_what_the_modules_of_transformers_are_given_is_what_the_published_config_gives_them(
    name: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    published = {key: each for key, each in SOURCES[name].items() if key != "quantization_config"}
    made = of_header(header_file(tmp_path / "x.gguf", published))
    known = transformers.CONFIG_MAPPING[published["model_type"]]
    found, wanted = (known.from_dict(dict(each)).to_dict() for each in (made, published))
    for each in (found, wanted):
        each.setdefault("attention_bias", False)
        each["head_dim"] = each.get("head_dim") or each["hidden_size"] // each["num_attention_heads"]
        for rope in [each.get("rope_parameters") or {}, *(each.get("rope_parameters") or {}).values()]:
            if isinstance(rope, dict):  # defaults, which some configs write
                for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
                    if rope.get(key) == default:
                        rope.pop(key)
    keys = (found.keys() | wanted.keys()) - NOT_COMPUTED
    assert {key: (found.get(key), wanted.get(key)) for key in keys if found.get(key) != wanted.get(key)} == {}


def test_gemma_has_a_linear_factor_on_its_full_layers_alone(tmp_path: Path) -> None:
    """The published 4B and larger: transformers, given the same file, leaves the factor out."""
    config = {**PUBLISHED["gemma-3-1b-it"], "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    ropes = of_header(header_file(tmp_path / "x.gguf", config))["rope_parameters"]
    assert ropes == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }


@pytest.mark.parametrize(("layers", "scalar"), [(6, 32), (62, 16)])
def test_only_the_largest_gemma_scales_queries_by_the_width_of_its_heads(
    layers: int, scalar: int, tmp_path: Path
) -> None:
    config = {**PUBLISHED["gemma-3-1b-it"], "num_hidden_layers": layers}
    assert of_header(header_file(tmp_path / "x.gguf", config))["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize(
    ("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 2048), (16.0, 131072), (2.5, 4096), (1.0, 8192)]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_parameters_of_a_rope_are_found_by_its_factors(
    factor: float, original: int, head_dim: int, tmp_path: Path
) -> None:
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    config = {**PUBLISHED["Llama-3.1-8B-Instruct"], "rope_scaling": rope, "head_dim": head_dim}
    found = of_header(header_file(tmp_path / "x.gguf", config))["rope_parameters"]
    wanted = {"rope_theta": 500000.0, **(rope if factor != 1 else {"rope_type": "default"})}
    assert found == wanted


@pytest.mark.parametrize(
    "change", [lambda f: f * 1.01, lambda f: f[::-1].copy(), lambda f: f[:-1], lambda f: f * np.nan, lambda f: 0 * f]
)
def test_factors_of_another_rope_are_refused(change: Any, tmp_path: Path) -> None:
    config = PUBLISHED["Llama-3.1-8B-Instruct"]
    factors = rope_factors(config, 64)
    tensors = {"token_embd.weight": stored(np.zeros((500, 64))), "rope_freqs.weight": stored(change(factors))}
    file = write_gguf(tmp_path / "x.gguf", {**metadata_of({**config, "head_dim": 64})}, tensors)
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        of_header(file)


KEYS = sorted(
    {
        (config["architectures"][0], key)
        for config in (*SOURCES.values(), {**PUBLISHED["gemma-3-1b-it"], "architectures": ["Gemma2ForCausalLM"]})
        for key in metadata_of(config)
        if not key.startswith("general.")
    }
)


@pytest.mark.parametrize(("architecture", "key"), KEYS)
def test_every_key_of_an_architecture_is_used_or_refused(architecture: str, key: str, tmp_path: Path) -> None:
    """A value changed by one, or to another word, changes the config or is refused; so does a missing one, if the rest
    does not say the same."""
    configs = (*SOURCES.values(), {**PUBLISHED["gemma-3-1b-it"], "architectures": ["Gemma2ForCausalLM"]})
    config = next(each for each in configs if each["architectures"][0] == architecture and key in metadata_of(each))
    before = of_header(header_file(tmp_path / "x.gguf", config))
    old = metadata_of(config)[key]
    new = old + 2 if isinstance(old, int | float) else "longrope"
    says_what_tensors_say = key.endswith(("vocab_size",))
    try:
        after = of_header(header_file(tmp_path / "y.gguf", config, **{key: new}))
    except ConfigError as error:
        assert key.rpartition(".")[2].removeprefix("expert_") in error.message
        return
    assert (after != before) is not says_what_tensors_say, key


@pytest.mark.parametrize("architecture", sorted({config["architectures"][0] for config in SOURCES.values()}))
@pytest.mark.parametrize(
    "key",
    [
        "attention.temperature_scale", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "logit_scale",
        "attention.clamp_kqv", "attention.max_alibi_bias", "expert_shared_count", "expert_weights_scale",
        "rope.dimension_sections", "something.new",
    ],
)  # fmt: skip
def test_a_key_that_is_not_known_is_refused_by_name(architecture: str, key: str, tmp_path: Path) -> None:
    config = next(each for each in SOURCES.values() if each["architectures"][0] == architecture)
    name = f"{ARCHITECTURES[architecture]}.{key}"
    with pytest.raises(UnsupportedModel, match=key.replace(".", r"\.")):
        of_header(header_file(tmp_path / "x.gguf", config, **{name: 0.7}))


@pytest.mark.parametrize("value", ["much", -1, 0, 2.5, True, [1, 2], 1 << 31])
@pytest.mark.parametrize(
    "key", ["block_count", "attention.head_count", "context_length", "embedding_length", "attention.key_length"]
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    given_value = Typed(5, value) if value == -1 else value
    config = PUBLISHED["Llama-3.1-8B-Instruct"]
    file = header_file(tmp_path / "x.gguf", config, **{f"llama.{key}": given_value})
    if (key, value) == ("context_length", 1 << 31):
        assert of_header(file)["max_position_embeddings"] == value
        return
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        of_header(file)


@pytest.mark.parametrize(
    ("tokens", "eos", "ends"),
    [
        (["<a>", "<|im_end|>", "<|endoftext|>"], 1, [1, 2]),
        (["<eos>", "<end_of_turn>"], 0, [0, 1]),
        (["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], 3, [1, 2, 3]),
        (["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"], 1, [0, 1, 3]),
        (["<|end|>", "x"], 0, [0]),
    ],
)
def test_a_text_ends_at_each_token_that_ends_a_turn(
    tokens: list[str], eos: int, ends: list[int], tmp_path: Path
) -> None:
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(tokens),
        "tokenizer.ggml.eos_token_id": eos,
    }
    file = write_gguf(tmp_path / "x.gguf", metadata, {"token_embd.weight": stored(np.zeros((2, 2)))})
    assert sorted(generation_of(read_header(file))["eos_token_id"]) == ends


def test_what_a_file_says_of_sampling_is_in_generation_config(tmp_path: Path) -> None:
    said = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.05, "mirostat": 0}
    metadata = {"general.architecture": "qwen3", **{f"general.sampling.{key}": each for key, each in said.items()}}
    file = write_gguf(tmp_path / "x.gguf", metadata, {"token_embd.weight": stored(np.zeros((2, 2)))})
    found = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert generation_of(read_header(file)) == found


# ------------------------------------------------------------------------------------------------------------- tensors


def random_tensors(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors with the numbers 0, 1, 2, ... of a generator, by the names of our own families."""
    from chitu.models.checkpoint import tensor_shapes
    from chitu.models.families import traits_of

    spec = config["spec"]
    torch.manual_seed(3)
    found = {name: torch.randn(shape) for name, shape in tensor_shapes(spec, traits_of(spec))}
    return {name: each for name, each in found.items()}


BIASED = "Llama-3.1-8B-Instruct with biases"
OWN = [
    "Llama-3.1-8B-Instruct",
    BIASED,
    "Mistral-Nemo-Instruct-2407",
    "Qwen2.5-7B-Instruct",
    "Qwen3-0.6B",
    "Qwen3-30B-A3B",
]


@pytest.fixture(params=OWN)
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """Return a checkpoint in safetensors, and the folder of the GGUF file made of it, without a tokenizer."""
    config = dict(PUBLISHED[request.param.removesuffix(" with biases")])
    config |= {"attention_bias": True, "mlp_bias": True} if request.param == BIASED else {}
    spec = spec_of(tmp_path / "published", config)
    save_file(random_tensors({"spec": spec}), tmp_path / "published" / "model.safetensors")
    convert(tmp_path / "published", tmp_path / "model.gguf")
    made = tmp_path / "made"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(of_header(tmp_path / "model.gguf")))
    (made / "model.gguf").symlink_to(tmp_path / "model.gguf")
    return tmp_path / "published", made


def source_of(folder: Path) -> WeightSource:
    return WeightSource(folder, torch.float32, torch.device("cpu"), None, piece_numbers=1000)


def test_tensors_are_those_of_the_checkpoint_whole_and_in_part(folders: tuple[Path, Path]) -> None:
    published, made = folders
    wanted = load_file(published / "model.safetensors")
    spec = read_model_spec(made)
    assert check_checkpoint(made, spec).numbers == sum(each.numel() for each in wanted.values())
    assert not damaged_tensor(made)
    with source_of(made) as whole:
        assert whole.names == {name: tuple(each.shape) for name, each in wanted.items()}
        for name, each in wanted.items():
            assert torch.equal(whole.take(name, *each.shape), each), name
        whole.finish()
    with source_of(made) as in_rows, source_of(made) as in_columns:
        for name, each in wanted.items():
            rows = range(3, each.shape[0] - 2)
            assert torch.equal(in_rows.take(name, *each.shape, rows=rows), each[3:-2]), name
            if each.dim() == 2:
                columns = range(7, each.shape[1] - 2)
                assert torch.equal(in_columns.take(name, *each.shape, columns=columns), each[:, 7:-2]), name


def test_parts_of_several_tensors_are_stacked(folders: tuple[Path, Path]) -> None:
    published, made = folders
    wanted = load_file(published / "model.safetensors")
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    with source_of(made) as source:
        parts = [Rows(name, wanted[name].shape[0], range(16, 32)) for name in names]
        stacked = source.take_rows(parts, wanted[names[0]].shape[1])
    assert torch.equal(stacked, torch.cat([wanted[name][16:32] for name in names]))


@pytest.mark.parametrize("dtype", ["F16", "Q8_0", "Q4_0"])
def test_quantised_tensors_are_read_in_the_order_of_the_checkpoint(dtype: str, tmp_path: Path) -> None:
    """Blocks of q and k are turned as their rows are, and a part that begins within a block is cut out of it."""
    config = PUBLISHED["Llama-3.1-8B-Instruct"]
    rows = torch.arange(64, dtype=torch.float32).unsqueeze(1).expand(64, 64) / 16 * torch.linspace(0.5, 1, 64)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = tensors_of({name: rows.numpy()}, config)
    tensors["token_embd.weight"] = np.zeros((500, 64))
    file = write_gguf(
        tmp_path / "model.gguf",
        metadata_of(config),
        {key: stored(each, dtype if key != "rope_freqs.weight" else "F32") for key, each in tensors.items()},
    )
    assert file.is_file()
    with source_of(tmp_path) as source:
        found = source.take(name, 64, 64)
    assert (found - rows).abs().max() < {"F16": 0.001, "Q8_0": 0.02, "Q4_0": 0.35}[dtype]
    with source_of(tmp_path) as source:
        assert torch.equal(source.take(name, 64, 64, rows=range(9, 30), columns=range(5, 40)), found[9:30, 5:40])


@pytest.mark.parametrize("dtype", ["MXFP4", "Q8_0", "F16"])
def test_experts_of_gpt_oss_are_joined_as_published(dtype: str, tmp_path: Path) -> None:
    """Rows of the gates alternate with those of the others, and the last two dimensions are exchanged."""
    config = PUBLISHED["gpt-oss-20b"]
    numbers, num_bytes = BLOCKS[dtype]
    parts = {}
    for number, part in enumerate(("gate", "up", "down")):
        data = hashlib.shake_256(bytes([number])).digest(8 * 64 * (64 // numbers) * num_bytes)
        data = np.frombuffer(data, np.uint8).reshape(-1, num_bytes).copy()
        data[:, :2] = (120, 60)  # scales, or numbers, of a usual size
        parts[part] = data
    kind = {name: number for number, name in TYPES.items()}[dtype]
    tensors = {
        f"blk.0.ffn_{part}_exps.weight": Stored(kind, (8, 64, 64), data.tobytes()) for part, data in parts.items()
    }
    biases = {part: np.random.default_rng(number).normal(size=(8, 64)) for number, part in enumerate(parts)}
    tensors |= {f"blk.0.ffn_{part}_exps.bias": stored(each) for part, each in biases.items()}
    write_gguf(tmp_path / "x.gguf", metadata_of(config), tensors)
    gate, up, down = (dequantise_blocks(torch.from_numpy(each), dtype).view(8, 64, 64) for each in parts.values())
    prefix = "model.layers.0.mlp.experts."
    with source_of(tmp_path) as source:
        both = source.take(f"{prefix}gate_up_proj", 8, 64, 128)
        assert torch.equal(both[:, :, ::2], gate.transpose(1, 2)) and torch.equal(both[:, :, 1::2], up.transpose(1, 2))
        assert torch.equal(source.take(f"{prefix}down_proj", 8, 64, 64), down.transpose(1, 2))
        bias = source.take(f"{prefix}gate_up_proj_bias", 8, 128)
        assert torch.equal(bias[:, 1::2], torch.from_numpy(biases["up"]).float())
        assert torch.equal(source.take(f"{prefix}down_proj_bias", 8, 64), torch.from_numpy(biases["down"]).float())
        source.finish()
    with source_of(tmp_path) as source:
        part_of = source.take(f"{prefix}gate_up_proj", 8, 64, 128, rows=range(2, 5), columns=range(3, 50))
        assert torch.equal(part_of, both[2:5, 3:50])


@pytest.mark.parametrize("dtype", SCALES)
def test_a_scale_that_is_not_finite_is_a_damaged_tensor(dtype: str, tmp_path: Path) -> None:
    numbers, num_bytes = BLOCKS[dtype]
    blocks = np.zeros((8192, num_bytes), np.uint8)
    blocks[4000:, :] = 85
    file = tmp_path / "x.gguf"
    shape = (8192 // 8, 8 * numbers)
    kind = {name: number for number, name in TYPES.items()}[dtype]
    for at in SCALES[dtype]:
        for scale, is_damaged in ((0x7C00, True), (0xFE00, True), (0x7BFF, False)):
            blocks[8000, at : at + 2] = (scale & 255, scale >> 8)
            write_gguf(
                file, metadata_of(PUBLISHED["Qwen3-0.6B"]), {"token_embd.weight": Stored(kind, shape, blocks.tobytes())}
            )
            assert damaged_tensor(tmp_path) == ("model.embed_tokens.weight" if is_damaged else "")
            assert dequantise_blocks(torch.from_numpy(blocks), dtype).isfinite().all().item() is not is_damaged
        blocks[8000, at : at + 2] = 85


def test_a_tensor_without_a_name_is_refused(tmp_path: Path) -> None:
    config = PUBLISHED["Qwen3-0.6B"]
    for name in ("blk.0.attn_k.scale", "blk.0.attn_rot.weight", "blk.01.attn_k.weight", "v.blk.0.x.weight"):
        tensors = {"token_embd.weight": stored(np.zeros((500, 64))), name: stored(np.zeros((2, 2)))}
        write_gguf(tmp_path / "x.gguf", metadata_of(config), tensors)
        with pytest.raises(UnsupportedModel, match=name), source_of(tmp_path):
            pass
