"""A rank's part of a generic model: by the plan of the library's config class (`base_model_tp_plan`), and by structure.

Owns which tensors are cut, and the sums of the ranks' results. The plan says for each module how it is cut: `colwise`
(its outputs), `rowwise` (its inputs; the results are summed), and the same for the joined tensors of experts. Of what
the plan does not mention, attention, MLPs and joined experts are known by their tensors; recurrent mixers are
(`mixer_cuts.py`) whatever the plan says. Attention is cut by heads, KV heads as everywhere
(`config/tensor_parallel.py`). What is left whole is computed by every rank, but no attention and no mixer can be: each
rank holds only its heads' pages and states, so a model with another form of them is served on one rank only. Head and
embedding stay whole. Called while the model is built; its hooks run on the step thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from chitu.config.tensor_parallel import MAIN_RANK, kv_heads_of, share_of, why_not
from chitu.errors import ConfigError, UnsupportedModel
from chitu.kv_cache.state_row import why_not_cut
from chitu.models.config import ModelSpec
from chitu.models.generic.mixer_cuts import MixerCut, Pieces, cut_of
from chitu.models.generic.split_norm import split_norm
from chitu.models.layers import Shard
from chitu.models.window_state import KEYS as RING
from chitu.models.window_state import recurrent_of

CUT = ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "moe_tp_experts")
WHOLE = ("replicated_with_grad_allreduce", "replicate")
QUERIES, OUTPUTS, KEYS = ("q_proj", "q_b_proj"), ("o_proj", "out_proj"), ("k_proj", "v_proj", "kv_b_proj")
"""Names of the modules of attention."""
ATTENTION = (
    {"q_proj", "k_proj", "v_proj"},
    {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj"},
    {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"},
)
"""Linear layers of an attention beside its output, if they are all that it has."""
MLPS = (
    (("gate_proj", "up_proj"), "down_proj", "colwise"),
    (("up_proj",), "down_proj", "colwise"),
    (("w1", "w3"), "w2", "colwise"),
    (("input_linear",), "output_linear", "packed_colwise"),
)
"""Linear layers of an MLP, if they are all that it has: those of its inner numbers, the one of its result, and the
style of the former."""
EXPERTS = {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}


class Sharding:
    """The cuts of one rank."""

    def __init__(self, decoder: Any, prefix: str, spec: ModelSpec, shard: Shard) -> None:
        """Read plan and structure. `prefix`: of the decoder in the whole model. Raises ConfigError if there is no part
        for the rank."""
        reason = why_not(spec.num_heads, spec.num_kv_heads, shard.size) or why_not_cut(spec.state, shard.size)
        if reason:
            raise ConfigError(f"tp_size {shard.size}: {reason}")
        self._decoder, self._prefix, self._spec, self.shard = decoder, prefix, spec, shard
        if len({(group.num_kv_heads, group.head_dims) for group in spec.groups}) > 1:
            raise self._refusal("its layers have different heads")
        self.is_summing = True
        self._styles = self._plan()
        self._parts: dict[str, Pieces] = {}
        """Parts of tensors by name, which go before the styles of modules."""
        self._main_only: set[str] = set()
        """Biases that are added before a sum, so by the main rank alone."""
        self._mixers = self._cut_mixers()
        self._add_styles_of_structure()
        self._attentions = self._cut_attentions()
        layers = {layer for group in spec.groups for layer in group.layers}
        layers |= {tensor.layer for tensor in spec.state if tensor.name == RING}
        if {getattr(each, "layer_idx", None) for each in self._attentions.values()} != layers:
            raise self._refusal("neither the plan of transformers nor its form cuts its attention by heads")

    def _refusal(self, why: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"tp_size {self.shard.size}: {self._spec.architecture} is served with tp_size 1 only: {why}"
        )

    def _plan(self) -> dict[str, str]:
        """Return the style of each module or tensor of the decoder that is cut. Modules of one parent are cut together
        or not at all."""
        plan = getattr(type(self._decoder.config), "base_model_tp_plan", None) or {}
        patterns = [(re.compile(re.escape(key).replace(r"\*", r"\d+") + "$"), style) for key, style in plan.items()]
        names = [name for name, _ in (*self._decoder.named_modules(), *self._decoder.named_parameters())]
        found = {name: style for name in names for pattern, style in patterns if pattern.match(name)}
        self._mentioned = {name.rpartition(".")[0] for name in found} | set(found)
        strange = {name.rpartition(".")[0] for name, style in found.items() if style not in (*CUT, *WHOLE)}
        return {
            name: style
            for name, style in found.items()
            if style in CUT and name.rpartition(".")[0] not in strange and name not in strange
        }

    # -------------------------------------------------------------------------------------------------- by structure

    def _cut_mixers(self) -> dict[str, MixerCut]:
        """Return the cuts of the recurrent mixers, by name, and note the parts of their tensors."""
        layers, found = {tensor.layer for tensor in recurrent_of(self._spec.state)}, {}
        for name, module in self._decoder.named_modules():
            has_state = any(isinstance(child, nn.Conv1d) for child in module.children())
            if has_state and getattr(module, "layer_idx", None) in layers:
                found[name] = cut = cut_of(name, module, self.shard.size, self.shard.rank)
                self._parts |= {f"{name}.{leaf}": pieces for leaf, pieces in cut.pieces.items()}
                self._styles = {each: style for each, style in self._styles.items() if not each.startswith(f"{name}.")}
                self._styles |= {f"{name}.{leaf}": "rowwise" for leaf in cut.summed}
        return found

    def _add_styles_of_structure(self) -> None:
        """Add the styles of what the plan does not mention."""
        for name, module in self._decoder.named_modules():
            if f"{name}.".startswith(tuple(f"{mixer}." for mixer in self._mixers)):
                continue
            if name not in self._mentioned:
                self._styles |= _attention_styles(name, module, self._spec) or _mlp_styles(name, module)
                self._add_experts(name, module)
            if f"{name}.q_proj" in self._styles and getattr(module, "sinks", None) is not None:
                self._parts[f"{name}.sinks"] = 0, (self._share(module.sinks.shape[0]),)

    def _add_experts(self, name: str, module: Any) -> None:
        """Add the parts of joined experts. Gate and up may alternate (`is_concatenated` is False then)."""
        tensors = dict(module.named_parameters())
        if not {"gate_up_proj", "down_proj"} <= set(tensors) <= EXPERTS or not hasattr(module, "is_transposed"):
            return
        outputs, inputs = (2, 1) if module.is_transposed else (1, 2)
        both = tensors["gate_up_proj"].shape[outputs]
        pieces = self._blocks(both, 2) if module.is_concatenated else (self._share(both, 2),)
        self._parts[f"{name}.gate_up_proj"] = outputs, pieces
        self._parts[f"{name}.gate_up_proj_bias"] = 1, pieces
        self._parts[f"{name}.down_proj"] = inputs, (self._share(both // 2),)
        self._main_only.add(f"{name}.down_proj_bias")
        self._styles[name] = "moe_tp_experts"

    def _cut_attentions(self) -> dict[str, Any]:
        """Return the attention modules that are cut, by name."""
        cut: dict[str, set[str]] = {}
        for name in self._styles:
            owner, _, leaf = name.rpartition(".")
            cut.setdefault(owner, set()).add(leaf)
        kinds = QUERIES, KEYS, OUTPUTS
        return {
            owner: self._decoder.get_submodule(owner)
            for owner, leaves in cut.items()
            if owner not in self._mixers and all(leaves.intersection(kind) for kind in kinds)
        }

    # ------------------------------------------------------------------------------------------------------- tensors

    def _share(self, total: int, unit: int = 1) -> range:
        own = share_of(total // unit, self.shard.size, self.shard.rank)
        return range(own.start * unit, own.stop * unit)

    def pieces(self, name: str, shape: torch.Size) -> Pieces | None:
        """Return the part of a tensor of the model that this rank has; None for all of it."""
        own = name.removeprefix(self._prefix)
        module, _, leaf = own.rpartition(".")
        if own in self._parts:
            return self._parts[own]
        if own in self._styles:  # joined weights of experts: [experts, outputs, inputs], or transposed
            style = self._styles[own]
            dim = len(shape) - (2 if "colwise" in style else 1)
            return dim, self._blocks(shape[dim], 2 if style.startswith("packed") else 1)
        style = self._styles.get(module, "")
        if style == "rowwise":
            is_of_heads = module.rpartition(".")[0] in self._attentions and leaf == "weight"
            unit = shape[1] // self._spec.num_heads if is_of_heads else 1
            return (1, (self._share(shape[1], unit),)) if leaf == "weight" else None
        if style == "colwise":
            return 0, (self._outputs(module, shape[0]),)
        if style == "packed_colwise":
            return 0, self._blocks(shape[0], 2)
        return None

    def _outputs(self, module: str, total: int) -> range:
        last = module.rpartition(".")[2]
        if last in QUERIES:
            return self._share(total, total // self._spec.num_heads)
        if last in KEYS:
            width = total // self._spec.num_kv_heads
            heads = kv_heads_of(self._spec.num_kv_heads, self.shard.size, self.shard.rank)
            return range(heads.start * width, heads.stop * width)
        return self._share(total)

    def _blocks(self, total: int, count: int) -> tuple[range, ...]:
        size = total // count
        own = self._share(size)
        return tuple(range(index * size + own.start, index * size + own.stop) for index in range(count))

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor of the model."""
        if name.removeprefix(self._prefix) in self._main_only and not self.is_main:
            return torch.zeros_like(tensor)
        pieces = self.pieces(name, tensor.shape)
        if pieces is None:
            return tensor
        dim, parts = pieces
        if not all(len(part) for part in parts):
            raise ConfigError(f"tp_size {self.shard.size}: {name!r} cannot be split over so many ranks")
        return torch.cat([tensor.narrow(dim, part.start, len(part)) for part in parts], dim).contiguous()

    # ---------------------------------------------------------------------------------------------------------- sums

    def add_sums(self, on_sum: Callable[[], None]) -> None:
        """Give the filled modules their sizes, and let those that are cut by their inputs give the sum over the ranks.
        `on_sum` is called after each."""
        modules = dict(self._decoder.named_modules())
        for name, style in self._styles.items():
            module = modules.get(name)
            if module is not None and style == "rowwise":
                bias = module.bias
                module.bias = None  # added once, not once per rank
                module.register_forward_hook(self._summing(bias, on_sum))
            elif module is not None and style == "moe_tp_experts":
                module.register_forward_hook(self._summing(None, on_sum))
        for attention in self._attentions.values():
            if hasattr(attention, "num_key_value_groups"):
                size = self.shard.size
                own = len(kv_heads_of(self._spec.num_kv_heads, size, self.shard.rank))
                attention.num_key_value_groups = self._spec.num_heads // size // own
        for name, cut in self._mixers.items():
            self._resize(name, modules[name], cut, on_sum)

    def _resize(self, name: str, mixer: Any, cut: MixerCut, on_sum: Callable[[], None]) -> None:
        """Give a mixer its sizes, its part of constants, and a norm that sums up."""
        kept = mixer.state_dict()
        for leaf, buffer in list(mixer.named_buffers()):
            if leaf not in kept and leaf in cut.pieces:  # the library has filled it
                mixer.register_buffer(leaf, self.cut(f"{self._prefix}{name}.{leaf}", buffer), persistent=False)
        for path, value in cut.sizes.items():
            owner, _, attribute = path.rpartition(".")
            setattr(mixer.get_submodule(owner), attribute, value)
        if cut.norm is not None:
            split_norm(mixer.norm, cut.norm, lambda x: self._sum(x, on_sum))

    def _sum(self, x: torch.Tensor, on_sum: Callable[[], None]) -> torch.Tensor | None:
        """Return the sum over the ranks; None while this one computes alone."""
        if not self.is_summing:
            return None
        x = self.shard.all_reduce(x.contiguous())
        on_sum()
        return x

    def _summing(self, bias: torch.Tensor | None, on_sum: Callable[[], None]) -> Callable[..., torch.Tensor]:
        def after(_module: nn.Module, _given: object, out: torch.Tensor) -> torch.Tensor:
            total = self._sum(out, on_sum)
            out = out if total is None else total
            return out if bias is None else out + bias

        return after

    @property
    def is_main(self) -> bool:
        return self.shard.rank == MAIN_RANK

    @property
    def size(self) -> int:
        return self.shard.size


def _linears(module: nn.Module) -> set[str]:
    return {leaf for leaf, child in module.named_children() if isinstance(child, nn.Linear)}


def _attention_styles(name: str, module: Any, spec: ModelSpec) -> dict[str, str]:
    """Return the styles of an attention whose heads can be told apart: its other tensors are sinks, or norms of single
    heads or of latent rows. {} if the module is none, or if that is not so."""
    linears = _linears(module)
    output = next((each for each in OUTPUTS if each in linears), "")
    if not output or linears - {output} not in ATTENTION:
        return {}
    is_latent = "kv_b_proj" in linears
    if is_latent and spec.num_kv_heads != spec.num_heads:
        return {}
    query = "q_b_proj" if "q_b_proj" in linears else "q_proj"
    widths = {module.get_submodule(each).in_features for each in linears if each in ("q_b_proj", "kv_b_proj")}
    if not is_latent:
        widths |= {module.get_submodule("k_proj").out_features // spec.num_kv_heads}
    for tensor, each in module.named_parameters():
        is_norm = each.dim() == 1 and each.shape[0] in widths
        if tensor.split(".")[0] not in (*linears, "sinks") and not is_norm:
            return {}
    keys = [each for each in KEYS if each in linears]
    return {**{f"{name}.{each}": "colwise" for each in (query, *keys)}, f"{name}.{output}": "rowwise"}


def _mlp_styles(name: str, module: nn.Module) -> dict[str, str]:
    """Return the styles of an MLP, or {} if the module is none."""
    linears = _linears(module)
    tensors = {tensor.split(".")[0] for tensor, _ in (*module.named_parameters(), *module.named_buffers())}
    for inner, result, style in MLPS:
        if linears == {*inner, result} == tensors:
            return {**{f"{name}.{each}": style for each in inner}, f"{name}.{result}": "rowwise"}
    return {}
