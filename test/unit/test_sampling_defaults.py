"""Sampling of requests that do not say: what the checkpoint's generation_config.json publishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chitu.config.schema import ModelConfig
from chitu.errors import ConfigError
from chitu.http.ask.bodies import CompletionBody
from chitu.http.ask.sampling import output_options, sampling_params
from chitu.http.table import BODIES
from chitu.models.sampling_defaults import SamplingDefaults, read_sampling_defaults
from chitu.protocol import SamplingParams

PUBLISHED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}


def folder_with(folder: Path, published: Any) -> ModelConfig:
    (folder / "generation_config.json").write_text(json.dumps(published), encoding="utf-8")
    return ModelConfig(path=str(folder))


def sampling_of(defaults: SamplingDefaults, **fields: Any) -> SamplingParams:
    body = BODIES.decoder(CompletionBody).decode(json.dumps({"prompt": "a", **fields}).encode())
    return sampling_params(body, output_options(body), 1, 1000, defaults=defaults)


def test_a_request_has_what_the_model_publishes_unless_it_says_otherwise(tmp_path: Path) -> None:
    defaults = read_sampling_defaults(folder_with(tmp_path, {**PUBLISHED, "do_sample": False, "eos_token_id": 1}))
    assert defaults == SamplingDefaults(**PUBLISHED)
    given = sampling_of(defaults)
    assert (given.temperature, given.top_p, given.top_k, given.repetition_penalty) == (0.6, 0.95, 20, 1.05)
    own = {"temperature": 0, "top_p": 1, "top_k": -1, "repetition_penalty": 1}
    given = sampling_of(defaults, **own)
    assert (given.temperature, given.top_p, given.top_k, given.repetition_penalty) == (0, 1, 0, 1)
    assert sampling_of(defaults, temperature=None).temperature == 0.6, "null is the same as leaving a field out"


def test_nothing_published_or_none_wanted_is_temperature_one(tmp_path: Path) -> None:
    plain = SamplingDefaults(1.0, 1.0, 0, 1.0)
    assert read_sampling_defaults(ModelConfig(path=str(tmp_path))) == plain
    config = folder_with(tmp_path, {"temperature": None, "top_k": -1})
    assert (
        read_sampling_defaults(config) == plain._replace(top_k=-1) and sampling_of(plain._replace(top_k=-1)).top_k == 0
    )
    folder_with(tmp_path, PUBLISHED)
    assert read_sampling_defaults(ModelConfig(path=str(tmp_path), sampling_defaults="none")) == plain


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", -0.1), ("temperature", 2.5), ("temperature", "hot"), ("temperature", True)),
        *(("top_p", 0), ("top_p", 1.5), ("top_k", 0.5), ("top_k", -2), ("repetition_penalty", 0)),
        ("repetition_penalty", float("nan")),
    ],
)
def test_what_no_request_could_have_is_refused_by_file_and_name(tmp_path: Path, name: str, value: Any) -> None:
    config = folder_with(tmp_path, {name: value})
    with pytest.raises(ConfigError, match=rf"generation_config.json: {name} must be .*sampling_defaults=none"):
        read_sampling_defaults(config)
    assert read_sampling_defaults(ModelConfig(path=str(tmp_path), sampling_defaults="none")) == SamplingDefaults()
