"""LoRA adapters by their folders, as PEFT writes them: which linear layers one adapts, with which rank and scale. No
torch; no weights are read, except for the hash.

Called by launchers, `chitu plan` and `chitu doctor` before any process starts, and by the engine's builder. `lora.py`
computes with them. Invariant: what is computed is what PEFT computes. Every key of adapter_config.json is used, known
to have no effect, or refused by name. So is every tensor that adapts no layer known here, and every layer that the
config names and the file lacks.

Format: `base_model.model.LAYER.lora_A.weight` `[rank, in]` and `.lora_B.weight` `[out, rank]` for each adapted layer,
whose result becomes `W x + b + scale * B (A x)`. The scale is alpha / rank, or alpha / sqrt(rank) with `use_rslora`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chitu.config.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, refuse_lfs_pointer
from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.checkpoint import FLOATS, Entry, read_entries, tensor_shapes
from chitu.models.config import ModelSpec, weight_files
from chitu.models.config_keys import Key, Keys
from chitu.models.families import traits_of
from chitu.models.logical_tensors import logical_tensors

PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
HASH_CHARS = 32
LINEAR_LAYERS = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight")
GENERIC_LAYERS = re.compile(
    r"model\.(language_model\.)?layers\.\d+\.(self_attn\.\w+|mlp\.(gate|up|down|gate_up)_proj)\.weight"
)
"""Those of models of transformers' code: their inputs have all rows of a step, unlike those of experts."""
ALL_LINEAR = "all-linear"

_KEYS = Keys(
    used={
        "r": Key("count"),
        "lora_alpha": Key("positive"),
        "use_rslora": Key("flag", False),
        "target_modules": Key("patterns"),
        "exclude_modules": Key("patterns", None, nullable=True),
        "layers_to_transform": Key("numbers", None, nullable=True),
        "layers_pattern": Key("patterns", None, nullable=True),
        "rank_pattern": Key("object", None, nullable=True),
        "alpha_pattern": Key("object", None, nullable=True),
    },
    only={
        "peft_type": ("LORA",),
        "task_type": ("CAUSAL_LM", None),
        "bias": ("none",),
        "lora_bias": (False,),
        "fan_in_fan_out": (False,),
        "modules_to_save": (None, []),
        "target_parameters": (None, []),
        "trainable_token_indices": (None, [], {}),
        "layer_replication": (None, []),
        "use_dora": (False,),
        "use_qalora": (False,),
        "use_bdlora": (None,),
        "alora_invocation_tokens": (None, []),
        "megatron_config": (None,),
        "arrow_config": (None,),
        "kasa_config": (None,),
        "monteclora_config": (None,),
        "velora_config": (None,),
        # The other ways change the base's weights: `pissa`, `olora`, `loftq`, `corda`, `lora_ga`.
        "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    },
    no_effect=frozenset(
        {
            *(
                "base_model_name_or_path",
                "revision",
                "auto_mapping",
                "peft_version",
                "inference_mode",
                "runtime_config",
            ),
            *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
            *("megatron_core", "ensure_weight_tying"),
        }
    ),
)


class AdaptedLayer(NamedTuple):
    rank: int
    scale: float
    """Factor of `B (A x)`."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    name: str
    folder: Path
    layers: Mapping[str, AdaptedLayer]
    """By the base's name of the layer: `model.layers.0.self_attn.q_proj`."""

    @property
    def key(self) -> str:
        """Configuration key, for errors."""
        return f"model.adapters.{self.name}"

    @property
    def weights(self) -> Path:
        return self.folder / ADAPTER_WEIGHTS

    def num_numbers(self, linear: Mapping[str, tuple[int, ...]]) -> int:
        """Return how many numbers it has, of a model with these `linear_layers`."""
        return sum(one.rank * sum(linear[layer]) for layer, one in self.layers.items())

    def hash(self) -> str:
        """Return 32 hex digits of all bytes of its two files."""
        digest = hashlib.sha256()
        for file in (self.folder / ADAPTER_CONFIG, self.weights):
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()[:HASH_CHARS]


def read_adapters(folders: Mapping[str, str], model: ModelSpec, path: str | Path) -> list[AdapterSpec]:
    """Return the adapters by name. Raises as `read_adapter` does."""
    return [read_adapter(name, folder, model, path) for name, folder in sorted(folders.items())]


def hashes_of(adapters: Sequence[AdapterSpec]) -> tuple[tuple[str, str], ...]:
    """Return their names and hashes, as in `KVLayout.adapters`."""
    return tuple((adapter.name, adapter.hash()) for adapter in adapters)


def read_adapter(name: str, folder: str | Path, model: ModelSpec, path: str | Path) -> AdapterSpec:
    """Return an adapter of this model, whose folder is `path`, checked by the header of its weights. Raises ConfigError
    for files that are missing, broken or of another model, UnsupportedModel for what is not computed here."""
    require_adaptable(f"model.adapters.{name}", model)
    return adapter_of(name, folder, linear_layers(model, path))


def linear_layers(model: ModelSpec, path: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the layers that an adapter may adapt, with the shapes of their weights."""
    if model.code == "own":
        shapes, layers = dict(tensor_shapes(model, traits_of(model))), LINEAR_LAYERS
    else:
        files = logical_tensors(read_entries(weight_files(path)), model.quantization, f"model.path: {path}")
        shapes, layers = files.shapes, GENERIC_LAYERS
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if layers.fullmatch(name) and len(shape) == 2
    }


def require_adaptable(key: str, model: ModelSpec) -> None:
    """Raise UnsupportedModel for a model that takes no adapters."""
    if model.latent is not None:
        raise UnsupportedModel(f"{key}: LoRA adapters are not supported for models with latent attention")
    if model.state:
        raise UnsupportedModel(f"{key}: LoRA adapters are not supported for models with recurrent state")


def adapter_of(name: str, folder: str | Path, linear: Mapping[str, tuple[int, ...]]) -> AdapterSpec:
    """Return an adapter of a model with these `linear_layers`, as `read_adapter` does."""
    found = AdapterSpec(name, Path(folder), {})
    where = f"{found.key}: {found.folder / ADAPTER_CONFIG}"
    values = _KEYS.read(_read_json(found.folder / ADAPTER_CONFIG, where), where)
    try:
        layers = {layer: _adapted(values, layer, where) for layer in linear if _is_target(values, layer)}
    except re.error as error:
        raise ConfigError(f"{where}: the regular expression {error.pattern!r} is invalid: {error.msg}") from error
    if not layers:
        raise UnsupportedModel(
            f"{where}: target_modules {values['target_modules']!r} names no layer that can be adapted here: the "
            "projections of attention, and of the MLP where it is dense"
        )
    _check_tensors(found, layers, linear)
    return AdapterSpec(name, found.folder, layers)


def _read_json(file: Path, where: str) -> dict[str, Any]:
    try:
        refuse_lfs_pointer(file)
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{where} does not exist") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message.removeprefix('model.path: ')}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where} holds no JSON object")
    return value


def _is_target(values: Mapping[str, Any], layer: str) -> bool:
    """Return whether PEFT adapts this layer: a text is a regular expression, a list has names or ends of names."""
    if values["exclude_modules"] and _names(values["exclude_modules"], layer):
        return False
    targets, numbers = values["target_modules"], values["layers_to_transform"]
    if not (targets == ALL_LINEAR or _names(targets, layer)):
        return False
    if numbers is None or numbers == [] or isinstance(targets, str):
        return True
    patterns = values["layers_pattern"] or "layers"
    number = int(layer.partition("layers.")[2].split(".")[0])
    is_layer = "layers" in ([patterns] if isinstance(patterns, str) else patterns)
    return is_layer and number in ([numbers] if isinstance(numbers, int) else numbers)


def _names(patterns: str | list[str], layer: str) -> bool:
    if isinstance(patterns, str):
        return re.fullmatch(patterns, layer) is not None
    return any(layer == end or layer.endswith(f".{end}") for end in patterns)


def _adapted(values: Mapping[str, Any], layer: str, where: str) -> AdaptedLayer:
    rank = _of_pattern(values, "rank_pattern", layer, values["r"], where)
    alpha = _of_pattern(values, "alpha_pattern", layer, values["lora_alpha"], where)
    if rank != int(rank) or rank < 1:
        raise ConfigError(f"{where}: rank_pattern has the rank {rank} for {layer}")
    return AdaptedLayer(int(rank), alpha / (math.sqrt(rank) if values["use_rslora"] else rank))


def _of_pattern(values: Mapping[str, Any], key: str, layer: str, default: float, where: str) -> float:
    """Return the number of the first pattern that matches the layer's name or an end of it."""
    for pattern, number in (values[key] or {}).items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ConfigError(f"{where}: {key} has {number!r} for {pattern!r}, not a number")
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return number
    return default


def _check_tensors(adapter: AdapterSpec, layers: Mapping[str, AdaptedLayer], linear: Mapping[str, Any]) -> None:
    """Raise ConfigError or UnsupportedModel unless the file has the tensors of these layers and no others."""
    found = _entries(adapter)
    wanted: dict[str, tuple[int, int]] = {}
    for layer, (rank, _) in layers.items():
        outputs, inputs = linear[layer]
        wanted[f"{PREFIX}{layer}{DOWN}"] = (rank, inputs)
        wanted[f"{PREFIX}{layer}{UP}"] = (outputs, rank)
    if others := sorted(found.keys() - wanted.keys()):
        raise UnsupportedModel(
            f"{adapter.key}: {adapter.weights} has {len(others)} tensors that are not computed here, such as "
            f"{others[0]!r}: adapted are the projections of attention, and of the MLP where it is dense, as far as "
            "target_modules and layers_to_transform name them"
        )
    for name, shape in wanted.items():
        if name not in found:
            raise ConfigError(f"{adapter.key}: {adapter.weights} has no tensor {name!r}, which {ADAPTER_CONFIG} names")
        if found[name].shape != shape:
            raise ConfigError(
                f"{adapter.key}: {adapter.weights}: tensor {name!r} has shape {found[name].shape}; by the model and "
                f"{ADAPTER_CONFIG} it is {shape}"
            )
        if found[name].dtype not in FLOATS:
            raise UnsupportedModel(
                f"{adapter.key}: {adapter.weights}: tensor {name!r} of dtype {found[name].dtype} is not supported"
            )


def _entries(adapter: AdapterSpec) -> dict[str, Entry]:
    if not adapter.weights.is_file():
        has_pickle = (adapter.folder / "adapter_model.bin").is_file()
        cure = " (adapter_model.bin is not read: save it with safe_serialization=True)" if has_pickle else ""
        raise ConfigError(f"{adapter.key}: {adapter.folder} has no {ADAPTER_WEIGHTS}{cure}")
    try:
        return read_entries([adapter.weights])
    except ConfigError as error:
        raise ConfigError(f"{adapter.key}: {error.message.removeprefix('model.path: ')}") from error
