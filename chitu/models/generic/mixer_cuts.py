"""Which part of a recurrent mixer a rank has: a gated delta net, Kimi's, Mamba-2, Mamba-1 or a short convolution.

Owns which tensors of these modules of transformers are cut, and along which blocks: the plans of the library leave
them whole. A mixer is known by its attributes, and its tensors must be those of the kind, in sizes that the attributes
explain: any other is refused by name, since a tensor that is cut wrongly computes something, too. Heads and groups are
shared out like KV heads (`config/tensor_parallel.py`), as those of the state are (`state_spec.py`). Pure; called while
the model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from torch import nn

from chitu.config.tensor_parallel import kv_heads_of, kv_heads_per_rank
from chitu.errors import UnsupportedModel

Pieces = tuple[int, tuple[range, ...]]
"""Dimension of a tensor, and the parts of it that a rank has."""


class Block(NamedTuple):
    """Numbers side by side in a dimension that are cut for themselves, in whole heads."""

    size: int
    num_heads: int


class NormGroup(NamedTuple):
    """A group of a gated norm that several ranks have parts of."""

    num_groups: int
    own: int
    """Group of this rank."""
    width: int
    """Numbers of the whole group."""


class MixerCut(NamedTuple):
    """A rank's part of a mixer. Names are within it."""

    pieces: dict[str, Pieces]
    """Of tensors that are cut; the others are whole."""
    sizes: dict[str, int]
    """Attributes by which the module computes, and their new values. They are set after the library has initialised
    the module, which it does by the old ones."""
    summed: tuple[str, ...]
    """Linear layers that are cut by their inputs, whose results are summed over the ranks."""
    norm: NormGroup | None = None
    """Set if `norm` needs numbers of other ranks."""


class _MixerPart:
    """What is known of a mixer while its tensors are told apart."""

    def __init__(self, name: str, mixer: Any, tp_size: int, tp_rank: int) -> None:
        self.name, self.mixer, self.tp_size, self.tp_rank = name, mixer, tp_size, tp_rank
        self.pieces: dict[str, Pieces] = {}
        self._shapes = {name: tuple(each.shape) for name, each in (*mixer.named_parameters(), *mixer.named_buffers())}
        self._left = set(self._shapes)

    def heads(self, num_heads: int) -> range:
        return kv_heads_of(num_heads, self.tp_size, self.tp_rank)

    def share(self, number: int, num_heads: int) -> int:
        """Return what a rank has of a number that belongs to so many heads."""
        return number // num_heads * kv_heads_per_rank(num_heads, self.tp_size)

    def cut(self, name: str, dim: int, *blocks: Block) -> None:
        """Note how a tensor is cut, if the mixer has it."""
        parts, start = [], 0
        for size, num_heads in blocks:
            own, width = self.heads(num_heads), size // num_heads
            parts.append(range(start + own.start * width, start + own.stop * width))
            start += size
        self.cut_to(name, dim, start, parts)

    def cut_to(self, name: str, dim: int, size: int, parts: list[range]) -> None:
        """Do the same with these parts of a dimension of this size."""
        shape = self._shapes.get(name)
        if shape is None:
            return
        if len(shape) <= dim or shape[dim] != size:
            raise self._strange(name, f": {size} numbers are expected in dimension {dim}")
        self.pieces[name] = dim, tuple(parts)
        self._left.remove(name)

    def whole(self, *names: str) -> None:
        """Note tensors of which every rank has all."""
        self._left.difference_update(names)

    def done(self, *summed: str, norm: NormGroup | None = None, **sizes: int) -> MixerCut:
        """Return the cut. `sizes`: the attributes. Raise UnsupportedModel if a tensor was not named."""
        for name in sorted(self._left):
            raise self._strange(name, "")
        return MixerCut(self.pieces, sizes, summed, norm)

    def _strange(self, name: str, why: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{type(self.mixer).__name__} is served with tp_size 1 only: it is not known how {name!r} "
            f"{self._shapes[name]} of {self.name!r} is cut{why}"
        )


def cut_of(name: str, mixer: nn.Module, tp_size: int, tp_rank: int) -> MixerCut:
    """Return a rank's part of a mixer, whose heads the ranks can share. `name`: for errors. Raises UnsupportedModel if
    the kind of mixer, or one of its tensors, is not known."""
    for attributes, cut in KINDS.items():
        if all(hasattr(mixer, each) for each in attributes):
            return cut(_MixerPart(name, mixer, tp_size, tp_rank))
    raise UnsupportedModel(
        f"{type(mixer).__name__} is served with tp_size 1 only: it is not known how the mixer {name!r} is cut"
    )


def _delta_net(part: _MixerPart) -> MixerCut:
    """Cut the mixer of Qwen3-Next and Qwen3.5."""
    m = part.mixer
    keys, values = Block(m.key_dim, m.num_k_heads), Block(m.value_dim, m.num_v_heads)
    of_values = Block(m.num_v_heads, m.num_v_heads)
    _cut_by_key_heads(part, "in_proj_qkvz.weight", (1, 1), (m.head_v_dim, m.head_v_dim))
    _cut_by_key_heads(part, "in_proj_ba.weight", (), (1, 1))
    part.cut("in_proj_qkv.weight", 0, keys, keys, values)
    part.cut("in_proj_z.weight", 0, values)
    for name in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"):
        part.cut(name, 0, of_values)
    part.cut("conv1d.weight", 0, keys, keys, values)
    part.cut("out_proj.weight", 1, values)
    part.whole("norm.weight")
    key_dim, value_dim = part.share(*keys), part.share(*values)
    return part.done(
        "out_proj",
        num_k_heads=part.share(m.num_k_heads, m.num_k_heads),
        num_v_heads=part.share(*of_values),
        key_dim=key_dim,
        value_dim=value_dim,
        conv_dim=2 * key_dim + value_dim,
    )


def _cut_by_key_heads(part: _MixerPart, name: str, of_keys: tuple[int, ...], of_values: tuple[int, ...]) -> None:
    """Cut a projection whose outputs lie by key head: what belongs to it (`of_keys`, in widths of a key), then, block
    by block, what belongs to each of its value heads (`of_values`)."""
    m = part.mixer
    ratio, own_values, parts, start = m.num_v_heads // m.num_k_heads, part.heads(m.num_v_heads), [], 0
    own_keys = part.heads(m.num_k_heads)
    for head in range(m.num_k_heads):
        first = max(own_values.start - head * ratio, 0)
        count = min(own_values.stop - head * ratio, ratio) - first
        for width in of_keys:
            if head in own_keys:
                parts.append(range(start, start + width * m.head_k_dim))
            start += width * m.head_k_dim
        for width in of_values:
            if head in own_keys:
                parts.append(range(start + first * width, start + (first + count) * width))
            start += ratio * width
    part.cut_to(name, 0, start, parts)


def _kimi_delta(part: _MixerPart) -> MixerCut:
    m = part.mixer
    heads, of_heads = Block(m.qkv_dim, m.num_heads), Block(m.num_heads, m.num_heads)
    for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "g_b_proj.weight"):
        part.cut(name, 0, heads)
    part.cut("conv1d.weight", 0, heads, heads, heads)
    part.cut("b_proj.weight", 0, of_heads)
    part.cut("forget_gate.f_b_proj.weight", 0, heads)
    part.cut("forget_gate.dt_bias", 0, heads)
    part.cut("forget_gate.A_log", 2, of_heads)
    part.cut("o_proj.weight", 1, heads)
    part.whole("g_a_proj.weight", "forget_gate.f_a_proj.weight", "o_norm.weight")
    width = part.share(*heads)
    return part.done("o_proj", num_heads=part.share(*of_heads), qkv_dim=width, conv_dim=3 * width)


def _mamba_2(part: _MixerPart) -> MixerCut:
    m = part.mixer
    inner, heads = Block(m.intermediate_size, m.num_heads), Block(m.num_heads, m.num_heads)
    group = Block(m.n_groups * m.ssm_state_size, m.n_groups)
    for name in ("in_proj.weight", "in_proj.bias"):
        part.cut(name, 0, inner, inner, group, group, heads)
    part.cut("mup_vector", 2, inner, inner, group, group, heads)
    for name in ("conv1d.weight", "conv1d.bias"):
        part.cut(name, 0, inner, group, group)
    for name in ("A_log", "D", "dt_bias"):
        part.cut(name, 0, heads)
    part.cut("norm.weight", 0, inner)
    part.cut("out_proj.weight", 1, inner)
    part.whole("out_proj.bias")
    num_groups, width = part.share(m.n_groups, m.n_groups), part.share(*inner)
    sizes = {
        "num_heads": part.share(*heads),
        "intermediate_size": width,
        "n_groups": num_groups,
        "conv_dim": width + 2 * part.share(*group),
    }
    norm = None
    if "norm.weight" in part.pieces:
        if hasattr(m.norm, "n_groups"):
            sizes["norm.n_groups"] = num_groups
        if m.n_groups < part.tp_size:
            norm = NormGroup(m.n_groups, part.heads(m.n_groups).start, m.intermediate_size // m.n_groups)
            if hasattr(m.norm, "group_size"):
                sizes["norm.group_size"] = width
    return part.done("out_proj", norm=norm, **sizes)


def _mamba_1(part: _MixerPart) -> MixerCut:
    """Cut the mixer of Jamba by channels. Time step, B and C are of all channels, so their projection is summed."""
    inner = Block(part.mixer.intermediate_size, part.mixer.intermediate_size)
    for name in ("in_proj.weight", "in_proj.bias"):
        part.cut(name, 0, inner, inner)
    for name in ("conv1d.weight", "conv1d.bias", "dt_proj.weight", "dt_proj.bias", "A_log", "D"):
        part.cut(name, 0, inner)
    part.cut("x_proj.weight", 1, inner)
    part.cut("out_proj.weight", 1, inner)
    part.whole("out_proj.bias", "dt_layernorm.weight", "b_layernorm.weight", "c_layernorm.weight")
    return part.done("x_proj", "out_proj", intermediate_size=part.share(*inner))


def _short_convolution(part: _MixerPart) -> MixerCut:
    channels = Block(part.mixer.conv.out_channels, part.mixer.conv.out_channels)
    for name in ("in_proj.weight", "in_proj.bias"):
        part.cut(name, 0, channels, channels, channels)
    for name in ("conv.weight", "conv.bias"):
        part.cut(name, 0, channels)
    part.cut("out_proj.weight", 1, channels)
    part.whole("out_proj.bias")
    return part.done("out_proj")


KINDS: Final[dict[tuple[str, ...], Callable[[_MixerPart], MixerCut]]] = {
    ("num_k_heads", "num_v_heads", "conv1d"): _delta_net,
    ("qkv_dim", "forget_gate", "conv1d"): _kimi_delta,
    ("n_groups", "ssm_state_size", "conv1d"): _mamba_2,
    ("time_step_rank", "x_proj", "conv1d"): _mamba_1,
    ("conv_kernel_size", "in_proj", "conv"): _short_convolution,
}
"""By attributes of the module."""
