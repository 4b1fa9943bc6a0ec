"""Reads the sizes of a model that `transformers` computes, and refuses by name what cannot be computed by its modules
over our pages. No torch: the control plane needs limits and eos ids of every model.

Owns the rules of admission that a config can answer. The library knows what every key means, so keys are not listed
here: only the sizes that the engine needs are read, by the names and defaults of the library's config class
(`library.py`), and `model.py` compares them with the config object that the library makes. What no config tells is
found while loading, by the self-check (`check.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.config_keys import KINDS
from chitu.models.generic.library import (
    LEAST_VERSION,
    ConfigClass,
    code_has,
    find_config,
    has_class,
    is_too_old,
    library_version,
)
from chitu.models.generic.state_spec import CONV, FULL, HYBRID, LINEAR, MLP, MOE, layer_kinds, state_tensors
from chitu.protocol import CacheGroup, StateTensor

SLIDING, CHUNKED = "sliding_attention", "chunked_attention"
RECURRENT_KINDS = (FULL, LINEAR, HYBRID, CONV, MOE, MLP)
LATENT_KEYS = ("kv_lora_rank", "q_lora_rank")
INDEX_KEYS = ("index_topk", "index_n_heads", "index_head_dim", "sparse_attention_config")
HYBRID_PATTERN = "hybrid_layer_pattern"
"""List of 1 for layers with a window and heads of their own (`swa_*`), 0 for others."""
BY_LAYER_KEYS = (
    "swa_num_key_value_heads", "swa_head_dim", "global_head_dim", "num_global_key_value_heads", "block_configs",
    "attention_other_setting", "per_layer_config",
)  # fmt: skip
"""Keys of models whose heads differ by layer."""
PATTERNS = {"gpt_oss": 2, "gemma2": 2, "gemma3_text": 6, "cohere2": 4, "olmo3": 4, "exaone4": 4}
"""By `model_type`: every n-th layer has no window, if neither `layer_types` nor `sliding_window_pattern` is given."""


@dataclass(frozen=True, slots=True)
class TextShape:
    """Sizes of the text part of a model."""

    num_layers: int
    groups: tuple[CacheGroup, ...]
    """Layers with attention, by the shape of their pages: K and V."""
    num_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    reach: int
    """Most tokens of a sequence for which positions are defined."""
    exact_tokens: int | None
    """Most tokens for which rows of a batch do not change each other; None for any number."""
    tie_word_embeddings: bool
    eos_token_id: int | list[int] | None
    dtype: str
    quantization_config: dict[str, Any] | None
    is_part: bool
    """Whether the model has other parts (images, sound), which are not computed."""
    state: tuple[StateTensor, ...]
    """What its recurrent layers keep of a sequence."""


def read_text_shape(config: Mapping[str, Any], architecture: str, where: str) -> TextShape:
    """Return the sizes. Raises ConfigError for a size that is missing or of the wrong type, UnsupportedModel for what
    cannot be computed over pages."""
    model_type, version = config.get("model_type"), library_version()
    if is_too_old(version):
        least = ".".join(map(str, LEAST_VERSION))
        raise UnsupportedModel(
            f"{where}: architectures: {architecture!r} is not supported: it needs transformers {least} or newer, which "
            f"computes models that our own code does not, and {version} is installed"
        )
    if not isinstance(model_type, str):
        raise UnsupportedModel(f"{where}: architectures: {architecture!r} without a model_type is not supported")
    outer = find_config(model_type)
    if outer is None or not has_class(architecture, model_type):
        remote = ", and code of the folder (auto_map) is never run" if config.get("auto_map") else ""
        raise UnsupportedModel(
            f"{where}: architectures: {architecture!r} is not supported: transformers {version} has no class of this "
            f"name and model_type ({model_type}){remote}"
        )
    text, own = _text_part(config, outer, where)
    reader = TextReader(text, own, where)
    recurrent = {**text, "model_type": own.defaults.get("model_type")}
    try:
        kinds, state = layer_kinds(recurrent), state_tensors(recurrent)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    _refuse(config, text, own, architecture, kinds, where)
    if kinds is None:
        kinds = (FULL,) * reader.count("num_hidden_layers")
    num_heads, hidden_size = reader.count("num_attention_heads"), reader.count("hidden_size")
    head_dim = reader.value("head_dim") or hidden_size // num_heads
    if reader.value("kv_lora_rank"):
        head_dim = reader.count("qk_nope_head_dim") + reader.count("qk_rope_head_dim")
    reach, exact = _reach(reader, where)
    return TextShape(
        num_layers=len(kinds),
        groups=_groups(
            reader,
            tuple(layer for layer, kind in enumerate(kinds) if kind in (FULL, HYBRID)),
            CacheGroup(
                (),
                reader.value("num_key_value_heads") or num_heads,
                (head_dim, reader.value("v_head_dim") or head_dim),
            ),
            layer_windows(reader, len(kinds)),
        ),
        num_heads=num_heads,
        hidden_size=hidden_size,
        intermediate_size=reader.value("intermediate_size") or 4 * hidden_size,
        vocab_size=reader.count("vocab_size"),
        reach=reach,
        exact_tokens=exact,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", reader.value("tie_word_embeddings"))),
        eos_token_id=config.get("eos_token_id", reader.value("eos_token_id")),
        dtype=_first(text.get("dtype"), text.get("torch_dtype"), config.get("dtype"), config.get("torch_dtype"))
        or "float32",
        quantization_config=_first(config.get("quantization_config"), text.get("quantization_config")),
        is_part=own is not outer,
        state=state,
    )


def _groups(
    reader: TextReader, layers: tuple[int, ...], usual: CacheGroup, windows: tuple[int | None, ...]
) -> tuple[CacheGroup, ...]:
    """Return the groups of these layers. `usual`: shape of a page of most models' layers; MiMo's layers with windows
    have another one. `windows`: of all layers."""
    pattern = reader.text.get(HYBRID_PATTERN)
    if not isinstance(pattern, list):
        return tuple(
            CacheGroup(
                tuple(layer for layer in layers if windows[layer] == window),
                usual.num_kv_heads,
                usual.head_dims,
                window,
            )
            for window in dict.fromkeys(windows[layer] for layer in layers)
        )
    if len(pattern) != len(layers):
        raise ConfigError(f"{reader.where}: {HYBRID_PATTERN} has {len(pattern)} layers, not {len(layers)}")
    widths = (reader.count("swa_head_dim"), reader.count("swa_v_head_dim"))
    groups = (
        CacheGroup(tuple(each for each in layers if not pattern[each]), usual.num_kv_heads, usual.head_dims),
        CacheGroup(
            tuple(each for each in layers if pattern[each]),
            reader.count("swa_num_key_value_heads"),
            widths,
            reader.text["sliding_window_size"] + 1  # which the library lets win
            if isinstance(reader.text.get("sliding_window_size"), int)
            else reader.value("sliding_window"),
        ),
    )
    return tuple(group for group in groups if group.layers)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _text_part(config: Mapping[str, Any], outer: ConfigClass, where: str) -> tuple[Mapping[str, Any], ConfigClass]:
    """Return the keys of the text part and its config class."""
    if not outer.text_type and "text_config" not in config:
        return config, outer
    text = config.get("text_config", config)  # older files have the keys of the text part among the others
    if not isinstance(text, dict):
        raise ConfigError(f"{where}: text_config is {text!r}, not an object")
    model_type = (text.get("model_type") if text is not config else None) or outer.text_type
    own = find_config(model_type) if isinstance(model_type, str) else None
    if own is None:
        version = library_version()
        raise UnsupportedModel(f"{where}: text_config: transformers {version} has no model_type {model_type!r}")
    return text, own


@dataclass(frozen=True, slots=True)
class TextReader:
    text: Mapping[str, Any]
    own: ConfigClass
    where: str

    def value(self, key: str) -> Any:
        """Return the value of the key under any of its names, or its default."""
        names = (key, self.own.aliases.get(key, key))
        for source in (self.text, self.own.defaults):
            for name in names:
                if name in source:
                    return source[name]
        return None

    def count(self, key: str) -> int:
        value = self.value(key)
        words, is_right = KINDS["count"]
        if value is None:
            raise ConfigError(f"{self.where} lacks {key!r}")
        if not is_right(value):
            raise ConfigError(f"{self.where}: {key} is {value!r}, not {words}")
        return int(value)


def _refuse(
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    own: ConfigClass,
    architecture: str,
    recurrent: tuple[str, ...] | None,
    where: str,
) -> None:
    """`recurrent`: kinds of the layers of a model type whose states are known, else None."""

    def unsupported(what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{where}: {architecture}: {what}")

    for part in (config, text):
        if part.get("is_encoder_decoder"):
            raise unsupported("an encoder (is_encoder_decoder) is not supported")
    for key in INDEX_KEYS:
        if text.get(key):
            raise unsupported(f"sparse attention by an index ({key}) is not supported")
    for key in LATENT_KEYS:
        if text.get(key) and recurrent is None:  # our own latent layers are not between recurrent ones
            raise unsupported(
                f"latent attention ({key}) is computed by our own code only, which does not know this architecture: "
                "expanded keys and values would need 10 to 60 times its memory"
            )
    for key in BY_LAYER_KEYS:
        if text.get(key) and not (key.startswith("swa_") and HYBRID_PATTERN in text):
            raise unsupported(f"layers with different heads ({key}) are not supported")
    if isinstance(text.get("num_attention_heads"), list) or isinstance(text.get("num_key_value_heads"), list):
        raise unsupported("layers with different heads (num_attention_heads) are not supported")
    if text.get("num_kv_shared_layers"):
        raise unsupported("layers that share keys and values (num_kv_shared_layers) are not supported")
    is_stateful = code_has(own, "_is_stateful = True") or code_has(own, ".update_conv_state(")
    if is_stateful and recurrent is None:
        raise unsupported(f"the recurrent state of {own.defaults.get('model_type')!r} is not known here")
    known = (FULL, SLIDING, CHUNKED) if recurrent is None else RECURRENT_KINDS
    strange = [kind for kind in recurrent or text.get("layer_types") or () if kind not in known]
    if strange:
        raise unsupported(f"layers of the kind {strange[0]!r} (layer_types, hybrid_override_pattern) are not supported")
    if recurrent is not None and not {FULL, HYBRID} & set(recurrent):
        keys = "layer_types, full_attention_interval, hybrid_override_pattern, linear_attn_config"
        raise unsupported(f"a model in which no layer has attention ({keys}) is not supported")
    if not code_has(own, "ALL_ATTENTION_FUNCTIONS"):
        raise unsupported("its code in transformers has no attention interface")


def _reach(reader: TextReader, where: str) -> tuple[int, int | None]:
    """Return the most tokens that positions reach, and the most for which they are those of a lone sequence."""
    positions = reader.count("max_position_embeddings")
    scaling = reader.text.get("rope_parameters") or reader.text.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ConfigError(f"{where}: rope_scaling is {scaling!r}, not an object")
    by_layer = [each for each in scaling.values() if isinstance(each, dict)]
    exact: int | None = None
    for each in by_layer or [scaling]:
        kind = each.get("rope_type", each.get("type"))
        original = each.get("original_max_position_embeddings") or reader.value("original_max_position_embeddings")
        factor = each.get("factor")
        if each.get("attn_factor", 1) not in (1, None):
            raise UnsupportedModel(
                f"{where}: attn_factor {each['attn_factor']} is not supported: transformers ignores it, while other "
                "engines multiply cos and sin by it; remove it for the tokens of transformers"
            )
        if kind in ("longrope", "su"):
            exact = min(exact or positions, original or positions)
        elif kind == "dynamic":
            exact = min(exact or positions, positions)
        elif kind == "yarn" and original and isinstance(factor, int | float):
            positions = max(positions, int(factor * original))
    return positions, exact


def layer_windows(reader: TextReader, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer, None where a layer sees all positions or it is not known."""
    window = reader.value("sliding_window")
    if not isinstance(window, int) or reader.value("use_sliding_window") is False:
        return (None,) * num_layers
    kinds = reader.text.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        return tuple(window if kind == SLIDING else None for kind in kinds)
    model_type = str(reader.own.defaults.get("model_type"))
    period = _first(reader.value("sliding_window_pattern"), PATTERNS.get(model_type))
    if isinstance(period, int) and period > 0:
        return tuple(window if (layer + 1) % period else None for layer in range(num_layers))
    if model_type in ("mistral", "mixtral", "phi3", "starcoder2"):
        return (window,) * num_layers
    return (None,) * num_layers
