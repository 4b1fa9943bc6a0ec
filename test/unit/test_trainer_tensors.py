"""Tensors in a trainer's memory: what instances read of them, and what they refuse by name. Without a cluster."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.checkpoint import check_checkpoint, damaged_tensor
from chitu.models.config import model_hash, read_model_spec, weight_files, weights_digest, weights_stamp
from chitu.models.weights import TensorFiles, WeightSource
from chitu.tools import publish
from chitu.tools.make_model import make_model
from chitu.tools.publish import PREFIX, Publisher

CPU = torch.device("cpu")
BLOCK = 4096
MANIFEST = "chitu_tensors.json"
CUT = "model.layers.0.mlp.down_proj.weight"
"""64 x 192 numbers of float32: 12 blocks."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "BLOCK_BYTES", BLOCK)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"layers": 2, "hidden_size": 64, "heads": 4, "kv_heads": 2, "vocab_size": 500}
    return make_model(tmp_path_factory.mktemp("models") / "base", seed=3, **sizes)


@pytest.fixture(scope="module")
def tensors(model: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(model / "model.safetensors")


@pytest.fixture
def publisher(model: Path, tmp_path: Path) -> Iterator[Publisher]:
    opened = Publisher(tmp_path / "policy", like=model)
    yield opened
    opened.close()


def read_all(folder: str | Path) -> dict[str, torch.Tensor]:
    with WeightSource(folder, torch.float32, CPU, None) as source:
        return {name: source.take(name, *shape) for name, shape in source.names.items()}


def edit(folder: str, change: Callable[[dict[str, Any]], object]) -> None:
    file = Path(folder) / MANIFEST
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))


def memory_of(folder: str) -> Path:
    (found,) = Path(folder).glob(f"{PREFIX}*")
    return found


def write_over(folder: str, name: str, at: int) -> None:
    """Change a byte of a tensor, as a trainer does that goes on too early."""
    tensor = json.loads((Path(folder) / MANIFEST).read_text())["tensors"][name]
    with memory_of(folder).open("r+b") as stream:
        stream.seek(tensor["offset"] + at)
        (old,) = stream.read(1)
        stream.seek(tensor["offset"] + at)
        stream.write(bytes([old ^ 1]))


@pytest.mark.parametrize("staging_bytes", [1, 5000, 1 << 20], ids=lambda n: f"{n} bytes")
def test_every_part_of_every_tensor_is_what_the_trainer_has(
    publisher: Publisher, tensors: dict[str, torch.Tensor], staging_bytes: int
) -> None:
    more = {"half": torch.randn(130, 70).to(torch.bfloat16), "cube": torch.randn(5, 4, 300), "flat": torch.randn(3000)}
    more |= {"turned": torch.randn(90, 80).t(), "number": torch.tensor(3.5), "none": torch.empty(0, 4)}
    more |= {"whole": torch.arange(9)}
    path = publisher.publish(tensors | more)
    files = TensorFiles(weight_files(path), CPU, staging_bytes)
    assert files.tensors.keys() == tensors.keys() | more.keys()
    for name, tensor in {**tensors, **more}.items():
        for dtype in {tensor.dtype, torch.float32}:
            assert torch.equal(files.read(name, dtype), tensor.to(dtype)), name
        for rows in (None, range(0, 2), range(3, 5)):
            for columns in (None, range(1, 3)):
                if min((*tensor.shape, 0)[:2]) < 4 or (columns and tensor.dim() < 2):
                    continue
                expected = tensor[rows.start : rows.stop] if rows else tensor
                expected = expected[:, columns.start : columns.stop] if columns else expected
                assert torch.equal(files.read(name, torch.float32, rows, columns), expected.float()), (name, rows)
    files.close()


def test_the_folder_holds_the_same_model_as_one_with_files(
    publisher: Publisher, model: Path, tensors: dict[str, torch.Tensor]
) -> None:
    path = publisher.publish(tensors)
    assert check_checkpoint(path, read_model_spec(path)) == check_checkpoint(model, read_model_spec(model))
    assert read_model_spec(path) == read_model_spec(model)
    found, of_files = read_all(path), read_all(model)
    assert found.keys() == of_files.keys() and all(torch.equal(found[name], of_files[name]) for name in found)


def test_the_hash_is_of_every_number_and_not_of_its_place(
    publisher: Publisher, model: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    def ids(path: str) -> tuple[object, ...]:
        return model_hash(path), weights_digest(path), weights_stamp(path)

    first = ids(publisher.publish(tensors))
    assert ids(publisher.publish(tensors)) == first
    mine = publisher.allocate(tensors)
    for name, tensor in tensors.items():
        mine[name].copy_(tensor)
    assert ids(publisher.publish(mine)) == first, "only the memory is another"
    other = Publisher(tmp_path / "other", like=model)
    assert ids(other.publish(dict(reversed(tensors.items())))) == first
    mine[CUT][13, 7] += 1e-6
    second = ids(publisher.publish(mine))
    assert not {*first} & {*second}


@pytest.mark.parametrize("block", [0, 4, 11])
def test_a_trainer_that_writes_too_early_is_found_by_whoever_reads_what_it_wrote(
    publisher: Publisher, tensors: dict[str, torch.Tensor], block: int
) -> None:
    path = publisher.publish(tensors)
    files = TensorFiles(weight_files(path), CPU)
    before = model_hash(path), weights_stamp(path)
    write_over(path, CUT, block * BLOCK + 100)
    assert (model_hash(path), weights_stamp(path)) == before, "only the numbers are others"
    says = rf"tensor '{re.escape(CUT)}' is not what .*{MANIFEST} says: it was written to since it was published"
    touched = range(block * BLOCK // 768, (block * BLOCK + 103) // 768 + 1)
    for rows, columns in ((None, None), (touched, None), (None, range(3, 9)), (touched, range(180, 192))):
        with pytest.raises(ConfigError, match=says):
            files.read(CUT, torch.float32, rows, columns)
    with pytest.raises(ConfigError, match=says):
        read_all(path)
    far = range(30, 31) if block != 4 else range(60, 61)
    assert torch.equal(files.read(CUT, torch.float32, far), tensors[CUT][far.start : far.stop])
    files.close()


def test_memory_that_shrinks_or_goes_is_an_error_and_no_signal(
    publisher: Publisher, tensors: dict[str, torch.Tensor]
) -> None:
    path = publisher.publish(tensors)
    files, whole = TensorFiles(weight_files(path), CPU), memory_of(path).read_bytes()
    os.truncate(memory_of(path), 8)
    with pytest.raises(ConfigError, match="became shorter while it was read"):
        for name in files.tensors:
            files.read(name, torch.float32)
    files.close()
    with pytest.raises(ConfigError, match=r"ends at byte \d+ of its place, which has 8: .*chitu-tensors-"):
        read_all(path)
    memory_of(path).write_bytes(whole)
    files = TensorFiles(weight_files(path), CPU)
    memory_of(path).unlink()
    assert all(torch.equal(files.read(name, torch.float32), tensor) for name, tensor in tensors.items())
    files.close()
    with pytest.raises(ConfigError, match=r"cannot be read .*No such file.* reachable on its own host alone"):
        read_all(path)


def refusals() -> dict[str, tuple[Callable[[dict[str, Any]], object], str]]:
    def of(**fields: object) -> Callable[[dict[str, Any]], object]:
        return lambda manifest: manifest["tensors"][CUT].update(fields)

    def at(kind: str, **fields: object) -> Callable[[dict[str, Any]], object]:
        return lambda manifest: manifest["places"].__setitem__(0, {"kind": kind, **fields})

    def extra(manifest: dict[str, Any]) -> None:
        manifest["tensors"]["model.extra.weight"] = manifest["tensors"][CUT]

    cuda = {"device": "ab" * 16, "handle": "00" * 64, "nbytes": 1 << 40}
    return {
        "version": (lambda m: m.update(version=2), "has version 2, and 1 is known"),
        "blocks": (lambda m: m.update(block_bytes=1), "block_bytes 1 is not within"),
        "no list": (lambda m: m.update(tensors=[]), "cannot be read: Expected `object`"),
        "unknown": (of(dtype="F4"), f"tensor '{CUT}' has dtype F4, which is not known"),
        "another": (of(dtype="BF16"), f"tensor '{CUT}' has 12 digests, and 6 blocks"),
        "too far": (of(offset=1 << 30), r"ends at byte 1\d+ of its place, which has \d+"),
        "huge": (of(shape=[1 << 50, 1 << 50]), "of its place, which has"),
        "negative": (of(offset=-4), "cannot be read: Expected `int` >= 0"),
        "no place": (of(place=1), "is in place 1, and there are 1"),
        "short digest": (of(sha256=["00"] * 12), "'00' is not 32 hex digits"),
        "wrong digest": (of(sha256=["00" * 16] * 12), f"tensor '{CUT}' is not what"),
        "unlike the config": (of(shape=[192, 64]), r"has shape \(192, 64\), the config asks for \(64, 192\)"),
        "missing": (lambda m: m["tensors"].pop(CUT), f"has no tensor '{CUT}'"),
        "too many": (extra, "has 1 tensors that this model does not use: model.extra.weight"),
        "kind": (at("ftp", name="a"), "cannot be read: Invalid value 'ftp'"),
        "upwards": (at("file", name="../chitu-tensors-x"), "which is no name of a file in its folder"),
        "parent": (at("file", name=".."), "which is no name of a file"),
        "absolute": (at("shm", name="/etc/passwd"), "which is no name of a file .* or of an object in /dev/shm"),
        "not there": (at("shm", name="chitu-no-such-object"), "names /dev/shm/chitu-no-such-object, which cannot be"),
        "a folder": (at("shm", name="."), "which is no name"),
        "no GPU": (at("cuda", **cuda), "the memory of GPU (ab){16} cannot be read: (there is no NVIDIA|cuda: none)"),
        "handle": (at("cuda", **{**cuda, "handle": "00"}), "a handle: '00' is not 128 hex digits"),
        "device": (at("cuda", **{**cuda, "device": "GPU-1"}), "a device: 'GPU-1' is not 32 hex digits"),
    }  # fmt: skip


@pytest.mark.parametrize("which", refusals())
def test_what_does_not_fit_is_refused_by_name(
    publisher: Publisher, tensors: dict[str, torch.Tensor], which: str
) -> None:
    path = publisher.publish(tensors)
    change, says = refusals()[which]
    edit(path, change)
    with pytest.raises((ConfigError, UnsupportedModel), match=says):
        check_checkpoint(path, read_model_spec(path))
        read_all(path)


@pytest.mark.parametrize("is_in_shared_memory", [False, True])
def test_links_and_what_is_no_file_lead_nowhere(
    publisher: Publisher, tensors: dict[str, torch.Tensor], tmp_path: Path, is_in_shared_memory: bool
) -> None:
    path = publisher.publish(tensors)
    folder = Path("/dev/shm") if is_in_shared_memory else Path(path)
    shutil.copyfile(memory_of(path), tmp_path / "elsewhere")
    names = [folder / f"chitu-test-{os.getpid()}-{kind}" for kind in ("link", "pipe", "folder", "file")]
    try:
        names[0].symlink_to(tmp_path / "elsewhere")
        os.mkfifo(names[1])
        names[2].mkdir()
        shutil.copyfile(memory_of(path), names[3])
        for name, says in zip(names, ("Too many levels", "no regular file", "no regular file", ""), strict=True):
            place = {"kind": "shm" if is_in_shared_memory else "file", "name": name.name}
            edit(path, lambda manifest, place=place: manifest["places"].__setitem__(0, place))
            if says:
                with pytest.raises(ConfigError, match=says):
                    read_all(path)
            else:
                assert torch.equal(read_all(path)[CUT], tensors[CUT])
    finally:
        names[2].rmdir()
        for name in (names[0], names[1], names[3]):
            name.unlink()


def test_a_part_may_stay_on_disk_and_nothing_may_be_twice(
    publisher: Publisher, model: Path, tensors: dict[str, torch.Tensor]
) -> None:
    frozen = {name: tensor for name, tensor in tensors.items() if "layers.0" not in name}
    path = publisher.publish({name: tensor for name, tensor in tensors.items() if name not in frozen})
    safetensors.torch.save_file(frozen, Path(path) / "model.safetensors")
    assert [file.name for file in weight_files(path)] == ["model.safetensors", MANIFEST]
    found = read_all(path)
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)
    publisher.publish(tensors)
    with pytest.raises(ConfigError, match=r"is in .* and in .*; move one of them elsewhere"):
        read_all(path)


def test_numbers_that_are_not_finite_are_found_in_memory_too(
    publisher: Publisher, tensors: dict[str, torch.Tensor]
) -> None:
    assert damaged_tensor(publisher.publish(tensors)) == ""
    nan = tensors[CUT].clone()
    nan[5, 5] = float("nan")
    assert damaged_tensor(publisher.publish({**tensors, CUT: nan})) == CUT


def test_what_was_allocated_is_never_copied_and_memory_is_used_again(
    publisher: Publisher, tensors: dict[str, torch.Tensor]
) -> None:
    mine = publisher.allocate(tensors)
    (memory,) = {memory_of(str(publisher._folder))}
    for name, tensor in tensors.items():
        mine[name].copy_(tensor)
    path = publisher.publish({name: torch.nn.Parameter(tensor) for name, tensor in mine.items()})
    assert memory_of(path) == memory, "there is one file"
    publisher.publish(tensors)
    files = {file.name for file in Path(path).glob(f"{PREFIX}*")}
    assert len(files) == 2
    publisher.publish({name: tensor + 1 for name, tensor in tensors.items()})
    assert {file.name for file in Path(path).glob(f"{PREFIX}*")} == files
    assert torch.equal(read_all(path)[CUT], tensors[CUT] + 1) and torch.equal(mine[CUT], tensors[CUT])
    with pytest.raises(ValueError, match=r"dtype torch\.complex64, which checkpoints do not have"):
        publisher.publish({"odd": torch.zeros(2, dtype=torch.complex64)})


def test_a_trainer_that_was_killed_leaves_its_memory_to_be_read_and_the_next_one_removes_it(
    publisher: Publisher, model: Path, tensors: dict[str, torch.Tensor]
) -> None:
    path = publisher.publish(tensors)
    (left,) = {memory_of(path)}
    following = Publisher(path, like=model)
    assert torch.equal(read_all(path)[CUT], tensors[CUT]), "until there are others"
    following.publish({name: tensor * 2 for name, tensor in tensors.items()})
    assert not left.exists() and torch.equal(read_all(path)[CUT], tensors[CUT] * 2)
    following.close()
    assert not Path(path).exists()


def test_the_trainer_needs_torch_and_the_standard_library_alone() -> None:
    program = "import sys, chitu.tools.publish; print(*(m for m in sys.modules if m.startswith(('chitu.', 'msgspec'))))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "msgspec" not in found and "chitu.models.config" not in found and len(found) < 9
