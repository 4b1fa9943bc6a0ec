"""The thread `images` of an instance against a router's port, with the real process that makes patches."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from safetensors.numpy import load_file
from support.image_files import image_file, png_bomb
from support.image_models import write_image_model

from chitu.config.schema import ImagesConfig
from chitu.errors import IncompatibleLayout, Internal, InvalidRequest, RequestLost
from chitu.images.forms import ImageModel, image_model_of, key_of
from chitu.images.sizer import SizerProcess
from chitu.instance import image_thread
from chitu.instance.comm import RouterAddress
from chitu.instance.image_source import PreparedImage
from chitu.instance.image_thread import ImageThread
from chitu.net.curve import derive, make_context
from chitu.net.sockets import bind
from chitu.net.threads import Waker
from chitu.protocol import OLDEST_VERSION, PROTOCOL_VERSION, FetchImage, ImageFile, coordination_codec, encode

LIMITS = ImagesConfig()
RETRY_S = 0.1
PATIENCE_S = 60.0


class FilePort:
    """The coordination port of a router that has some files; the test moves it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket, self.port = bind(context, zmq.ROUTER, "127.0.0.1", 0)
        self.files: dict[bytes, bytes] = {}
        self.asked: list[bytes] = []

    def serve(self, is_mute: bool = False) -> None:
        """Answer what has come; with `is_mute` only read it."""
        while self.socket.poll(0):
            identity, frame = self.socket.recv_multipart()
            message = coordination_codec.decode(frame)
            assert isinstance(message, FetchImage)
            self.asked.append(message.key)
            if not is_mute:
                self.answer(identity, message)

    def answer(self, identity: bytes, wanted: FetchImage) -> None:
        key, start, most = wanted.key, wanted.start, wanted.most_bytes
        data = self.files.get(key)
        if data is None:
            answer = ImageFile(key, is_here=False)
        elif most:
            answer = ImageFile(key, data[start : start + most], start=start, num_bytes=len(data))
        else:
            answer = ImageFile(key, data)
        self.socket.send_multipart([identity, encode(answer)])


class Bench:
    """An `ImageThread` with two routers."""

    def __init__(self, folder: Path) -> None:
        found = image_model_of(folder)
        assert isinstance(found, ImageModel)
        self.model = found
        secrets = derive("a key of the cluster, long enough")
        self.contexts = [make_context(secrets), make_context(secrets)]
        self.ports = [FilePort(self.contexts[0]) for _ in range(2)]
        self.waker = Waker()
        addresses = [RouterAddress("127.0.0.1", 1, port.port, 1) for port in self.ports]
        self.thread = ImageThread(self.contexts[1], addresses, found, LIMITS, RETRY_S, self.waker.wake)
        self.thread.start()

    def add(self, data: bytes, router: int = 0) -> bytes:
        key = key_of(data, self.model.form)
        self.ports[router].files[key] = data
        return key

    def wait(self, is_over: Callable[[], bool], *mute: FilePort) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not is_over():
            assert time.monotonic() < end_s
            for port in self.ports:
                port.serve(is_mute=port in mute)
            self.waker.wait(0.01)

    def take(self, *mute: FilePort) -> PreparedImage:
        """Return the next image that is ready or has failed."""
        found: list[PreparedImage] = []

        def has_one() -> bool:
            found.extend(self.thread.take())
            return bool(found)

        self.wait(has_one, *mute)
        [prepared] = found
        return prepared

    def close(self) -> None:
        self.thread.close()
        for port in self.ports:
            port.socket.close(0)
        for context in self.contexts:
            context.destroy(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def bench(folder: Path) -> Iterator[Bench]:
    bench = Bench(folder)
    yield bench
    bench.close()


@pytest.fixture(autouse=True)
def _forget(bench: Bench) -> Iterator[None]:
    yield
    for port in bench.ports:
        port.asked.clear()


def open_files() -> int:
    """Return how many images and files of patches this process has in memory without a name."""
    names = (os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _exists(name))
    return sum("memfd:chitu-image" in name or "memfd:chitu-patches" in name for name in names)


def _exists(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


def require_private(path: str) -> None:
    """Raise unless no other user can open the file, and nobody can change it."""
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600 and stat.S_IMODE(os.stat(Path(path).parent).st_mode) == 0o500
    with open(path, "r+b", 0) as file, pytest.raises(PermissionError):
        file.write(b"0")


def test_patches_are_those_of_the_sizes(bench: Bench, folder: Path) -> None:
    sizer = SizerProcess.of(folder, LIMITS)
    assert isinstance(sizer, SizerProcess)
    try:
        for number, (size, turned) in enumerate((((60, 90), 1), ((200, 31), 6))):
            key = bench.add(image_file(*size, "JPEG", seed=number, turned=turned))
            signs = bench.thread.num_signs
            bench.thread.ask(key, 0)
            bench.thread.ask(key, 0)
            prepared = bench.take()
            assert bench.thread.num_signs > signs + (number == 0), "its file came; the first time a processor is loaded"
            assert prepared.error is None and prepared.key == key
            found = load_file(prepared.patches)
            [layout] = sizer.layout([size if turned == 1 else size[::-1]])
            times, height, width = layout.grid
            assert found["image_grid_thw"].tolist() == [[times, 2 * height, 2 * width]]
            assert found["pixel_values"].shape == (4 * layout.num_rows, 3 * 2 * 14 * 14)
            assert found["pixel_values"].dtype == np.float32 and found["pixel_values"].std() > 0.5
            require_private(prepared.patches)
            bench.thread.ask(key, 0)
            assert bench.thread.take() == []
            bench.thread.drop(key)
            bench.wait(lambda: open_files() == 0)
            assert not os.path.exists(prepared.patches)
    finally:
        sizer.close()
    assert len(set(bench.ports[0].asked)) == 2  # one that is late is asked for again


def test_an_unanswered_question_is_repeated(bench: Bench) -> None:
    key, port = bench.add(image_file(40, 40, seed=3)), bench.ports[0]
    bench.thread.ask(key, 0)
    bench.wait(lambda: len(port.asked) >= 3, port)
    assert bench.take().key == key
    bench.thread.drop(key)
    late = len(port.asked)
    time.sleep(4 * RETRY_S)
    port.serve()
    assert len(port.asked) == late


@pytest.mark.parametrize("version", [OLDEST_VERSION, PROTOCOL_VERSION])
def test_a_file_comes_in_parts_unless_the_router_is_of_an_older_release(
    bench: Bench, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_thread, "PART_BYTES", 1000)
    monkeypatch.setattr(bench.thread, "_version_of", lambda router: version)
    data = image_file(70, 70, seed=20 + version)
    key, port = bench.add(data), bench.ports[0]
    bench.thread.ask(key, 0)
    bench.wait(lambda: len(port.asked) >= 2, port)  # the first ones are lost
    prepared = bench.take()
    assert prepared.error is None and prepared.key == key
    bench.thread.drop(key)
    assert len(data) > 5000 and (len(port.asked) > len(data) // 1000) == (version == PROTOCOL_VERSION)


def test_the_rest_of_a_file_is_fetched_from_another_router_from_the_start_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_thread, "PART_BYTES", 1000)
    first, second = bench.ports
    key = bench.add(image_file(70, 70, seed=30))
    second.files[key] = first.files[key]
    bench.thread.ask(key, 0)
    bench.thread.ask(key, 1)
    bench.wait(lambda: len(first.asked) >= 3, second)
    del first.files[key]
    prepared = bench.take()
    assert prepared.error is None and prepared.key == key
    bench.thread.drop(key)


def test_each_failure_is_one_images(bench: Bench) -> None:
    """Errors of the file, of the router and of another processor, each told once; the next image works."""
    damaged = image_file(90, 90, seed=4)[:9000]
    for data, error, words in (
        (damaged, InvalidRequest, "damaged or truncated"),
        (png_bomb(60000, 60000), InvalidRequest, "scale it down"),
        (image_file(3, 2000), InvalidRequest, "refuses an image of this size"),
    ):
        key = bench.add(data)
        bench.thread.ask(key, 0)
        prepared = bench.take()
        assert isinstance(prepared.error, error) and words in prepared.error.message
    bench.thread.ask(b"0" * 16, 0)
    assert isinstance(bench.take().error, RequestLost)
    other = bench.model.form._replace(fingerprint=bytes(16))
    data = image_file(50, 50, seed=5)
    key = key_of(data, other)
    bench.ports[0].files[key] = data
    bench.thread.ask(key, 0)
    error_of_key = bench.take().error
    assert isinstance(error_of_key, IncompatibleLayout)
    assert "transformers 5" in error_of_key.message and "Pillow" in error_of_key.message
    key = bench.add(data)
    bench.thread.ask(key, 0)
    assert bench.take().error is None
    bench.thread.drop(key)
    bench.wait(lambda: open_files() == 0)


def test_another_router_may_have_the_file(bench: Bench) -> None:
    key = bench.add(image_file(44, 55, seed=6), router=1)
    bench.thread.ask(key, 0)
    bench.thread.ask(key, 1)
    assert bench.take().error is None
    assert [len(port.asked) for port in bench.ports] == [1, 1]
    bench.thread.drop(key)


def test_a_mute_router_delays_no_other(bench: Bench) -> None:
    mute, other = bench.ports
    lost = [bench.add(image_file(30, 30, seed=seed)) for seed in range(10, 15)]
    for key in lost:
        bench.thread.ask(key, 0)
    key = bench.add(image_file(30, 30, seed=16), router=1)
    bench.thread.ask(key, 1)
    assert bench.take(mute).key == key
    assert len(set(mute.asked)) == 2 and set(other.asked) == {key}
    taken = {bench.take().key for _ in lost}
    assert taken == set(lost)
    for each in (*lost, key):
        bench.thread.drop(each)
    bench.wait(lambda: open_files() == 0)


def test_a_killed_process_costs_one_image(bench: Bench) -> None:
    """Killed in the middle of an image, and while it has nothing to do."""
    large, small = bench.add(image_file(2600, 2600, seed=7)), bench.add(image_file(30, 40, seed=8))
    bench.thread.ask(large, 0)
    bench.wait(lambda: bool(bench.thread._making))
    bench.thread.ask(small, 0)
    first = bench.thread.process_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    prepared = bench.take()
    assert prepared.key == large and isinstance(prepared.error, Internal) and "SIGKILL" in prepared.error.message
    prepared = bench.take()
    assert prepared.key == small and prepared.error is None
    bench.thread.drop(small)
    second = bench.thread.process_pid
    assert second != first and second is not None
    os.kill(second, signal.SIGKILL)
    bench.wait(lambda: Path(f"/proc/{second}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    bench.thread.ask(small, 0)
    assert bench.take().error is None
    bench.thread.drop(small)
    bench.wait(lambda: open_files() == 0)


def test_dropped_while_it_is_made(bench: Bench) -> None:
    large, small = bench.add(image_file(1500, 1500, seed=9)), bench.add(image_file(30, 40, seed=17))
    bench.thread.ask(large, 0)
    bench.wait(lambda: bool(bench.thread._making))
    bench.thread.drop(large)
    bench.thread.ask(small, 0)
    assert bench.take().key == small
    bench.thread.ask(large, 0)
    assert bench.take().error is None
    for key in (large, small):
        bench.thread.drop(key)
    bench.wait(lambda: open_files() == 0)


def test_the_process_ends_with_the_thread(folder: Path) -> None:
    bench = Bench(folder)
    key = bench.add(image_file(30, 40))
    bench.thread.ask(key, 0)
    assert bench.take().error is None
    pid = bench.thread.process_pid
    bench.close()
    assert not os.path.exists(f"/proc/{pid}") and open_files() == 0
