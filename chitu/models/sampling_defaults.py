"""What a checkpoint's publisher says of sampling: `generation_config.json`, for requests that do not say. No torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from chitu.config.schema import ModelConfig
from chitu.errors import ConfigError
from chitu.models.config import read_json
from chitu.models.config_keys import KINDS

_TEMPERATURE = "a number from 0 to 2", lambda value: KINDS["number"][1](value) and 0 <= value <= 2
_SHARE = "a number above 0, to 1", lambda value: KINDS["positive"][1](value) and value <= 1
_COUNT = "a whole number of at least -1", lambda value: value == -1 or KINDS["natural"][1](value)
_PENALTY = "a number above 0, to 10", lambda value: KINDS["positive"][1](value) and value <= 10
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": _TEMPERATURE,
    "top_p": _SHARE,
    "top_k": _COUNT,
    "repetition_penalty": _PENALTY,
}


class SamplingDefaults(NamedTuple):
    """Values of fields that a request leaves out; names and ranges are those of the request's fields."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


def read_sampling_defaults(config: ModelConfig) -> SamplingDefaults:
    """Return those of the folder unless `model.sampling_defaults` is `none`, as vLLM and SGLang take them: whatever its
    `do_sample` says. ConfigError if a value is none that a request could have."""
    path = Path(config.path) / "generation_config.json"
    if config.sampling_defaults == "none" or not path.is_file():
        return SamplingDefaults()
    given = {name: value for name, value in read_json(path).items() if name in _FIELDS and value is not None}
    for name, value in given.items():
        wanted, is_valid = _FIELDS[name]
        if not is_valid(value):
            raise ConfigError(
                f"model.path: {path}: {name} must be {wanted}, not {value!r}; with model.sampling_defaults=none it is "
                "not read"
            )
    return SamplingDefaults(**given)
