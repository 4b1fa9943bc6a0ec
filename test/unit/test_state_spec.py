"""Which layers of published configs keep a state, and how many bytes a request's state has."""

import math

import pytest

from chitu.models.generic.state_spec import FAMILIES, layer_kinds, state_tensors

DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN3_NEXT = {"model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4, **DELTA_NET}
QWEN35_TEXT = {
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 40,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    **DELTA_NET,
}
GRANITE_4_H_SMALL = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 40,
    "hidden_size": 4096,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
NEMOTRON_3_NANO = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
}
KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 27,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
LFM2 = {"model_type": "lfm2", "num_hidden_layers": 16, "hidden_size": 2048, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}


@pytest.mark.parametrize(
    ("config", "attending", "recurrent_bytes", "conv_shape"),
    [
        (QWEN3_NEXT, range(3, 48, 4), 36 * 32 * 128 * 128 * 4, (8192, 4)),
        (QWEN35_TEXT, range(3, 40, 4), 30 * 32 * 128 * 128 * 4, (8192, 4)),
        (GRANITE_4_H_SMALL, range(5, 40, 10), 36 * 128 * 64 * 128 * 4, (8192 + 2 * 128, 4)),
        (NEMOTRON_3_NANO, (5, 12, 19, 26, 33, 42), 23 * 64 * 64 * 128 * 4, (4096 + 2 * 8 * 128, 4)),
        (KIMI_LINEAR, (3, 7, 11, 15, 19, 23, 26), 20 * 32 * 128 * 128 * 4, (3 * 4096, 4)),
        (LFM2, (2, 5, 8, 10, 12, 14), 0, (2048, 3)),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_the_states_of_published_configs(config, attending, recurrent_bytes, conv_shape):
    kinds, tensors = layer_kinds(config), state_tensors(config)
    assert [layer for layer, kind in enumerate(kinds) if kind == "full_attention"] == list(attending)
    with_state = [layer for layer, kind in enumerate(kinds) if kind in ("linear_attention", "conv")]
    convs = [tensor for tensor in tensors if tensor.name == "conv"]
    states = [tensor for tensor in tensors if tensor.name == "recurrent"]
    assert [tensor.layer for tensor in convs] == with_state
    assert {(tensor.shape, tensor.dtype) for tensor in convs} == {(conv_shape, "auto")}
    assert {sum(tensor.cut) for tensor in convs} == {conv_shape[0]}
    assert sum(4 * math.prod(tensor.shape) for tensor in states) == recurrent_bytes
    assert {tensor.dtype for tensor in states} <= {"float32"}


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (QWEN3_NEXT, (16, 16, 32)),
        (GRANITE_4_H_SMALL, (128, 1, 1)),
        (NEMOTRON_3_NANO, (64, 8, 8)),
        (KIMI_LINEAR, (32, 32, 32)),
        (LFM2, ()),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_ranks_cut_a_convolution_by_heads_and_groups(config, heads):
    """By channels if it has none."""
    assert {tensor.heads for tensor in state_tensors(config) if tensor.name == "conv"} == {heads}
    assert {tensor.heads for tensor in state_tensors(config) if tensor.name == "recurrent"} <= {()}


def test_a_layer_with_attention_and_a_state_is_both():
    config = {"model_type": "falcon_h1", "num_hidden_layers": 2, "hidden_size": 64, "mamba_d_ssm": 96}
    config |= {"mamba_n_heads": 6, "mamba_d_state": 16, "mamba_n_groups": 1}
    assert layer_kinds(config) == ("hybrid", "hybrid")
    assert [tensor.shape for tensor in state_tensors(config)] == [(128, 4), (6, 16, 16)] * 2


def test_other_model_types_have_no_known_state():
    assert layer_kinds({"model_type": "llama", "num_hidden_layers": 2}) is None
    assert state_tensors({"model_type": "zamba2", "num_hidden_layers": 2}) == ()
    assert "zamba2" not in FAMILIES
