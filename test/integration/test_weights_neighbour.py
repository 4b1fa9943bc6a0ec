"""Weights that come from a running neighbour: models are bit for bit those of the folder, whatever happens to the
neighbour meanwhile."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from network import DEVICE, Network, require_network
from thread_ranks import Meeting, ThreadRank
from weights_sources import Source, pieces_from, seconds, serving

from chitu.engine.build import load_model
from chitu.instance import weights_pieces
from chitu.instance.weights_share import MOST_READERS
from chitu.models.config import model_hash, weight_files, weights_stamp
from chitu.models.model import Model
from chitu.models.served_folder import ServedFolder
from chitu.models.tensors import tensors_of
from chitu.models.weights import TensorFiles
from chitu.protocol.neighbour import MAX_PIECE_BYTES
from chitu.tools.make_model import make_model

SIZES: dict[str, Any] = {"layers": 2, "hidden_size": 256, "heads": 4, "kv_heads": 2, "vocab_size": 12000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "m", **SIZES)


def load(folder: Path, pieces: Any = None, shard: Any = None) -> Model:
    try:
        return load_model(folder, "float32", max_model_len=64, shard=shard, pieces=pieces)
    finally:
        if pieces is not None:
            pieces.close()


def assert_same(one: Model, other: Model) -> None:
    pairs = list(zip(tensors_of(one), tensors_of(other), strict=True))
    assert len(pairs) > 10
    for (name, mine), (_, theirs) in pairs:
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("way", ["shm", "mooncake", "nixl"])
def test_all_bytes_come_from_the_neighbour_and_are_those_of_the_folder(folder: Path, way: str) -> None:
    with serving(Source(folder, way)) as sources:
        pieces = pieces_from(sources, folder, way)
        model = load(folder, pieces)
        total = sum(each.stat().st_size for each in folder.glob("*.safetensors"))
        assert pieces.from_folder == 0
        assert 0.99 * total < pieces.from_neighbours <= total
    assert_same(model, load(folder))


def test_ranks_of_a_reader_cut_what_a_source_has_whole(folder: Path) -> None:
    meeting = Meeting(2)
    for rank in range(2):
        with serving(Source(folder)) as sources:
            pieces = pieces_from(sources, folder)
            part = load(folder, pieces, ThreadRank(meeting, rank))
            assert pieces.from_folder == 0
        assert_same(part, load(folder, shard=ThreadRank(meeting, rank)))


@pytest.mark.parametrize("staging_mib", [3, 5, 16])
def test_a_tensor_that_is_staged_is_asked_for_once(folder: Path, staging_mib: int) -> None:
    """The next stages are asked for ahead, in pieces that end where a stage does."""
    with serving(Source(folder)) as sources:
        pieces = pieces_from(sources, folder)
        files = TensorFiles(weight_files(folder), torch.device("cpu"), staging_mib << 20, pieces=pieces)
        name, stored = max(files.tensors.items(), key=lambda item: item[1].shape[0])
        found = files.read(name, torch.float64)
        rows, row_bytes = stored.shape[0], stored.shape[1] * stored.dtype.itemsize
        a_stage = (staging_mib << 20) // row_bytes * row_bytes
        stages = [min(a_stage, rows * row_bytes - begin) for begin in range(0, rows * row_bytes, a_stage)]
        assert sources[0].writes == sum(-(-stage // MAX_PIECE_BYTES) for stage in stages)
        assert torch.equal(files.read(name, torch.float64, columns=range(9)), found[:, :9])
        pieces.close()
    plain = TensorFiles(weight_files(folder), torch.device("cpu")).read(name, torch.float64)
    assert torch.equal(found, plain)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("flip", "checksum of a piece is wrong"),
        ("kill", "is silent"),
        ("stop", "is silent"),
        ("change", "has changed to other weights"),
    ],
)
def test_a_fault_in_the_middle_costs_one_warning_and_no_byte(
    folder: Path, fault: str, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "is silent":  # of the others a pause of a busy machine must not be taken for silence
        monkeypatch.setattr(weights_pieces, "SILENCE_S", 2.0)
    else:
        monkeypatch.setattr(weights_pieces, "SILENCE_S", 60.0)
    caplog.set_level(logging.INFO)
    with serving(Source(folder, fault=fault)) as sources:
        pieces = pieces_from(sources, folder)
        model = load(folder, pieces)
    assert 0 < pieces.from_neighbours < pieces.from_folder
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and why in warnings[0] and "P0" in warnings[0]
    assert_same(model, load(folder))


def test_another_source_goes_on_where_one_was_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_pieces, "SILENCE_S", 0.7)
    with serving(Source(folder, name="P1"), Source(folder, fault="kill")) as sources:
        pieces = pieces_from(sources, folder)
        model = load(folder, pieces)
        assert pieces.from_folder == 0
    assert_same(model, load(folder))


def test_a_source_of_other_weights_is_not_used(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = make_model(tmp_path / "other", seed=9, **SIZES)
    with serving(Source(other)) as sources:
        pieces = pieces_from(sources, folder)
        model = load(folder, pieces)
        assert pieces.from_neighbours == sources[0].writes == 0
    assert "P0 (127.0.0.1): it serves other weights" in caplog.text
    assert_same(model, load(folder))


def test_a_source_whose_files_were_written_since_it_loaded_sends_none(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    with serving(Source(own)) as sources:
        path = own / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 1  # where no sample of the hash is
        path.write_bytes(content)
        assert model_hash(own) == model_hash(folder)
        pieces = pieces_from(sources, folder)
        model = load(folder, pieces)
        assert pieces.from_neighbours == sources[0].writes == 0
    assert "the files of its weights were written since it has read them" in caplog.text
    assert_same(model, load(folder))


def test_a_source_whose_host_has_not_its_files_in_memory_sends_none(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It would read its disk, which is no better than the reader's."""
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    (path,) = weight_files(own)
    served = ServedFolder(str(own), "", weights_stamp(own))
    with path.open("rb") as file:
        file.read()
        assert served.share_in_memory({path.name: file.fileno()}) == 1
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if served.share_in_memory({path.name: file.fileno()}) > 0.5:
            pytest.skip("this file system keeps its files in memory")
    with serving(Source(own)) as sources:
        os.posix_fadvise(descriptor := os.open(path, os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        pieces = pieces_from(sources, folder)
        model = load(folder, pieces)
        assert pieces.from_neighbours == sources[0].writes == 0
    assert "of the files of its weights in memory" in caplog.text
    assert_same(model, load(folder))


def test_five_readers_at_once_have_two_at_a_time_at_each_source(folder: Path) -> None:
    """A source that five ask serves two; those that have read all are sources, too. All bytes come from sources."""
    lock, open_now, most = threading.Lock(), [0], [0]
    with serving(Source(folder)) as first:
        sources = list(first)

        later = [Source(folder, name=f"D{number}") for number in range(5)]  # before there are threads

        def join(number: int) -> int:
            pieces = pieces_from(sources, folder, joiner=f"D{number}")
            opened = pieces._opened

            def counted() -> Any:
                before = pieces._session
                session = opened()
                if session is not None and before is None and session.source == first[0].neighbour:
                    with lock:
                        open_now[0] += 1
                        most[0] = max(most[0], open_now[0])
                return session

            pieces._opened = counted  # type: ignore[method-assign]
            model = load_model(folder, "float32", max_model_len=64, pieces=pieces)
            sources.append(later[number])
            used_first = pieces._session is not None and pieces._session.source == first[0].neighbour
            with lock:
                open_now[0] -= used_first
            pieces.close()
            assert pieces.from_folder == 0
            assert_same(model, reference)
            return pieces.from_neighbours

        with serving(Source(folder)) as one:
            reference = load(folder, pieces_from(one, folder))
            alone = one[0].writes
        with ThreadPoolExecutor(5) as threads:
            counts = list(threads.map(join, range(5)))
        assert len(set(counts)) == 1 and most[0] == MOST_READERS
        assert first[0].writes + sum(source.writes for source in later) == 5 * alone
        assert sum(source.writes > 0 for source in (*first, *later)) > 1  # a tree, not a star
        for source in later:
            source.end()


# ------------------------------------------------------------------------------------------------------- between hosts


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    require_network()
    with Network(["p0", "d0"], delay_s=0.001) as network:
        yield network


@pytest.mark.parametrize("way", ["mooncake", "nixl"])
def test_over_a_slow_link_all_comes_from_the_neighbour(
    folder: Path, net: Network, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", DEVICE)
    net.set("p0", "d0", rate_bytes_s=30e6)
    with net.inside("p0"):
        source = Source(folder, way, host=net.address("p0"))
    with serving(source), net.inside("d0"):
        pieces = pieces_from([source], folder, way, host=net.address("d0"))
        model = load(folder, pieces)
        assert pieces.from_folder == 0
    net.heal()
    assert_same(model, load(folder))


def test_a_link_that_falls_silent_in_the_middle_costs_a_bounded_wait(
    folder: Path, net: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights_pieces, "SILENCE_S", 1.0)
    net.set("p0", "d0", rate_bytes_s=10e6)
    with net.inside("p0"):
        source = Source(folder, "mooncake", host=net.address("p0"))

    def cut() -> None:
        while source.writes < 3:
            time.sleep(0.01)
        net.drop("p0", "d0")

    models = []
    with serving(source), net.inside("d0"):
        pieces = pieces_from([source], folder, "mooncake", host=net.address("d0"))
        with ThreadPoolExecutor(1) as threads:
            cutting = threads.submit(cut)
            took_s = seconds(lambda: models.append(load(folder, pieces)))
            cutting.result()
    net.heal()
    assert 0 < pieces.from_neighbours < pieces.from_folder and took_s < 30
    assert "it is silent for 1 s" in caplog.text
    assert_same(models[0], load(folder))
