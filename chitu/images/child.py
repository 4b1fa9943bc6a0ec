"""The process in which the image processor of `transformers` runs, for a router (sizes) or an instance (patches).

`ImageChild` starts it and is its one client. The process (`python -m chitu.images.child SOCKET PARENT_PID`) inherits
one end of a socket pair of whole messages, over which it answers one task after another. It decodes files of strangers:
so it has no access to the cluster, its memory and the CPU time of each task are bounded, and what it says is decoded as
plain numbers and text. It ends with the process that started it, however that ends.

The processor needs no torch, so the process is told that there is none: it then starts in a second, with a fifth of the
memory, and the back end cannot be another than Pillow's.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from chitu.clock import Clock, RealClock
from chitu.config.load import keyless_environment
from chitu.config.schema import ImagesConfig
from chitu.errors import ChituError, ContextLengthExceeded, Internal, InvalidRequest
from chitu.images.files import decode_image
from chitu.images.forms import ProcessorSpec
from chitu.images.layout import Grid
from chitu.images.video_files import Wanted, decode_part, sample_video
from chitu.images.videos import FRAMES, PART_MAGIC
from chitu.process.child import describe_exit
from chitu.process.descendants import MARK, die_with_parent

LOAD_CPU_S, TASK_CPU_S = 120.0, 30.0
"""CPU time (s) for loading the processor, and for a task; a 4K image takes 2. A slow machine gives a task more
(`task_cpu_s`)."""
USUAL_LOAD_S, MOST_SLOWER = 1.0, 10.0
"""CPU time (s) that loading the processor usually takes. A machine counts as so many times slower at most."""
HUNG_S = 120.0
"""A process that does not compute for this long is stopped or waits forever, and is killed."""
SIGN_CPU_S = 0.1
"""CPU time (s) that shows that the process computes."""
SPARE_BYTES = 1 << 30
BYTES_PER_PIXEL = 64
"""Memory of a task beyond `SPARE_BYTES`, by the pixels of the largest image: they as bytes and floats, and patches."""
MAX_MESSAGE_BYTES = 64 << 10
NICENESS = 5
_RESIZE_WITH_TIME = "transformers.models.glm4v.image_processing_pil_glm4v"
HIDDEN = ("torch", "torchvision", "tensorflow", "jax", "flax")
"""Packages that the processor would use if they were there."""


class ChildSetup(msgspec.Struct, frozen=True):
    spec: ProcessorSpec
    limits: ImagesConfig
    memory_bytes: int
    """Address space that tasks may take beyond the loaded processor."""
    task_cpu_s: float = TASK_CPU_S


class ChildTask(msgspec.Struct, frozen=True):
    """With two file descriptors (a file, and one for what is made of it): make patches of an image or of a part of a
    video, or with `video` a `SampledVideo` of a video. Else: measure."""

    width: int = 0
    height: int = 0
    video: Wanted | None = None


class ChildAnswer(msgspec.Struct, frozen=True):
    grid: Grid = (0, 0, 0)
    num_bytes: int = 0
    """Size of the file that was made."""
    error: str = ""
    is_clients: bool = True
    """Whether the error is the fault of the image."""
    is_too_long: bool = False
    """Whether it is a `ContextLengthExceeded`."""


_setup_decoder = msgspec.msgpack.Decoder(ChildSetup)
_task_decoder = msgspec.msgpack.Decoder(ChildTask)
_answer_decoder = msgspec.msgpack.Decoder(ChildAnswer)
_encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode


def memory_for(limits: ImagesConfig) -> int:
    """Return the memory (bytes) that the largest allowed image may take."""
    return SPARE_BYTES + BYTES_PER_PIXEL * limits.max_pixels


def task_cpu_s(usual_s: float, load_s: float) -> float:
    """Return the CPU time (s) of a task on a machine that took `load_s` of it to load the processor: `usual_s`, or more
    if the machine is slower than usual."""
    return usual_s * min(MOST_SLOWER, max(1.0, load_s / USUAL_LOAD_S))


def _cpu_s_of(pid: int) -> float:
    """Return the CPU time (s) that a process has used; 0 if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            ticks = sum([int(field) for field in file.read().rpartition(")")[2].split()[11:13]])
    except OSError:
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------------------------------------- in the process


class LoadedProcessor:
    """The loaded image processor. From here on this process imports none of `HIDDEN`."""

    def __init__(self, spec: ProcessorSpec, limits: ImagesConfig) -> None:
        _hide()
        self._module = importlib.import_module(spec.module)
        self.processor = getattr(self._module, spec.class_name).from_pretrained(spec.folder)
        self._spec = spec
        self._limits = limits

    def measure(self, width: int, height: int) -> Grid:
        """Return the grid of an image of this size: times (`tiles`: tiles), height and width in feature rows. Raises
        ValueError for a size that the processor refuses."""
        processor, options = self.processor, self._spec.options
        match self._spec.kind:
            case "qwen" | "glm" as kind:
                merged, size = processor.patch_size * processor.merge_size, processor.size
                bounds = {"min_pixels": _item(size, "shortest_edge"), "max_pixels": _item(size, "longest_edge")}
                if kind == "glm":
                    bounds["temporal_factor"] = bounds["num_frames"] = processor.temporal_patch_size
                high, wide = self._module.smart_resize(height=height, width=width, factor=merged, **bounds)
                return 1, high // merged, wide // merged
            case "lines":
                return 1, *self._lines(width, height)
            case "tiles":
                return processor.get_number_of_image_patches(height, width, dict(options)), 1, 1
            case _:
                return 1, 1, 1

    def _lines(self, width: int, height: int) -> tuple[int, int]:
        import numpy as np

        patch, size = int(self._spec.options["patch_size"]), self.processor.size
        longest = _item(size, "longest_edge")
        largest = (longest, longest) if longest else (_item(size, "height"), _item(size, "width"))
        nothing = np.broadcast_to(np.uint8(0), (3, height, width))  # it has the shape, and one byte
        high, wide = self._module.get_resize_output_image_size(
            nothing, size=largest, patch_size=(patch, patch), input_data_format="channels_first"
        )
        if not high or not wide:
            raise ValueError("nothing is left of it")
        return high // patch, wide // patch

    def patches(self, data: bytes) -> tuple[Grid, bytes]:
        """Return the grid of an image, and the arguments of the family's `get_image_features` as a safetensors file."""
        import numpy as np
        from safetensors.numpy import save

        if data.startswith(PART_MAGIC):
            return self._patches_of_part(data)
        image = decode_image(data, self._limits)
        grid = self.measure(*image.size)
        made = self.processor(images=[image], return_tensors="np", **self._spec.options)
        del image
        found = {
            name: np.ascontiguousarray(made[name])
            for name in ("pixel_values", "image_grid_thw", "image_sizes")
            if name in made
        }
        if "image_grid_thw" in found:
            merge = self.processor.merge_size
            times, height, width = map(int, found["image_grid_thw"][0])
            _require_same(grid, (times, height // merge, width // merge))
        elif "image_sizes" in found:
            patch = int(self._spec.options["patch_size"])
            height, width = map(int, found["image_sizes"][0])
            _require_same(grid, (1, height // patch, width // patch))
        else:
            _require_same((grid[0], 1, 1), (len(found["pixel_values"]), 1, 1))
        return grid, save(found)

    def _patches_of_part(self, data: bytes) -> tuple[Grid, bytes]:
        """Return the same of a part of a video. The image processor sees each frame as an image, whose patches have it
        as many times as a patch has frames; here they take one of each."""
        import numpy as np
        from safetensors.numpy import save

        images = decode_part(data, self._limits, self.processor.resample)
        patch, merge = self.processor.patch_size, self.processor.merge_size
        width, height = images[0].size
        if self._spec.video is None or width % (patch * merge) or height % (patch * merge):
            raise InvalidRequest(f"frames of {width} x {height} pixels are none of a video for this model")
        made = [self.processor(images=[each], do_resize=False, return_tensors="np")["pixel_values"] for each in images]
        pixels = np.stack([each.reshape(len(each), -1, FRAMES, patch**2)[:, :, 0] for each in made], axis=2)
        grid = (1, height // patch, width // patch)
        found = {"pixel_values": pixels.reshape(len(pixels), -1), "image_grid_thw": np.array([grid], dtype=np.int64)}
        return (1, grid[1] // merge, grid[2] // merge), save(found)

    def video(self, data: bytes, wanted: Wanted) -> bytes:
        """Return an encoded `SampledVideo`. Raises what `sample_video` raises."""
        spec = self._spec.video
        if spec is None:
            raise InvalidRequest("this model takes no videos")
        resize = self._module.smart_resize
        if spec.kind == "qwen3":  # the same as GLM's; its image processor is that of Qwen2-VL
            resize = importlib.import_module(_RESIZE_WITH_TIME).smart_resize
        return _encode(sample_video(data, spec, self._limits, wanted, resize, self.processor.resample))


def _require_same(measured: Grid, made: Grid) -> None:
    if measured != made:
        raise RuntimeError(f"the processor made a grid {made} of an image whose size gives {measured}")


def _item(size: Any, name: str) -> Any:
    return size.get(name) if isinstance(size, dict) else getattr(size, name, None)


def _hide() -> None:
    """Let `transformers` find none of `HIDDEN`."""
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name.partition(".")[0] in HIDDEN else find(name, package)

    importlib.util.find_spec = find_spec
    sys.meta_path.insert(0, _Hidden())


class _Hidden:
    """A finder that fails for them."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"{name} is not used in this process", name=name)


def _bound_memory(num_bytes: int) -> None:
    """Let this process map as much memory beyond what it has mapped now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    most, (_, hard) = mapped + num_bytes, resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(processor: LoadedProcessor, task: ChildTask, files: Sequence[int]) -> ChildAnswer:
    try:
        if not files:
            return ChildAnswer(processor.measure(task.width, task.height))
        source, target = files
        grid: Grid = (0, 0, 0)
        if task.video is not None:
            made = processor.video(_content(source), task.video)
        else:
            grid, made = processor.patches(_content(source))
        os.posix_fallocate(target, 0, len(made))  # a lack of memory is an error here, and no signal later
        left = memoryview(made)
        while left:
            left = left[os.write(target, left) :]
        return ChildAnswer(grid, len(made))
    except ContextLengthExceeded as error:
        return ChildAnswer(error=error.message, is_too_long=True)
    except InvalidRequest as error:
        return ChildAnswer(error=error.message)
    except MemoryError:
        return ChildAnswer(error="the image needs more memory than the image processor may take: scale it down")
    except ValueError as error:
        return ChildAnswer(error=f"the model's image processor refuses an image of this size: {error}"[:500])
    except Exception as error:
        return ChildAnswer(error=f"the image processor failed: {error!r}"[:500], is_clients=False)


def _content(file: int) -> bytes:
    size = os.fstat(file).st_size
    return os.pread(file, size, 0)


def _serve(connection: socket.socket) -> None:
    setup = _setup_decoder.decode(connection.recv(MAX_MESSAGE_BYTES))
    signal.setitimer(signal.ITIMER_PROF, LOAD_CPU_S)
    try:
        processor = LoadedProcessor(setup.spec, setup.limits)
    except Exception as error:
        text = f"the model's image processor cannot be loaded: {error!r}"[:1000]
        connection.send(_encode(ChildAnswer(error=text, is_clients=False)))
        while connection.recv(MAX_MESSAGE_BYTES):  # an end with unread tasks would take the answer back
            pass
        return
    limit_s = task_cpu_s(setup.task_cpu_s, time.process_time())
    _bound_memory(setup.memory_bytes)
    connection.send(_encode(ChildAnswer()))
    while True:
        signal.setitimer(signal.ITIMER_PROF, 0)
        message, files, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2)
        if not message:
            return
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        answer = _encode(_answer(processor, _task_decoder.decode(message), files))
        for file in files:
            os.close(file)
        connection.send(answer)


def main(argv: Sequence[str]) -> int:
    die_with_parent(int(argv[1]))
    os.nice(NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # its parent receives a terminal's, and ends it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ConnectionError):
        _serve(socket.socket(fileno=int(argv[0])))
    return 0


# ------------------------------------------------------------------------------------------------------ its one client


class ChildEnded(Exception):
    """The process ended without an answer. `code`: its return code, as in `subprocess`."""

    def __init__(self, code: int) -> None:
        super().__init__(describe_exit(code))
        self.code = code

    @property
    def was_costly(self) -> bool:
        """Whether it used up its CPU time."""
        return self.code == -signal.SIGPROF


class ImageChild:
    """One process, on one thread of the process that starts it: it ends with that thread. It answers one task after
    another; the first answer says that the processor is loaded."""

    def __init__(self, setup: ChildSetup, clock: Clock = RealClock()) -> None:
        """Start the process, which takes seconds to load. Internal if it cannot be started."""
        self._clock = clock
        try:
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise Internal(f"the process for images cannot be started: {error}") from error
        try:
            argv = (sys.executable, "-m", "chitu.images.child", str(theirs.fileno()), str(os.getpid()))
            self._popen = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), env=_environment()
            )
        except OSError as error:
            mine.close()
            raise Internal(f"the process for images cannot be started: {error}") from error
        finally:
            theirs.close()
        self.socket = mine
        """Readable when an answer is there, or the process has ended."""
        self.num_signs = 0
        """How often it was seen to compute."""
        self._cpu_s = 0.0
        """CPU time that it had used then."""
        self._heard_s = clock.monotonic()
        """When it was asked, or seen to compute."""
        self._send(_encode(setup), ())

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def ask(self, task: ChildTask, files: Sequence[int] = ()) -> None:
        """Hand it a task; at once, as it has no other. ChildEnded if it has ended."""
        self._heard_s = self._clock.monotonic()
        self._send(_encode(task), files)

    def _send(self, message: bytes, files: Sequence[int]) -> None:
        try:
            if files:
                socket.send_fds(self.socket, [message], files)
            else:
                self.socket.send(message)
        except OSError:
            raise ChildEnded(self.kill()) from None

    def answer(self, timeout_s: float) -> ChildAnswer | None:
        """Return the answer, None if there is none within `timeout_s`. ChildEnded if none will come: it has ended, says
        what it cannot, or has computed nothing for `HUNG_S` and was killed."""
        ready, _, _ = select.select([self.socket], [], [], timeout_s)
        if not ready:
            self._look()
            if self._clock.monotonic() - self._heard_s > HUNG_S:
                raise ChildEnded(self.kill())
            return None
        try:
            return _answer_decoder.decode(self.socket.recv(MAX_MESSAGE_BYTES))
        except (OSError, msgspec.MsgspecError):  # an end is an empty message
            raise ChildEnded(self.kill()) from None

    def _look(self) -> None:
        """Note whether it computes. How much it may is bounded where it runs."""
        cpu_s = _cpu_s_of(self.pid)
        if cpu_s >= self._cpu_s + SIGN_CPU_S:
            self._cpu_s, self._heard_s = cpu_s, self._clock.monotonic()
            self.num_signs += 1

    def wait(self) -> ChildAnswer:
        """Return the answer, however long it computes. ChildEnded as `answer`."""
        while (answer := self.answer(1.0)) is None:
            pass
        return answer

    def kill(self) -> int:
        """End it; return its exit code."""
        self._popen.kill()
        self.socket.close()
        return self._popen.wait()


def _environment() -> dict[str, str]:
    """Return this process's environment without keys, with a mark of its own, and for one thread."""
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    return keyless_environment({MARK: uuid.uuid4().hex, **threads, **quiet})


def error_of(answer: ChildAnswer) -> ChituError | None:
    """Return the error that an answer is, if it is one."""
    if not answer.error:
        return None
    if answer.is_too_long:
        return ContextLengthExceeded(answer.error)
    return InvalidRequest(answer.error) if answer.is_clients else Internal(answer.error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
