"""Which layers of a config have keys and values, which have a recurrent state, and the shapes of the states. No torch.

Owns the readings of the model types whose states are served. A config is the text part of a config.json as a
dictionary; missing keys have the defaults of transformers' config classes. The shapes are checked against the modules
when a model is loaded (`states.py`), and the self-check of the generic family compares logits.

Names: `conv` has the newest inputs of a causal convolution `[channels, kernel]`, in the model's dtype (`auto`);
`recurrent` the state of the scan or of the delta rule, always float32, as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from chitu.errors import ConfigError
from chitu.protocol import StateTensor

Config = Mapping[str, Any]
CONV: Final = "conv"
RECURRENT: Final = "recurrent"
FULL: Final = "full_attention"
LINEAR: Final = "linear_attention"
HYBRID: Final = "hybrid"
"""A layer with attention and a state."""
MOE: Final = "moe"
MLP: Final = "mlp"
OLD_NAMES: Final = {"attention": FULL, "mamba": LINEAR}
NEMOTRON_LAYERS: Final = {"M": LINEAR, "*": FULL, "E": MOE, "-": MLP}


class MixerShape(NamedTuple):
    """Shape of a mixer's state."""

    blocks: tuple[int, ...]
    """Channels of the convolution, in the blocks that tensor parallelism cuts one by one."""
    kernel: int
    recurrent: tuple[int, ...] = ()
    """Heads first; () if the convolution is all that the mixer remembers."""
    heads: tuple[int, ...] = ()
    """Heads or groups of each block, which a rank holds whole; () if any channel can be cut from the next."""


class Family(NamedTuple):
    """How a model type describes its layers and its mixers."""

    kinds: Callable[[Config], tuple[str, ...]]
    mixer: Callable[[Config], MixerShape]


def _size(config: Config, key: str, default: int | None = None) -> int:
    """Return a size, or the default if it is missing or null. Raises ConfigError for anything else."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} is {value!r}, not a whole number of at least 1")
    return value


def _list(config: Config, key: str) -> list[Any]:
    """Return a list, empty if it is missing or null. Raises ConfigError for anything else."""
    value = config.get(key)
    if not isinstance(value, list | None):
        raise ConfigError(f"{key} is {value!r}, not a list")
    return value or []


def _layers(config: Config) -> range:
    return range(_size(config, "num_hidden_layers"))


def _named(config: Config) -> tuple[str, ...]:
    """Return the kinds that the config names; () if it names none."""
    kinds = _list(config, "layer_types") or _list(config, "layers_block_type")
    return tuple(OLD_NAMES.get(str(kind), str(kind)) for kind in kinds)


def _by_interval(config: Config) -> tuple[str, ...]:
    """Return the layers of Qwen3-Next: every fourth has full attention."""
    interval = _size(config, "full_attention_interval", 4)
    return _named(config) or tuple(LINEAR if (layer + 1) % interval else FULL for layer in _layers(config))


def _granite(config: Config) -> tuple[str, ...]:
    return _named(config) or (LINEAR,) * len(_layers(config))


def _nemotron(config: Config) -> tuple[str, ...]:
    pattern = config.get("hybrid_override_pattern") or "ME*-"
    if not isinstance(pattern, str):
        raise ConfigError(f"hybrid_override_pattern is {pattern!r}, not a text")
    return _named(config) or tuple(NEMOTRON_LAYERS.get(letter, letter) for letter in pattern)


def _kimi(config: Config) -> tuple[str, ...]:
    """Return the layers of Kimi-Linear, whose lists count from 1."""
    full = _list(_kimi_part(config), "full_attn_layers")
    if not full:
        full = [layer + 1 for layer in _layers(config) if layer and layer % 4 == 0]
    return _named(config) or tuple(FULL if layer + 1 in full else LINEAR for layer in _layers(config))


def _kimi_part(config: Config) -> Config:
    part = config.get("linear_attn_config") or {}
    return part if isinstance(part, Mapping) else {}


def _lfm2(config: Config) -> tuple[str, ...]:
    full = _list(config, "full_attn_idxs") or _layers(config)
    return _named(config) or tuple(FULL if layer in full else CONV for layer in _layers(config))


def _jamba(config: Config) -> tuple[str, ...]:
    period, offset = _size(config, "attn_layer_period", 8), config.get("attn_layer_offset", 4)
    return tuple(FULL if layer % period == offset else LINEAR for layer in _layers(config))


def _bamba(config: Config) -> tuple[str, ...]:
    full = _list(config, "attn_layer_indices")
    return tuple(FULL if layer in full else LINEAR for layer in _layers(config))


def _all_hybrid(config: Config) -> tuple[str, ...]:
    return (HYBRID,) * len(_layers(config))


def _delta_net(config: Config) -> MixerShape:
    """Describe the gated delta net of Qwen3-Next and Qwen3.5."""
    key, value = _size(config, "linear_key_head_dim", 128), _size(config, "linear_value_head_dim", 128)
    num_keys, num_values = _size(config, "linear_num_key_heads", 16), _size(config, "linear_num_value_heads", 32)
    blocks = (num_keys * key, num_keys * key, num_values * value)
    kernel, heads = _size(config, "linear_conv_kernel_dim", 4), (num_keys, num_keys, num_values)
    return MixerShape(blocks, kernel, (num_values, key, value), heads)


def _kimi_delta(config: Config) -> MixerShape:
    part = _kimi_part(config)
    heads = _size(part, "num_heads", _size(config, "linear_num_heads", 32))
    width = _size(part, "head_dim", _size(config, "linear_head_dim", 128))
    kernel = _size(part, "short_conv_kernel_size", _size(config, "linear_conv_kernel_dim", 4))
    return MixerShape((heads * width,) * 3, kernel, (heads, width, width), (heads,) * 3)


def _mamba2(config: Config) -> MixerShape:
    """Describe the Mamba-2 of Granite-4-H and Bamba."""
    return _mamba2_of(config, _size(config, "mamba_expand", 2) * _size(config, "hidden_size"))


def _falcon(config: Config) -> MixerShape:
    """Describe the Mamba-2 of Falcon-H1, whose width has a key of its own; null means as in `_mamba2`."""
    width = config.get("mamba_d_ssm", 1024)
    return _mamba2(config) if width is None else _mamba2_of(config, _size(config, "mamba_d_ssm", 1024))


def _mamba2_of(config: Config, inner: int) -> MixerShape:
    state, heads = _size(config, "mamba_d_state", 256), _size(config, "mamba_n_heads", 128)
    groups = _size(config, "mamba_n_groups", 1)
    blocks = (inner, groups * state, groups * state)
    kernel = _size(config, "mamba_d_conv", 4)
    return MixerShape(blocks, kernel, (heads, inner // heads, state), (heads, groups, groups))


def _nemotron_mamba2(config: Config) -> MixerShape:
    heads, width = _size(config, "mamba_num_heads", 128), _size(config, "mamba_head_dim", 64)
    groups = _size(config, "mamba_n_groups", _size(config, "n_groups", 8))
    kernel = _size(config, "mamba_d_conv", _size(config, "conv_kernel", 4))
    state = _size(config, "ssm_state_size", 128)
    blocks = (heads * width, groups * state, groups * state)
    return MixerShape(blocks, kernel, (heads, width, state), (heads, groups, groups))


def _mamba1(config: Config) -> MixerShape:
    inner = _size(config, "mamba_expand", 2) * _size(config, "hidden_size")
    return MixerShape((inner,), _size(config, "mamba_d_conv", 4), (inner, _size(config, "mamba_d_state", 16)))


def _short_conv(config: Config) -> MixerShape:
    return MixerShape((_size(config, "hidden_size"),), _size(config, "conv_L_cache", 3))


FAMILIES: Final[Mapping[str, Family]] = {
    "bamba": Family(_bamba, _mamba2),
    "falcon_h1": Family(_all_hybrid, _falcon),
    "granitemoehybrid": Family(_granite, _mamba2),
    "jamba": Family(_jamba, _mamba1),
    "kimi_linear": Family(_kimi, _kimi_delta),
    "lfm2": Family(_lfm2, _short_conv),
    "lfm2_moe": Family(_lfm2, _short_conv),
    "nemotron_h": Family(_nemotron, _nemotron_mamba2),
    "qwen3_5_moe_text": Family(_by_interval, _delta_net),
    "qwen3_5_text": Family(_by_interval, _delta_net),
    "qwen3_next": Family(_by_interval, _delta_net),
}
"""By `model_type` of the text part."""


def layer_kinds(config: Config) -> tuple[str, ...] | None:
    """Return the kind of each layer in transformers' words, or None for a model type that is not in `FAMILIES`."""
    family = FAMILIES.get(config.get("model_type", ""))
    return None if family is None else family.kinds(config)


def state_tensors(config: Config) -> tuple[StateTensor, ...]:
    """Return the state of a request in the whole model, by layer; () for a model type without one."""
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        return ()
    mixer = family.mixer(config)
    conv = (CONV, "auto", (sum(mixer.blocks), mixer.kernel), mixer.blocks, mixer.heads)
    tensors = [conv, (RECURRENT, "float32", mixer.recurrent, (), ())] if mixer.recurrent else [conv]
    return tuple(
        StateTensor(layer=layer, name=name, dtype=of, shape=shape, cut=cut, heads=heads)
        for layer, kind in enumerate(family.kinds(config))
        if kind in (LINEAR, HYBRID, CONV)
        for name, of, shape, cut, heads in tensors
    )
