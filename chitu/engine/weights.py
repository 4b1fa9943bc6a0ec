"""Reads the next weights of one rank beside those that serve, and puts them in their place.

`RankWeights` reads on a thread of its own, into host memory, while steps run; its methods are called by the thread that
runs the rank's steps. Invariant: until `change` nothing that serves is touched, and `change` cannot fail on what was
read: it has the same tensors, by name, shape and dtype, as the model that serves. On a GPU the numbers are copied to
where the old ones are, so recorded steps stay valid; on a CPU the new model takes the place of the old one. A rank that
sleeps has given the memory of the old ones back (`sleep.py`), and gets them again by the same way.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import torch

from chitu.engine.memory_budget import available_cpu_bytes
from chitu.engine.sleep import SleepingWeights, give_back_pools
from chitu.engine.weights_loader import GivenBack, ReadWeights
from chitu.errors import ChituError, ConfigError, UnsupportedModel
from chitu.kv_cache.pool import KVPool
from chitu.models.checkpoint import damaged_tensor
from chitu.models.config import ModelSpec, model_hash, read_model_spec, weights_stamp
from chitu.models.draft_layer import with_draft_layer
from chitu.models.feature_mark import feature_mark
from chitu.models.model import vision_of
from chitu.models.served_folder import ServedFolder
from chitu.models.tensors import tensors_of, why_unlike
from chitu.models.window_state import with_window_state
from chitu.protocol.weights import SleepLevel

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.9
"""Share of the free host memory that the next weights may take."""
LIBRARY_CODE = "models that transformers' modules compute change their weights in float32 on CPUs only"


@dataclass(slots=True)
class _Reading:
    """What a thread reads; it writes `result` last."""

    thread: Thread | None = None
    model: Any = None
    folder: ServedFolder | None = None
    result: ReadWeights | None = None


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """How the model that serves was loaded."""

    path: str
    """Folder that the instance was started with: it has the tokenizer."""
    spec: ModelSpec
    load: Callable[[str, str], Any]
    """Loads a folder like it, with this `model_hash`, into host memory: what `Changeable.change_model` takes."""
    has_adapters: bool
    window_state: bool


class Changeable(Protocol):
    """What computes with a model: a `ModelRunner`, or the tower of an E."""

    @property
    def model(self) -> Any:
        """What `WeightsSource.load` returns one like: a model, or the part of one."""
        ...

    def change_model(self, model: Any, /) -> None:
        """Compute with the numbers of this one from now on. The present one may have no numbers any more."""
        ...


class RankWeights:
    """A `WeightsLoader` of one rank."""

    def __init__(
        self,
        source: WeightsSource,
        runner: Changeable,
        served: ServedFolder | None = None,
        pools: Sequence[KVPool] = (),
    ) -> None:
        """`pools`: memory that it gives back when it sleeps."""
        self._source = source
        self._runner = runner
        self.served = served
        """Folder of the weights that serve, for others that want the same; any thread reads it. None: not known, or
        they are in none."""
        self._pools = pools
        self.no_sleep = ""
        """Why it cannot sleep, set once."""
        self._asleep: SleepingWeights | None = None
        """What the weights were that it gave back."""
        self.fingerprint: Callable[[str, str], bytes | None] = lambda path, found: None
        """Called on the reading thread with a folder and its hash, for the keys of cached pages."""
        self.wake: Callable[[], None] = lambda: None
        """Called when reading has ended."""
        self._reading: _Reading | None = None

    def begin(self, path: str) -> None:
        self._begin(path, None)

    def begin_again(self, path: str) -> None:
        self._begin(path or self._source.path, self._asleep)

    def _begin(self, path: str, before: SleepingWeights | None) -> None:
        reading = self._reading = _Reading()
        reading.thread = Thread(target=self._run, args=(path, reading, before), name="weights", daemon=True)
        reading.thread.start()

    def poll(self) -> ReadWeights | None:
        return self._reading.result if self._reading is not None else None

    def wait(self) -> ReadWeights:
        """Wait until all is read."""
        assert self._reading is not None and self._reading.thread is not None
        self._reading.thread.join()
        assert self._reading.result is not None
        return self._reading.result

    def change(self) -> None:
        assert self._reading is not None and self._reading.model is not None
        with torch.inference_mode():
            self._runner.change_model(self._reading.model)
        self.served = self._reading.folder
        self._asleep = None
        self.drop()

    def drop(self) -> None:
        """Forget what was read. A thread that still reads ends by itself, and its result has no reader."""
        self._reading = None

    def why_no_sleep(self, level: SleepLevel) -> str:
        if level == 2 and self._source.has_adapters:
            return "LoRA adapters (model.adapters) are not read again: sleep at level 1"
        return self.no_sleep

    def sleep(self, level: SleepLevel) -> GivenBack:
        num_bytes, keeps = give_back_pools(self._pools)
        if level == 2 and self._asleep is None:
            with torch.inference_mode():
                self._asleep = SleepingWeights(self._runner.model)
            num_bytes += self._asleep.num_bytes
        return GivenBack(num_bytes, keeps)

    def _run(self, path: str, reading: _Reading, before: SleepingWeights | None) -> None:
        try:
            stamp = weights_stamp(path)
            found = model_hash(path, self._source.spec.code)
            self._check(path)
            model = self._source.load(path, found)
            if why := why_unlike(self._runner.model, model):
                raise ConfigError(f"{path}: {why}")
            if before is not None and (why := before.why_other(model)):
                raise ConfigError(f"{path}: {why}: it was written meanwhile")
            fingerprint = self.fingerprint(path, found)
            if weights_stamp(path) != stamp:
                raise ConfigError(f"{path}: its files were written while they were read")
            tower = vision_of(model)
            mark = b"" if tower is None else feature_mark(tower.tensors())
            reading.folder = ServedFolder(path, found, stamp)
            reading.model, reading.result = model, ReadWeights(found, "", fingerprint, mark)
        except ChituError as error:
            reading.result = ReadWeights(error=error.message)
        except Exception as error:  # a damaged folder may raise anything, and costs nothing but its change
            logger.exception("cannot read the weights in %s", path)
            reading.result = ReadWeights(error=f"{path}: {type(error).__name__}: {error}")
        self.wake()

    def _check(self, path: str) -> None:
        """Raise ConfigError for a folder whose model is not like the one that serves, before its weights are read."""
        source, spec = self._source, self._source.spec
        if source.has_adapters:
            raise UnsupportedModel("the LoRA adapters (model.adapters) were trained for the weights that serve")
        if spec.code == "transformers" and self._runner.model.dtype != torch.float32:
            raise UnsupportedModel(LIBRARY_CODE)
        found = with_window_state(read_model_spec(path, spec.max_model_len, spec.code), source.window_state)
        found = with_draft_layer(found, spec.has_draft_layer)
        differing = [
            f"{field.name} is {_short(getattr(found, field.name))}, not {_short(getattr(spec, field.name))}"
            for field in dataclasses.fields(spec)
            if getattr(found, field.name) != getattr(spec, field.name)
        ]
        if differing:
            raise ConfigError(f"{path} holds another kind of model than the one that serves: {'; '.join(differing)}")
        if other := other_tokenizer(Path(source.path), Path(path)):
            raise ConfigError(f"{path}: {other} differs from the one in {source.path}, and requests use that")
        if name := damaged_tensor(path):
            raise ConfigError(f"{path}: tensor {name!r} has numbers that are not finite (NaN or infinity)")
        needed = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_of(self._runner.model))
        free = available_cpu_bytes()
        if needed > MEMORY_SHARE * free:
            raise ConfigError(f"{path}: the next weights need {needed} bytes of host memory, and {free} are free")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def other_tokenizer(serving: Path, new: Path) -> str:
    """Return the name of a file of the tokenizer that both folders have and that says something else in the new one;
    empty if there is none. A folder without a tokenizer is used with the one that serves."""
    for name in ("tokenizer.json",):
        mine, theirs = serving / name, new / name
        if mine.is_file() and theirs.is_file() and mine.read_bytes() != theirs.read_bytes():
            parts = [json.loads(file.read_text(encoding="utf-8")) for file in (mine, theirs)]
            for part in parts:  # set by whoever tokenised last
                part.pop("padding", None)
                part.pop("truncation", None)
            if parts[0] != parts[1]:
                return name
    return ""
