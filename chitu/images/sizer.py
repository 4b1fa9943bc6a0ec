"""The rows of images, by their sizes alone: the `ImageSizer` of a process that reads bodies."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from chitu.config.schema import ImagesConfig
from chitu.errors import Internal, InvalidRequest
from chitu.images.child import SPARE_BYTES, ChildAnswer, ChildEnded, ChildSetup, ChildTask, ImageChild, error_of
from chitu.images.forms import ImageModel, image_model_of
from chitu.images.layout import ImageForm, ImageLayout
from chitu.images.video_files import Wanted
from chitu.images.videos import SampledVideo

logger = logging.getLogger(__name__)

MAX_CACHED = 4096
"""Layouts kept, by size."""
TRIES = 2
_video_decoder = msgspec.msgpack.Decoder(SampledVideo)


class SizerProcess:
    """Asks the model's image processor in a process of its own (`child.py`), which `load` or the first image starts;
    none is needed by a model whose images all have the same rows. One thread, which outlives it."""

    def __init__(self, model: ImageModel, limits: ImagesConfig) -> None:
        self._model = model
        self._limits = limits
        self._child: ImageChild | None = None
        self._layouts: dict[tuple[int, int], ImageLayout] = {}

    @classmethod
    def of(cls, folder: str | Path, limits: ImagesConfig) -> SizerProcess | str:
        """Return the sizer of the model in a folder, or why its prompts cannot have images."""
        model = image_model_of(folder)
        return model if isinstance(model, str) else cls(model, limits)

    @property
    def form(self) -> ImageForm:
        return self._model.form

    @property
    def pid(self) -> int | None:
        """Pid of its process, if it has one."""
        return None if self._child is None else self._child.pid

    def load(self) -> None:
        """Load the processor before the first image, which then waits for nothing. Raises ChituError if that is
        impossible, as each image will."""
        if self._child is None and self._model.spec.kind != "fixed":
            try:
                self._start()
            except ChildEnded as error:
                raise Internal(f"the process that measures images ended ({error})") from None

    def layout(self, sizes: Sequence[tuple[int, int]]) -> list[ImageLayout]:
        """Return the layouts of images of these widths and heights (pixels). Raises InvalidRequest for a size that the
        processor refuses (`param`: its index), Internal if the processor cannot be asked."""
        return [self._layout(size, index) for index, size in enumerate(sizes)]

    def video(self, data: bytes, fps: float | None, most_rows: int) -> SampledVideo:
        """Return the frames of a video's file. `fps`: as in `Wanted`. Raises InvalidRequest for a file that is no video
        that is read, or exceeds a limit, ContextLengthExceeded if it has more than `most_rows` rows, Internal if the
        processor cannot be asked."""
        source, target = (os.memfd_create(f"chitu-{name}", os.MFD_CLOEXEC) for name in ("video", "frames"))
        try:
            with open(source, "wb", closefd=False) as file:
                file.write(data)
            try:
                answer = self._ask(ChildTask(video=Wanted(fps, most_rows)), (source, target))
            except ChildEnded:
                raise InvalidRequest(
                    "the video takes too much time to be decoded: send a shorter or smaller one"
                ) from None
            if (error := error_of(answer)) is not None:
                raise error
            return _video_decoder.decode(os.pread(target, answer.num_bytes, 0))
        except (OSError, msgspec.MsgspecError) as error:
            raise Internal(f"the process for images made nothing of a video: {error}") from error
        finally:
            os.close(source)
            os.close(target)

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _layout(self, size: tuple[int, int], index: int) -> ImageLayout:
        found = self._layouts.get(size)
        if found is None:
            is_fixed = self._model.spec.kind == "fixed"
            answer = ChildAnswer((1, 1, 1)) if is_fixed else self._ask(ChildTask(*size))
            if (error := error_of(answer)) is not None:
                if isinstance(error, InvalidRequest):
                    error.param = str(index)
                raise error
            found = self._model.layout(answer.grid)
            if len(self._layouts) >= MAX_CACHED:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[size] = found
        return found

    def _ask(self, task: ChildTask, files: Sequence[int] = ()) -> ChildAnswer:
        """Return the answer. A process that ends instead is replaced once; ChildEnded if it used up its CPU time."""
        ended = ""
        for _ in range(TRIES):
            try:
                child = self._child or self._start()
                for file in files[1:]:  # a former try may have written to it
                    os.lseek(file, 0, os.SEEK_SET)
                child.ask(task, files)
                return child.wait()
            except ChildEnded as error:
                self._child, ended = None, str(error)
                logger.warning("the process that measures images ended: %s", ended)
                if files and error.was_costly:
                    raise
        raise Internal(f"the process that measures images ended {TRIES} times ({ended})")

    def _start(self) -> ImageChild:
        """Start the process, and wait until its processor is loaded."""
        child = ImageChild(ChildSetup(self._model.spec, self._limits, SPARE_BYTES))
        logger.info("sizes of images: started pid %d", child.pid)
        if (error := error_of(child.wait())) is not None:
            child.kill()
            raise error
        self._child = child
        return child
