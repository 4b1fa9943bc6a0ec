"""Patches of images, made beside an instance: its process neither decodes files of strangers nor waits for it.

A file of patches is memory without a name (memfd): no other user can open it, and it is gone when it is dropped or when
the process ends, however that ends. Processes of the same user open it by its path, as TP followers do.
"""

from __future__ import annotations

import fcntl
import logging
import os

from chitu.config.schema import ImagesConfig
from chitu.errors import ChituError, Internal, InvalidRequest
from chitu.images.child import ChildEnded, ChildSetup, ChildTask, ImageChild, error_of, memory_for
from chitu.images.forms import ImageModel

logger = logging.getLogger(__name__)

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
"""Set once the patches are made, so that the process that made them cannot change what is being read."""


class PatchFile:
    """A safetensors file with the arguments of `get_image_features`, of one image."""

    def __init__(self) -> None:
        self._file = os.memfd_create("chitu-patches", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self._file, 0o600)
        self.num_bytes = 0

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def fileno(self) -> int:
        return self._file

    def finish(self, num_bytes: int) -> None:
        """Make the file what it is. OSError if it is not as long, or is still being written to."""
        if os.fstat(self._file).st_size != num_bytes:
            raise OSError("the file of patches is not as long as the process says that made it")
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, SEALS)
        self.num_bytes = num_bytes

    def close(self) -> None:
        """Remove it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class PatchesProcess:
    """Makes patches of one image at a time, in a process that `load` or the first one starts. Owned by one thread at a
    time, which outlives the process; no call but `load` waits."""

    def __init__(self, model: ImageModel, limits: ImagesConfig) -> None:
        self._setup = ChildSetup(model.spec, limits, memory_for(limits))
        self._child: ImageChild | None = None
        self._is_loaded = False
        self._target: PatchFile | None = None

    @property
    def is_busy(self) -> bool:
        return self._target is not None

    @property
    def pid(self) -> int | None:
        """Pid of the process, if it has one."""
        return None if self._child is None else self._child.pid

    @property
    def num_signs(self) -> int:
        """How often the process was seen to compute, as of the last `take`. It begins anew with each process."""
        return 0 if self._child is None else self._child.num_signs

    def fileno(self) -> int | None:
        """Return the descriptor that is readable once `take` has something, while it is busy."""
        return None if self._child is None else self._child.socket.fileno()

    def start(self) -> None:
        """Start the process, if there is none, or it has ended with nothing to do. Internal if that is impossible."""
        if self._child is not None and self._child.has_ended:
            self._child.kill()
            self._child = None
        if self._child is None:
            try:
                self._child = ImageChild(self._setup)
            except ChildEnded as error:
                raise Internal(f"the process for images cannot be started: {error}") from None
            self._is_loaded = False
            logger.info("patches of images: started pid %d", self._child.pid)

    def load(self) -> None:
        """Start the process, and wait until it has loaded the image processor. Raises ChituError if it cannot."""
        self.start()
        assert self._child is not None
        try:
            found = error_of(self._child.wait())
        except ChildEnded as error:
            self._child = None
            raise _end_of(error) from None
        if found is not None:
            self._child.kill()
            self._child = None
            raise found
        self._is_loaded = True

    def begin(self, data: bytes | bytearray) -> None:
        """Have patches made of an image's file. Internal if the process cannot be started, or has no memory for it."""
        assert self._target is None
        try:
            source = os.memfd_create("chitu-image", os.MFD_CLOEXEC)
        except OSError as error:
            raise Internal(f"no memory for an image's file: {error}") from error
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(source, left) :]
            self._hand_over(source, target := PatchFile())
            self._target = target
        except OSError as error:
            raise Internal(f"no memory for an image's file: {error}") from error
        finally:
            os.close(source)

    def _hand_over(self, source: int, target: PatchFile) -> None:
        """Give the process its files."""
        try:
            self.start()
            assert self._child is not None
            self._child.ask(ChildTask(), (source, target.fileno()))
        except ChildEnded as error:
            self._child = None
            target.close()
            raise _end_of(error) from None
        except ChituError:
            target.close()
            raise

    def take(self) -> PatchFile | ChituError | None:
        """Return the patches, or why there are none; None as long as they are being made. The file is the caller's."""
        if self._target is None or self._child is None:
            return None
        try:
            answer = self._child.answer(0.0)
            if answer is not None and not self._is_loaded:
                self._is_loaded = not answer.error
                if self._is_loaded:
                    return self.take()
        except ChildEnded as error:
            self._child = None
            return self._fail(_end_of(error))
        if answer is None:
            return None
        if (found := error_of(answer)) is not None:
            if not self._is_loaded:
                self._child.kill()
                self._child = None
            return self._fail(found)
        try:
            self._target.finish(answer.num_bytes)
        except OSError as error:
            return self._fail(Internal(f"the process for images made no whole file: {error}"))
        made, self._target = self._target, None
        return made

    def _fail(self, error: ChituError) -> ChituError:
        assert self._target is not None
        self._target.close()
        self._target = None
        return error

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None
        if self._target is not None:
            self._target.close()
            self._target = None


def _end_of(error: ChildEnded) -> ChituError:
    if error.was_costly:
        return InvalidRequest("the image takes too much time to be decoded: scale it down, or send it as a PNG file")
    return Internal(f"the process that made patches of an image ended: {error}")
