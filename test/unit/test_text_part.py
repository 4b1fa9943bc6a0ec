"""The text part of a model for images that our own code computes: which config.json is one, and which is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import PUBLISHED

from chitu.errors import ConfigError
from chitu.models.config import read_model_spec

KIMI: dict[str, Any] = PUBLISHED["Kimi-K2.5"]


def write(folder: Path, **changes: Any) -> Path:
    """Write Kimi's config.json with changes; None removes a key."""
    config = {key: value for key, value in (KIMI | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_the_text_part_is_the_model_that_text_config_describes(tmp_path: Path) -> None:
    spec = read_model_spec(write(tmp_path))
    assert (spec.architecture, spec.code, spec.is_text_part) == ("DeepseekV3ForCausalLM", "own", True)
    assert spec.tensor_prefix == "language_model."
    assert spec.quantization is not None and spec.quantization.words == "INT4 (pack-quantized)"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "kimi_k26"}, "model_type is 'kimi_k26', not 'kimi_k25'"),
        ({"is_causal": False}, "the key 'is_causal' is not known"),
        ({"text_config": None}, "lacks 'text_config'"),
        ({"text_config": [1]}, "text_config is [1], not an object"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, but False in text_config"),
        ({"eos_token_id": 7}, "eos_token_id is 7, but 2 in text_config"),
        (
            {"text_config": KIMI["text_config"] | {"architectures": ["OtherForCausalLM"]}},
            "text_config: architectures: 'OtherForCausalLM' is not supported",
        ),
        ({"text_config": KIMI["text_config"] | {"scoring_func": "softmax"}}, "text_config: scoring_func"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_model_spec(write(tmp_path, **changes))
    assert says in caught.value.message
