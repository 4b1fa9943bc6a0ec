"""How the weights of a checkpoint are quantised, by its `quantization_config`. No torch; read by `models/config.py` (so
by the router), `checkpoint.py` and `weights.py`.

Owns the translation of the published forms into one frozen `Quantization`. The config says only what the headers of the
files cannot (`logical_tensors.py`): sizes of blocks, bits of an integer, order of packing, zero points. What is unknown
is refused, by its usual name.

Only weights count. Activations are not quantised here: a checkpoint for 8-bit activations (W8A8, dynamic or static FP8)
is computed in the model's dtype, with the same weights. Scales of activations and of a KV cache have no effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from chitu.config.model_files import refuse_lfs_pointer
from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.config_keys import Key, Keys

Method = Literal["fp8", "fbgemm_fp8", "mxfp4", "compressed-tensors", "modelopt", "awq", "gptq"]
Code = Literal["number", "e2m1", "integer", "ggml"]
HF_QUANT_CONFIG = "hf_quant_config.json"
REFUSED = {
    "aqlm": "AQLM", "auto-round": "AutoRound", "bitnet": "BitNet", "bitsandbytes": "bitsandbytes", "eetq": "EETQ INT8",
    "exl2": "EXL2", "fp_quant": "FP-Quant", "gguf": "GGUF", "higgs": "HIGGS", "hqq": "HQQ", "quanto": "Quanto",
    "quark": "AMD Quark", "spqr": "SpQR", "torchao": "torchao", "vptq": "VPTQ",
}  # fmt: skip
"""Methods without code here, by the names that users know."""
_LISTED = {"quant_method": Key("text", None, nullable=True)}
_NO_EFFECT = {
    "fp8": "activation_scheme dequantize kv_cache_scheme kv_cache_quant_method modules_to_not_convert ignored_layers",
    "fbgemm_fp8": "activation_scale_ub modules_to_not_convert",
    "mxfp4": "dequantize modules_to_not_convert",
    "awq": """
        zero_point backend do_fuse fuse_max_seq_len modules_to_fuse exllama_config q_group_size w_bit
        modules_to_not_convert""",
    "gptq": """
        desc_act act_group_aware sym lm_head meta static_groups true_sequential damp_percent damp_auto_increment
        model_name_or_path model_file_base_name quantizer tokenizer dataset module_name_preceding_first_block
        use_exllama use_cuda_fp16 max_input_length exllama_config disable_exllama batch_size model_seqlen
        block_name_to_quantize cache_block_outputs modules_in_block_to_quantize pad_token_id backend mse
        offload_to_disk hyb_act rotation modules_to_not_convert""",
    "compressed-tensors": "ignore kv_cache_scheme quantization_status global_compression_ratio version run_compressed",
    "modelopt": "ignore exclude_modules kv_cache_quant_algo kv_cache_scheme producer config_groups group_size",
    "weights": "actorder observer observer_kwargs scale_dtype zp_dtype",
    "group": "input_activations output_activations format",
}
"""Method, or part of compressed-tensors -> keys that say nothing of the stored weights, or what the tensors say too."""
_IDLE = {part: frozenset(keys.split()) for part, keys in _NO_EFFECT.items()}
_KEYS: dict[str, Keys] = {
    "fp8": Keys(
        {**_LISTED, "weight_block_size": Key("layers", None, nullable=True)},
        {"fmt": ("e4m3", "e5m2", "float8_e4m3fn", "float8_e4m3", None), "scale_fmt": ("float", "ue8m0", None)},
        _IDLE["fp8"],
    ),
    "fbgemm_fp8": Keys(_LISTED, {}, _IDLE["fbgemm_fp8"]),
    "mxfp4": Keys(_LISTED, {}, _IDLE["mxfp4"]),
    "awq": Keys(
        {**_LISTED, "bits": Key("count", 4), "group_size": Key("number", 128)},
        {"version": ("gemm", "GEMM", None)},
        _IDLE["awq"],
    ),
    "gptq": Keys(
        {
            **_LISTED,
            "bits": Key("count", 4),
            "group_size": Key("number", 128),
            "checkpoint_format": Key("text", "gptq", nullable=True),
        },
        {
            "dynamic": (None, {}),
            "adapter": (None, {}),
            "pack_dtype": ("int32", None),
            "is_marlin_format": (False, None),
        },
        _IDLE["gptq"],
        {"format": "checkpoint_format"},
    ),
    "compressed-tensors": Keys(
        {
            **_LISTED,
            "format": Key("text", None, nullable=True),
            "config_groups": Key("object", None, nullable=True),
            "sparsity_config": Key("object", None, nullable=True),
            "transform_config": Key("object", None, nullable=True),
        },
        {},
        _IDLE["compressed-tensors"],
    ),
    "modelopt": Keys(
        {
            **_LISTED,
            "quant_algo": Key("text", None, nullable=True),
            "quantized_layers": Key("object", None, nullable=True),
        },
        {"has_zero_point": (False, None), "pre_quant_scale": (False, None)},
        _IDLE["modelopt"],
    ),
}
_GROUP = Keys({"targets": Key("names", None), "weights": Key("object", None, nullable=True)}, {}, _IDLE["group"])
_WEIGHTS = Keys(
    {
        "num_bits": Key("count", 8),
        "type": Key("text", "int"),
        "strategy": Key("text", None, nullable=True),
        "group_size": Key("number", None, nullable=True),
        "block_structure": Key("layers", None, nullable=True),
        "symmetric": Key("flag", True),
    },
    {"dynamic": (False, None)},
    _IDLE["weights"],
)
PACKED_FORMATS = (
    "float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip
"""Formats of compressed-tensors that are read."""
MODELOPT = {
    "FP8": "FP8 per tensor",
    "FP8_PB_WO": "block FP8",
    "FP8_PER_CHANNEL_PER_TOKEN": "FP8 per channel",
    "MXFP8": "MXFP8",
    "NVFP4": "NVFP4",
    "W4A16_NVFP4": "NVFP4",
    "W8A16": "INT8",
    "MIXED_PRECISION": "mixed precision",
}
"""Algorithms of modelopt that are read, with their names."""
WITHOUT_EFFECT = (
    ".input_scale", ".input_scale_ub", ".input_global_scale", ".input_zero_point", ".output_scale",
    ".output_zero_point", ".activation_scale", ".act_scale", ".k_scale", ".v_scale", ".q_scale", ".prob_output_scale",
    ".k_zero_point", ".v_zero_point", ".weight_shape",
)  # fmt: skip
"""Ends of names of tensors that quantised checkpoints have and that no weight needs: scales of activations and of a KV
cache, and shapes that the headers have too."""
QUANTISED = (
    ".qweight", ".qzeros", ".g_idx", ".scales", ".weight_scale", ".weight_scale_inv", ".weight_scale_2",
    ".weight_packed", ".weight_global_scale", ".weight_zero_point", ".pre_quant_scale", ".absmax", ".quant_map", ".SCB",
    "_blocks", "_scales",
)  # fmt: skip
"""Ends of names of tensors that only quantised checkpoints have."""
EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8")
AWQ_LANES = (0, 2, 4, 6, 1, 3, 5, 7)
MXFP4_GROUP = 32


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """What headers do not say of the weights of some modules."""

    words: str
    """Its usual name, for messages."""
    bits: int = 8
    block: tuple[int, int] | None = None
    """Rows and columns of a block with a common scale; None if the shape of the scales says it."""
    group_size: int | None = None
    """Inputs with a common scale, of packed integers; None for all of them."""
    is_symmetric: bool = True
    targets: tuple[str, ...] = ()
    """Modules that have it: names, or patterns after `re:`; a class such as Linear means any. Empty: any."""

    def has(self, module: str) -> bool:
        return not self.targets or any(_matches(target, module) for target in self.targets)


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == module or module.endswith(f".{target}") or target[:1].isupper()


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a checkpoint are quantised."""

    method: Method
    formats: tuple[WeightFormat, ...]
    adds_one: bool = False
    """Whether stored zero points are one too small (GPTQ, first version)."""

    @property
    def words(self) -> str:
        """Return what users call it."""
        return ", ".join(dict.fromkeys(each.words for each in self.formats))

    def format_of(self, module: str) -> WeightFormat:
        """Return the format of a module's weight; that of the first group if none names it."""
        return next((each for each in self.formats if each.has(module)), self.formats[0])


# ------------------------------------------------------------------------------------------------------------- configs


def read_quantization(config: object, folder: Path, where: str) -> Quantization | None:
    """Return the spec by the `quantization_config` of config.json, else by hf_quant_config.json; None without either.

    Raises ConfigError for a config that contradicts itself, UnsupportedModel, with the method's usual name, for one
    that is not read here.
    """
    beside = folder / HF_QUANT_CONFIG
    where = f"{where}: quantization_config"
    if not config and beside.is_file():
        config, where = _of_modelopt(beside), f"model.path: {beside}"
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where} is {config!r}, not an object")
    method = config.get("quant_method", "modelopt" if "quant_algo" in config else None)
    if method not in _KEYS:
        bits = next((config[key] for key in ("bits", "w_bit") if key in config), None)
        bits = next((n for n in (4, 8) if config.get(f"load_in_{n}bit")), bits)
        words = REFUSED.get(str(method), f"the method {method!r}") + (f" ({bits} bits)" if bits else "")
        _refuse(where, words)
    values = _KEYS[method].read(config, where)
    return _READERS[method](values, where)


def _refuse(where: str, words: str) -> NoReturn:
    known = "FP8, MXFP4, NVFP4, AWQ, GPTQ, compressed-tensors and modelopt"
    raise UnsupportedModel(
        f"{where}: weights quantised by {words} are not supported (known: {known}); take a bfloat16 version"
    )


def _of_modelopt(path: Path) -> dict[str, Any]:
    try:
        refuse_lfs_pointer(path)
        value = json.loads(path.read_text(encoding="utf-8"))
        return {"quant_method": "modelopt", **value["quantization"]} if value["quantization"].get("quant_algo") else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error}") from error


def _fp8(values: Mapping[str, Any], where: str) -> Quantization:
    block = _block_of(values["weight_block_size"], f"{where}.weight_block_size")
    words = "block FP8" if block else "FP8"
    return Quantization("fp8", (WeightFormat(words, block=block),))


def _block_of(value: Sequence[int] | None, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if len(value) != 2 or min(value) < 1:
        raise ConfigError(f"{where} is {value!r}, not two whole numbers of at least 1")
    return value[0], value[1]


def _fbgemm(values: Mapping[str, Any], where: str) -> Quantization:
    return Quantization("fbgemm_fp8", (WeightFormat("FP8 per channel"),))


def _mxfp4(values: Mapping[str, Any], where: str) -> Quantization:
    return Quantization("mxfp4", (WeightFormat("MXFP4", bits=4),))


def _group_size(value: float | None, where: str) -> int | None:
    """Return the group, or None for one group of all inputs, which is written as -1 or null."""
    if value is None or value == -1:
        return None
    if value != int(value) or value < 1:
        raise ConfigError(f"{where}: group_size is {value!r}, not a whole number of at least 1, or -1")
    return int(value)


def _awq(values: Mapping[str, Any], where: str) -> Quantization:
    if values["bits"] != 4:
        _refuse(where, f"AWQ with {values['bits']} bits")
    group = _group_size(values["group_size"], where)
    one = WeightFormat("AWQ (4 bits)", 4, group_size=group, is_symmetric=False)
    return Quantization("awq", (one,))


def _gptq(values: Mapping[str, Any], where: str) -> Quantization:
    bits, version = values["bits"], values["checkpoint_format"] or "gptq"
    if bits not in (2, 4, 8):
        _refuse(where, f"GPTQ with {bits} bits")
    if version not in ("gptq", "gptq_v2"):
        _refuse(where, f"GPTQ in the form {version!r}")
    one = WeightFormat(
        f"GPTQ ({bits} bits)", bits, group_size=_group_size(values["group_size"], where), is_symmetric=False
    )
    return Quantization("gptq", (one,), adds_one=version == "gptq")


def _compressed_tensors(values: Mapping[str, Any], where: str) -> Quantization:
    packing = values["format"] or "dense"
    if packing not in PACKED_FORMATS:
        _refuse(where, f"compressed-tensors in the format {packing!r}")
    sparsity = (values["sparsity_config"] or {}).get("format", "dense")
    if sparsity != "dense":
        _refuse(where, f"compressed-tensors and stored sparsely ({sparsity})")
    if (values["transform_config"] or {}).get("config_groups"):
        _refuse(where, "compressed-tensors with rotations (transform_config)")
    formats = []
    for name, group in (values["config_groups"] or {}).items():
        if not isinstance(group, Mapping):
            raise ConfigError(f"{where}: config_groups.{name} is {group!r}, not an object")
        given = _GROUP.read(group, f"{where}: config_groups.{name}")
        if given["weights"]:
            formats.append(_weights_of(given, f"{where}: config_groups.{name}.weights"))
    return Quantization("compressed-tensors", tuple(formats) or (WeightFormat("compressed-tensors"),))


def _weights_of(group: Mapping[str, Any], where: str) -> WeightFormat:
    values = _WEIGHTS.read(group["weights"], where)
    bits, kind = values["num_bits"], values["type"]
    if (kind, bits) not in (("float", 8), ("float", 4), ("int", 8), ("int", 4), ("int", 2)):
        _refuse(where, f"compressed-tensors with {bits} bits of type {kind}")
    strategy = values["strategy"] or ("group" if values["group_size"] else "tensor")
    block = _block_of(values["block_structure"], f"{where}: block_structure")
    size = _group_size(values["group_size"], where)
    if kind == "float":
        words = {
            "block": "block FP8",
            "channel": "FP8 per channel",
            "tensor": "FP8 per tensor",
            "group": "FP8 by groups",
        }
        name = words.get(strategy, "FP8") if bits == 8 else "NVFP4" if size != 32 else "MXFP4"
    else:
        name = f"INT{bits}" + (" (pack-quantized)" if bits < 8 else "")
    return WeightFormat(name, bits, block, size, values["symmetric"], tuple(group["targets"] or ()))


def _modelopt(values: Mapping[str, Any], where: str) -> Quantization:
    algorithm = (values["quant_algo"] or "").upper()
    if algorithm not in MODELOPT:
        _refuse(where, f"modelopt's {values['quant_algo'] or 'unnamed algorithm'}")
    words = {MODELOPT[algorithm]: None}
    for layer, form in (values["quantized_layers"] or {}).items():
        own = str(form.get("quant_algo", "")).upper() if isinstance(form, Mapping) else ""
        if own not in MODELOPT:
            _refuse(f"{where}: quantized_layers.{layer}", f"modelopt's {own or 'unnamed algorithm'}")
        words[MODELOPT[own]] = None
    block = (128, 128) if algorithm == "FP8_PB_WO" else None
    formats = tuple(WeightFormat(each, block=block) for each in words)
    return Quantization("modelopt", formats)


_READERS = {
    "fp8": _fp8, "fbgemm_fp8": _fbgemm, "mxfp4": _mxfp4, "awq": _awq, "gptq": _gptq,
    "compressed-tensors": _compressed_tensors, "modelopt": _modelopt,
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------- logical tensors
