"""Reads a checkpoint folder's description of its model, without torch and without loading weights.

Owns the translation of Hugging Face's config.json into one frozen `ModelSpec`; `config_keys.py` lists the known keys of
the architectures that our own code computes, `generic/spec.py` reads the others, which transformers' modules compute.
Called by the engine's loader, and by the router, which needs limits, eos ids and the model hash but no tensors. What
this project cannot compute is refused here, by name, before any weights are read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from chitu.config.model_files import TENSORS_MANIFEST, refuse_lfs_pointer
from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.config_keys import ARCHITECTURES, TEXT_DECODERS, Key, NotByOwnCode, TextDecoder, value_of
from chitu.models.config_parts import ExpertSpec, LatentSpec, RopeSpec, read_expert_spec, read_latent_spec, read_rope
from chitu.models.generic.key_reads import keys_read
from chitu.models.generic.library import is_known, library_version
from chitu.models.generic.spec import read_text_shape
from chitu.models.gguf import SUFFIX, read_header
from chitu.models.quantization import Quantization, read_quantization
from chitu.models.trainer_tensors import content_digest
from chitu.protocol import CacheGroup, StateTensor

logger = logging.getLogger(__name__)
SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")
DIGEST_THREADS = 8
IGNORED = "%s: these keys are ignored, since transformers %s never reads them for this model: %s"
MAX_HEADER_BYTES = 100 << 20
WINDOWED = ("GptOssForCausalLM",)
"""Architectures whose windows our own code computes."""
SAMPLES = 64
"""Samples of the weights in a model's hash: 4 KiB each, at least one of each file."""
SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and constants of a decoder-only model."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    """Most tokens of one sequence: the requested limit, else as many as the positions reach."""
    rms_norm_eps: float
    rope: RopeSpec | None
    """None if transformers computes the model."""
    tie_word_embeddings: bool
    attention_bias: bool
    """Biases on q, k and v (Qwen2: always) and, on Llama with `attention_bias`, on o too."""
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    """eos ids of generation_config.json and config.json, without duplicates."""
    dtype: str
    """Dtype of the checkpoint: `float32`, `bfloat16` or `float16`."""
    experts: ExpertSpec | None = None
    """Mixture of experts; None if every layer has a dense MLP."""
    latent: LatentSpec | None = None
    """Latent attention. With it `num_kv_heads` and `head_dim` are those of the cache: one head, as wide as its rows."""
    groups: tuple[CacheGroup, ...] = ()
    """What layers keep of each token, and for how many: one group if all of them keep the same and see all tokens."""
    state: tuple[StateTensor, ...] = ()
    """What its recurrent layers keep of a sequence; empty if it has none. The dtype `auto` is that of the model."""
    num_extra_layers: int = 0
    """Layers behind the last one in the checkpoint, for multi-token prediction (DeepSeek-V3)."""
    windows: tuple[int | None, ...] = ()
    """Of each layer, if our own code computes some with a window: last positions that a token sees, None for all."""
    has_draft_layer: bool = False
    """Whether the first of them is computed, for drafts: the last of `groups` is then its own (`draft_layer.py`)."""
    quantization: Quantization | None = None
    """How the weights are stored; None if they are floating-point numbers."""
    code: Literal["own", "transformers"] = "own"
    """Whose code computes the model: `layers.py`, or the modules of transformers (`generic/`)."""
    is_text_part: bool = False
    """Whether the model has parts for images or sound, which are not computed."""
    tensor_prefix: str = ""
    """Begin of the names of its tensors in the files, if it is the text part and our own code computes it."""

    def window_of(self, layer: int) -> int | None:
        """Return the last positions that a token sees in a layer of our own code; None for all."""
        return self.windows[layer] if layer < len(self.windows) else None

    @property
    def family(self) -> str:
        """Module of `chitu.models` that has the traits of its family."""
        return ARCHITECTURES[self.architecture].module


def read_json(path: Path) -> dict[str, Any]:
    try:
        refuse_lfs_pointer(path)
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"model.path: {path} does not exist") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"model.path: {path} holds no JSON object")
    return value


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value or ())


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else "none named"


def _require_own(config: dict[str, Any], architecture: str, where: str) -> None:
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(f"{where}: architectures: {architecture!r} is not supported (known: {known})")
    wanted = ARCHITECTURES[architecture].model_types
    stated = config.get("model_type", wanted[0])
    if stated not in wanted:
        raise ConfigError(f"{where}: architectures: {architecture} has the model_type {wanted[0]!r}, not {stated!r}")


def _refuse_windows(values: dict[str, Any], served: int, where: str) -> None:
    """Raise UnsupportedModel if sequences longer than a sliding window are to be served."""
    window = values.get("sliding_window")
    if values.get("use_sliding_window", True) and window is not None and window < served:
        raise NotByOwnCode(
            "sliding_window",
            f"{where}: sliding_window is {window} tokens, and a window below the {served} tokens that are to be served "
            f"is not supported; model.max_model_len={window} serves the model without one",
        )
    full = "indexed_attention" if "index_topk" in values else "full_attention"
    if any(kind != full for kind in values["layer_types"] or ()):
        raise NotByOwnCode("layer_types", f"{where}: layer_types other than {full!r} are not supported")


def _served_tokens(reach: int, max_model_len: int | None, where: str) -> int:
    if max_model_len is not None and max_model_len > reach:
        raise ConfigError(
            f"model.max_model_len is {max_model_len}, but the model reaches {reach} tokens "
            f"(max_position_embeddings, or factor times the original ones with yarn, in {where})"
        )
    return max_model_len or reach


Code = Literal["auto", "own", "transformers"]


def read_model_spec(path: str | Path, max_model_len: int | None = None, code: Code = "auto") -> ModelSpec:
    """Return the spec of a checkpoint folder. Every key of config.json is used, known to have no effect, never read by
    the installed transformers (which is logged), or refused.

    `max_model_len`: most tokens of a served sequence; a sliding window at least that long has no effect. `code`: whose
    code computes the model; `auto` is our own if it knows the architecture and all that the config asks for. Raises
    ConfigError for a missing or broken config.json and for more tokens than the model reaches, UnsupportedModel for an
    architecture or feature that is not computed here.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"model.path: {folder} is not a folder")
    config, where = read_json(folder / "config.json"), f"model.path: {folder / 'config.json'}"
    architecture = _architecture(config)
    if architecture in TEXT_DECODERS and code != "transformers":
        return _read_text_part(folder, config, TEXT_DECODERS[architecture], where, max_model_len)
    if code == "transformers" or (code == "auto" and architecture not in ARCHITECTURES):
        return _read_generic(folder, config, architecture, where, max_model_len)
    try:
        return _read_own(folder, config, architecture, where, max_model_len)
    except NotByOwnCode as error:
        if code == "own" or not is_known(config.get("model_type"), error.key):
            raise  # a key that the library ignores, too
        try:
            return _read_generic(folder, config, architecture, where, max_model_len)
        except ConfigError:
            raise error from None


def _read_text_part(
    folder: Path, config: dict[str, Any], part: TextDecoder, where: str, max_model_len: int | None
) -> ModelSpec:
    """Return the spec of the text part of a model for images, which our own code computes."""
    if config.get("model_type") != part.model_type:
        raise ConfigError(f"{where}: model_type is {config.get('model_type')!r}, not {part.model_type!r}")
    ignored: list[str] = []
    outer = part.keys.read(config, where, partial(_idle_keys, part.model_type, ignored))
    text = outer.pop("text_config")
    for key, value in outer.items():
        if value is not None and text.get(key, value) != value:
            raise ConfigError(f"{where}: {key} is {value!r}, but {text[key]!r} in text_config")
    if ignored:
        logger.warning(IGNORED, where, library_version(), ", ".join(ignored))
    spec = _read_own(folder, text, _architecture(text), f"{where}: text_config", max_model_len)
    return replace(spec, is_text_part=True, tensor_prefix=part.prefix)


def _read_generic(
    folder: Path, config: dict[str, Any], architecture: str, where: str, max_model_len: int | None
) -> ModelSpec:
    """Return the spec of a model that transformers computes."""
    shape = read_text_shape(config, architecture, where)
    served = _served_tokens(shape.reach, max_model_len, where)
    if shape.exact_tokens is not None and served > shape.exact_tokens:
        raise UnsupportedModel(
            f"{where}: beyond {shape.exact_tokens} tokens the rope of this model turns all positions by the longest "
            f"sequence of a batch, which is not supported; model.max_model_len={shape.exact_tokens} serves the model"
        )
    _require_dtype(shape.dtype, where)
    return ModelSpec(
        architecture=architecture,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=max(group.num_kv_heads for group in shape.groups),
        head_dim=max(width for group in shape.groups for width in group.head_dims),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        max_model_len=served,
        rms_norm_eps=0.0,
        rope=None,
        tie_word_embeddings=shape.tie_word_embeddings,
        attention_bias=False,
        mlp_bias=False,
        eos_token_ids=_eos_token_ids(folder, shape.eos_token_id),
        dtype=shape.dtype,
        groups=shape.groups,
        code="transformers",
        is_text_part=shape.is_part,
        quantization=read_quantization(shape.quantization_config, folder, where),
        state=shape.state,
    )


def _require_dtype(dtype: str, where: str) -> None:
    if dtype not in SUPPORTED_DTYPES:
        raise UnsupportedModel(f"{where}: dtype {dtype!r} is not supported (known: {', '.join(SUPPORTED_DTYPES)})")


def _idle_keys(model_type: str, ignored: list[str], unknown: Mapping[str, str]) -> Collection[str]:
    """Return the unknown keys that transformers never reads for this type, and put them into `ignored`."""
    read = keys_read(unknown, model_type)
    idle = () if read is None else [key for key in unknown if key not in read]
    ignored.extend(f"{key!r}{unknown[key]}" for key in idle)
    return idle


def _read_own(
    folder: Path, config: dict[str, Any], architecture: str, where: str, max_model_len: int | None
) -> ModelSpec:
    """Return the spec of a model that our own code computes."""
    _require_own(config, architecture, where)
    ignored: list[str] = []
    find_idle = partial(_idle_keys, ARCHITECTURES[architecture].model_types[0], ignored)
    values = ARCHITECTURES[architecture].keys.read(config, where, find_idle)
    theta = ARCHITECTURES[architecture].rope_theta
    rope = read_rope(values, values["max_position_embeddings"], where, find_idle, theta)
    served = _served_tokens(rope.reach_tokens(values["max_position_embeddings"]), max_model_len, where)
    windows: tuple[int | None, ...] = ()
    if architecture in WINDOWED:
        windows = _windows(values, where)
    else:
        _refuse_windows(values, served, where)
    num_heads, num_layers = values["num_attention_heads"], values["num_hidden_layers"]
    num_kv_heads = values["num_key_value_heads"] or num_heads
    head_dim, latent = values["head_dim"] or values["hidden_size"] // num_heads, None
    if "kv_lora_rank" in values:
        latent = read_latent_spec(values, rope, where)
        num_kv_heads, head_dim = 1, latent.kv_rank + latent.rope_dim
    dtype = (values["dtype"] or "float32").removeprefix("torch.")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{where}: num_attention_heads ({num_heads}) is no multiple of num_key_value_heads ({num_kv_heads})"
        )
    if values["layer_types"] is not None and len(values["layer_types"]) != num_layers:
        raise ConfigError(f"{where}: layer_types has {len(values['layer_types'])}, num_hidden_layers is {num_layers}")
    rotated = head_dim if latent is None else latent.rope_dim
    if rotated % 2:
        raise NotByOwnCode("head_dim", f"{where}: an odd head_dim ({rotated}) is not supported")
    _require_dtype(dtype, where)
    if ignored:
        logger.warning(IGNORED, where, library_version(), ", ".join(dict.fromkeys(ignored)))
    return ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        vocab_size=values["vocab_size"],
        max_model_len=served,
        rms_norm_eps=float(values["rms_norm_eps"]),
        rope=rope,
        tie_word_embeddings=values["tie_word_embeddings"],
        attention_bias=values.get("attention_bias", False),
        mlp_bias=values.get("mlp_bias", False),
        eos_token_ids=_eos_token_ids(folder, values["eos_token_id"]),
        dtype=dtype,
        experts=read_expert_spec(values, architecture, where),
        latent=latent,
        groups=_groups(num_layers, num_kv_heads, head_dim, latent, windows),
        windows=windows,
        num_extra_layers=values.get("num_nextn_predict_layers", 0),
        quantization=read_quantization(values["quantization_config"], folder, where),
    )


def _windows(values: dict[str, Any], where: str) -> tuple[int | None, ...]:
    """Return the window of each layer: of gpt-oss, every second one has one unless `layer_types` says otherwise."""
    kinds, num_layers = values["layer_types"], values["num_hidden_layers"]
    if kinds is None:
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    strange = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if strange:
        raise NotByOwnCode("layer_types", f"{where}: layer_types {strange[0]!r} is not supported")
    if values["sliding_window"] is None and "sliding_attention" in kinds:
        raise NotByOwnCode("sliding_window", f"{where}: sliding_window is null, and layer_types has layers with one")
    return tuple(values["sliding_window"] if kind == "sliding_attention" else None for kind in kinds)


def _groups(
    num_layers: int, num_kv_heads: int, head_dim: int, latent: LatentSpec | None, windows: tuple[int | None, ...]
) -> tuple[CacheGroup, ...]:
    """Return the layers by what a token has in their cache: K and V, of all tokens or those in a window, a latent, a
    latent and an index key."""
    if latent is None:
        of_layers = windows or (None,) * num_layers
        return tuple(
            CacheGroup(
                tuple(layer for layer in range(num_layers) if of_layers[layer] == window),
                num_kv_heads,
                (head_dim, head_dim),
                window,
            )
            for window in dict.fromkeys(of_layers)
        )
    index = latent.index
    indexed = tuple(layer for layer in range(num_layers) if index is not None and layer in index.layers)
    others = tuple(layer for layer in range(num_layers) if layer not in indexed)
    groups = [CacheGroup(indexed, 1, (head_dim, index.head_dim))] if index is not None else []
    return (*groups, CacheGroup(others, 1, (head_dim,))) if others else tuple(groups)


def _eos_token_ids(folder: Path, of_config: int | list[int] | None) -> tuple[int, ...]:
    """Return all eos ids. Of generation_config.json also `sampling_defaults.py` reads keys."""
    path, of_generation = folder / "generation_config.json", None
    if path.is_file():
        wanted = Key("tokens", None, nullable=True)
        of_generation = value_of(read_json(path), "eos_token_id", wanted, f"model.path: {path}")
    return tuple(dict.fromkeys(_token_ids(of_generation) + _token_ids(of_config)))


def weight_files(path: str | Path) -> list[Path]:
    """Return a checkpoint's safetensors files in name order: `model.safetensors`, else those in the index, as
    transformers does; else all; else its GGUF files. Last, if there is one, the manifest of tensors in a trainer's
    memory. ConfigError if there is none or one is missing, UnsupportedModel for an adapter."""
    folder = Path(path)
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModel(
            f"model.path: {folder} holds an adapter (adapter_config.json): give it a name and its folder in "
            "model.adapters, and model.path the folder of the model alone"
        )
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    manifest = folder / TENSORS_MANIFEST
    if single.is_file():
        files = [single]
    elif index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"model.path: {index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        if any(Path(name).parent != Path() for name in names):
            raise ConfigError(f"model.path: {index} names files outside its folder")
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob(f"*{SUFFIX}"))
    if manifest.is_file():
        files.append(manifest)
    if not files:
        raise ConfigError(f"model.path: {folder} holds no safetensors file")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"model.path: {file} is missing")
    return files


def model_hash(path: str | Path, code: Literal["own", "transformers"] = "own") -> str:
    """Return 32 hex digits that are equal for two folders if they hold the same model and the same code computes it.

    Covers the version of transformers if it is its code, config.json, each weight file's name, size and header (names,
    shapes, dtypes, offsets), and samples of the weights: another training of the same architecture differs in them.
    Of a manifest it covers the content of all tensors.
    """
    folder = Path(path)
    digest = hashlib.sha256()
    config = read_json(folder / "config.json")
    config.pop("transformers_version", None)
    config.pop("_name_or_path", None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    if code == "transformers":
        digest.update(f"\0transformers {library_version()}".encode())
    files = weight_files(folder)
    for file in files:
        if file.name == TENSORS_MANIFEST:
            digest.update(b"\0" + content_digest(file))
            continue
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(_header(file))
        for piece in _samples(file, math.ceil(SAMPLES / len(files))):
            digest.update(piece)
    return digest.hexdigest()[:32]


def _samples(file: Path, count: int) -> Iterator[bytes]:
    """Yield pieces of a file, evenly spread."""
    with file.open("rb", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        for k in range(count):
            stream.seek(size * (2 * k + 1) // (2 * count))
            yield stream.read(SAMPLE_BYTES)


def weights_stamp(path: str | Path) -> tuple[tuple[object, ...], ...]:
    """Return what changes if a weight file is replaced or written: name, size and time of each; of a manifest its
    content. Some network file systems give an untouched file another inode."""
    return tuple(_stamp(file) for file in weight_files(path))


def _stamp(file: Path) -> tuple[object, ...]:
    if file.name == TENSORS_MANIFEST:
        return file.name, content_digest(file).hex()
    status = file.stat()
    return file.name, status.st_size, status.st_mtime_ns


def weights_digest(path: str | Path) -> bytes:
    """Return the digest of all bytes of the weight files. Reads several in parallel, at some 1 GB a second each, and no
    tensors of a manifest, which has their digests."""
    with ThreadPoolExecutor(DIGEST_THREADS) as threads:
        digests = threads.map(_file_digest, weight_files(path))
        return hashlib.sha256(b"".join(digests)).digest()


def _file_digest(file: Path) -> bytes:
    if file.name == TENSORS_MANIFEST:
        return content_digest(file)
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _header(file: Path) -> bytes:
    """Return the JSON header of a safetensors file, or the header of a GGUF file."""
    if file.suffix == SUFFIX:
        length = read_header(file).num_bytes
        with file.open("rb") as stream:
            return stream.read(length)
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        if length > MAX_HEADER_BYTES:
            raise ConfigError(f"model.path: {file} is no safetensors file")
        return stream.read(length)
