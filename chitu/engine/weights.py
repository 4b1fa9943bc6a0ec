"""Reads the next weights of one rank, and LoRA adapters, beside those that serve, and puts them in their place.

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
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import msgspec
import torch

from chitu.engine.memory_budget import available_cpu_bytes
from chitu.engine.sleep import SleepingWeights, give_back_pools
from chitu.engine.weights_loader import AdapterFolder, GivenBack, ReadWeights
from chitu.errors import ChituError, ConfigError, UnsupportedModel
from chitu.kv_cache.pool import KVPool
from chitu.models.adapters import AdapterSpec, adapter_of, linear_layers, require_adaptable
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
"""Share of the free memory that the next weights, or adapters, may take."""
READ_BYTES = 4
"""Bytes of a number of an adapter while it is read."""
LIBRARY_CODE = "models that transformers' modules compute change their weights in float32 on CPUs only"


@dataclass(slots=True)
class _Reading:
    """What a thread reads; it writes `result` last."""

    thread: Thread | None = None
    model: Any = None
    """None: the one that serves stays."""
    folder: ServedFolder | None = None
    """Of the model."""
    adapters: list[tuple[int, Any]] = field(default_factory=list)
    """Adapters by their numbers, as the model reads them."""
    num_numbers: int = 0
    """Of the adapters: the device has none of them yet."""
    result: ReadWeights | None = None


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """How the model that serves was loaded."""

    path: str
    """Folder that the instance was started with: it has the tokenizer."""
    spec: ModelSpec
    load: Callable[[str, str], Any]
    """Loads a folder like it, with this `model_hash`, into host memory: what `Changeable.change_model` takes."""
    window_state: bool = False
    no_adapters: str = ""
    """Why no adapters are loaded while it serves; empty if they are."""


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
        self._linear: dict[str, tuple[int, ...]] | None = None
        """Layers that adapters may adapt, once some were read."""
        self.wake: Callable[[], None] = lambda: None
        """Called when reading has ended."""
        self._reading: _Reading | None = None

    def begin(self, path: str, adapters: Sequence[AdapterFolder] = ()) -> None:
        self._begin(path, None, adapters)

    def begin_again(self, path: str, adapters: Sequence[AdapterFolder] = ()) -> None:
        self._begin(path or self._source.path, self._asleep, adapters)

    def _begin(self, path: str, before: SleepingWeights | None, adapters: Sequence[AdapterFolder]) -> None:
        reading = self._reading = _Reading()
        given = path, adapters, reading, before
        reading.thread = Thread(target=self._run, args=given, name="weights", daemon=True)
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
        reading, before = self._reading, self._runner.model
        assert reading is not None and reading.result is not None
        with torch.inference_mode():
            if reading.model is not None:
                self._runner.change_model(reading.model)
                self.served, self._asleep = reading.folder, None
            if (model := self._runner.model) is not before and (adapters := adapters_of(model)) is not None:
                adapters.take_over(adapters_of(before))
            for number, adapter in reading.adapters:
                adapters_of(model).put(number, adapter)
        self.drop()

    def unload(self, number: int) -> None:
        if (adapters := adapters_of(self._runner.model)) is not None:
            adapters.drop(number)

    def drop(self) -> None:
        """Forget what was read. A thread that still reads ends by itself, and its result has no reader."""
        self._reading = None

    def why_no_sleep(self, level: SleepLevel) -> str:
        return self.no_sleep

    def sleep(self, level: SleepLevel) -> GivenBack:
        num_bytes, keeps = give_back_pools(self._pools)
        if level == 2 and self._asleep is None:
            with torch.inference_mode():
                self._asleep = SleepingWeights(self._runner.model)
            num_bytes += self._asleep.num_bytes
            if (adapters := adapters_of(self._runner.model)) is not None and adapters.has_any:
                keeps = "; ".join([*([keeps] if keeps else []), "LoRA adapters"])
        return GivenBack(num_bytes, keeps)

    def _run(
        self, path: str, adapters: Sequence[AdapterFolder], reading: _Reading, before: SleepingWeights | None
    ) -> None:
        try:
            result = self._read_model(path, reading, before) if path else ReadWeights()
            hashes = tuple([self._read_adapter(each, reading) for each in adapters])
            reading.result = msgspec.structs.replace(result, adapters=hashes)
        except ChituError as error:
            reading.result = ReadWeights(error=error.message)
        except Exception as error:  # a damaged folder may raise anything, and costs nothing but its change
            what = path or ", ".join(each.path for each in adapters)
            logger.exception("cannot read %s", what)
            reading.result = ReadWeights(error=f"{what}: {type(error).__name__}: {error}")
        self.wake()

    def _read_model(self, path: str, reading: _Reading, before: SleepingWeights | None) -> ReadWeights:
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
        reading.model, reading.folder = model, ServedFolder(path, found, stamp)
        return ReadWeights(found, "", fingerprint, b"" if tower is None else feature_mark(tower.tensors()))

    def _read_adapter(self, folder: AdapterFolder, reading: _Reading) -> str:
        """Read an adapter, and return its hash. Raises ConfigError (UnsupportedModel) if it cannot be served here."""
        source, adapters, key = self._source, adapters_of(self._runner.model), f"model.adapters.{folder.name}"
        require_adaptable(key, source.spec)
        if source.no_adapters or adapters is None:
            raise UnsupportedModel(f"{key}: {source.no_adapters or 'this model takes no LoRA adapters'}")
        if self._linear is None:
            self._linear = linear_layers(source.spec, source.path)
        spec = adapter_of(folder.name, folder.path, self._linear)
        found, num_numbers = spec.hash(), spec.num_numbers(self._linear)
        self._require_room(spec, reading.num_numbers + num_numbers, adapters.device)
        reading.num_numbers += num_numbers
        reading.adapters.append((folder.number, adapters.read(spec)))
        if spec.hash() != found:
            raise ConfigError(f"{spec.key}: the files in {spec.folder} were written while they were read")
        return found

    def _require_room(self, spec: AdapterSpec, num_numbers: int, device: torch.device) -> None:
        """Raise ConfigError if adapters of so many numbers, with `spec` as the last one, find no room."""
        item = self._runner.model.dtype.itemsize
        rooms = [("host memory", READ_BYTES * num_numbers, available_cpu_bytes())]
        if device.type == "cuda":
            rooms.append(("GPU memory", item * num_numbers, torch.cuda.mem_get_info(device)[0]))
        for kind, needed, free in rooms:
            if needed > MEMORY_SHARE * free:
                raise ConfigError(f"{spec.key}: {spec.folder} needs {needed} bytes of {kind}, and {free} are free")

    def _check(self, path: str) -> None:
        """Raise ConfigError for a folder whose model is not like the one that serves, before its weights are read."""
        source, spec = self._source, self._source.spec
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


def adapters_of(model: Any) -> Any:
    """Return what reads, holds and drops the LoRA adapters of a model (`lora.Adapters`, `generic.lora.AdaptedModules`);
    None if it takes none."""
    return getattr(model, "adapters", None)


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
