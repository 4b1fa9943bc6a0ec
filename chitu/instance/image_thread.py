"""The thread `images` of an instance: it gets the files of images from the routers, and has patches made of them.

It owns a DEALER to the coordination port of each router, beside the one of the comm thread, so that a large file delays
no other message; and the process of `chitu/images/patches.py`. FetchImage is repeated until it is answered or the image
is dropped. A large file comes in parts (`PART_BYTES`), each asked for by itself: so the loop of the router never stalls
for long. Few files are here or under way from a router at a time, and patches are made of one image at a time,
of those whose files are here the one that was asked for first. How many patches lie here bounds the step thread, by
what it asks for and does not drop.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple

import zmq

from chitu.clock import Clock, RealClock
from chitu.config.schema import ImagesConfig
from chitu.errors import BadFrame, ChituError, IncompatibleLayout, RequestLost, UnknownKind
from chitu.images.forms import ImageModel, key_of, versions
from chitu.images.patches import PatchesProcess, PatchFile
from chitu.instance.comm import RouterAddress
from chitu.instance.image_source import PreparedImage
from chitu.net.sockets import connect
from chitu.net.threads import ServiceThread
from chitu.protocol import PROTOCOL_VERSION, FetchImage, ImageFile, coordination_reply_codec, encode_for

logger = logging.getLogger(__name__)

MAX_FETCHED = 2
"""Files of one router that are here or under way at a time."""
PART_BYTES = 4 << 20
"""Most bytes of a file that are asked for at a time: while the router copies them, its loop does nothing else."""
MAX_RETRY_S = 8.0
"""Longest time until FetchImage is repeated. It doubles, as a large file may take long and comes again as often."""
UNCONNECTED_S = 0.05
"""Time until it is sent again if the router is not connected."""
POLL_S = 1.0
"""Longest sleep, after which a process that does not answer is looked at."""
CLOSE_S = 2.0


class _State(Enum):
    WANTED = auto()
    """Its file is to be asked for."""
    FETCHED = auto()
    """Its file is here, and waits for the process."""
    MAKING = auto()
    MADE = auto()


class _Image:
    """An image on the thread."""

    def __init__(self, key: bytes, router: int) -> None:
        self.key = key
        self.routers = [router]
        """Those that may have its file; the first is asked."""
        self.state = _State.WANTED
        self.is_asked = False
        self.due_s = 0.0
        """When FetchImage is sent again."""
        self.wait_s = 0.0
        self.data = bytearray()
        """As much as has come, from the start on."""
        self.made: PatchFile | None = None


class _Order(NamedTuple):
    """What the step thread wants. `number`: of the asking; a key that was dropped may be asked for again."""

    number: int
    key: bytes
    router: int | None
    """None: drop it."""
    is_first: bool = False
    """Whether the key is asked for anew; else one more router may have the file."""


class ImageThread:
    """The `ImageSource` of an instance whose model has vision. `start` it, and `close` it at the end."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        routers: Sequence[RouterAddress],
        model: ImageModel,
        limits: ImagesConfig,
        retry_interval_s: float,
        wake: Callable[[], None],
        clock: Clock = RealClock(),
        version_of: Callable[[int], int] = lambda router: PROTOCOL_VERSION,
    ) -> None:
        """`context`: the instance's, with the cluster's secrets. `routers`: all, in the order of the configuration.
        `wake` wakes the owner. `version_of` returns the version of the wire that a router reads."""
        self._context = context
        self._addresses = routers
        self._form = model.form
        self._patches = PatchesProcess(model, limits)
        self._retry_s = retry_interval_s
        self._wake = wake
        self._clock = clock
        self._version_of = version_of
        self._thread: ServiceThread | None = None
        self._stopping = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake_fd)
        self._numbers = itertools.count(1)
        self._asked: dict[bytes, int] = {}
        """Numbers of the images that are being prepared, or are prepared and not dropped. Step thread."""
        self._orders: deque[_Order] = deque()
        self._ready: deque[tuple[int, PreparedImage]] = deque()
        self._images: dict[int, _Image] = {}
        self.num_signs = 0
        """As of `ImageSource`. Any thread may read it."""
        self._patches_signs = 0
        """`PatchesProcess.num_signs`, as of the last look."""
        self._making = 0
        """Number of the image that the process has; 0: none. It may be dropped meanwhile."""
        self._sockets: list[zmq.Socket[bytes]] = []

    # ----------------------------------------------------------------------------------------------------- step thread

    def ask(self, key: bytes, router: int) -> None:
        number = self._asked.get(key)
        is_first = number is None
        if number is None:
            number = self._asked[key] = next(self._numbers)
        self._order(_Order(number, key, router, is_first))

    def take(self) -> list[PreparedImage]:
        found = []
        while self._ready:
            number, prepared = self._ready.popleft()
            if self._asked.get(prepared.key) != number:  # it was dropped meanwhile
                continue
            if prepared.error is not None:
                del self._asked[prepared.key]
            found.append(prepared)
        return found

    def drop(self, key: bytes) -> None:
        number = self._asked.pop(key, None)
        if number is not None:
            self._order(_Order(number, key, None))

    def _order(self, order: _Order) -> None:
        self._orders.append(order)
        os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------------------------------------------------ any thread

    @property
    def process_pid(self) -> int | None:
        """Pid of the process that makes patches, if it has been started."""
        return self._patches.pid

    def load(self) -> None:
        """Have the process loaded, before `start`: what it imports takes seconds, and on a slow machine a minute, which
        no prompt is to wait for. Without it images fail one by one, and say why."""
        try:
            self._patches.load()
        except ChituError as error:
            logger.warning("images: %s", error.message)

    def start(self) -> None:
        self._thread = ServiceThread("images", self._run)
        self._thread.start()

    def close(self) -> None:
        """End the thread, its process and all patches."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    # -------------------------------------------------------------------------------------------------- thread `images`

    def _run(self) -> None:
        self._sockets = [
            connect(self._context, zmq.DEALER, each.host, each.coordination_port, queues_unconnected=False)
            for each in self._addresses
        ]
        while not self._stopping:
            self._sleep()
            while self._orders:
                self._follow(self._orders.popleft())
            for index, socket in enumerate(self._sockets):
                self._receive(index, socket)
            self._take_patches()
            self._begin_next()
            self._fetch(self._clock.monotonic())
        self._patches.close()
        for image in self._images.values():
            if image.made is not None:
                image.made.close()
        for socket in self._sockets:
            socket.close(0)

    def _sleep(self) -> None:
        due_s = min((image.due_s for image in self._images.values() if image.is_asked), default=float("inf"))
        timeout_s = min(POLL_S, max(0.0, due_s - self._clock.monotonic()))
        waited: list[tuple[zmq.Socket[bytes] | int, int]] = [(socket, zmq.POLLIN) for socket in self._sockets]
        waited.append((self._wake_fd, zmq.POLLIN))
        process = self._patches.fileno()
        if self._patches.is_busy and process is not None:
            waited.append((process, zmq.POLLIN))
        zmq.zmq_poll(waited, int(1000 * timeout_s) + 1)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _follow(self, order: _Order) -> None:
        image = self._images.get(order.number)
        if order.is_first and order.router is not None:
            self._images[order.number] = _Image(order.key, order.router)
            with contextlib.suppress(ChituError):  # `begin` will tell
                self._patches.start()  # it loads while the file is fetched
        elif image is None:  # it has failed, which the step thread will take
            return
        elif order.router is None:
            self._remove(order.number)
        elif order.router not in image.routers:
            image.routers.append(order.router)

    def _remove(self, number: int) -> None:
        made = self._images.pop(number).made
        if made is not None:
            made.close()

    def _fetch(self, now_s: float) -> None:
        """Ask for the files whose turn it is, and again for those that have not come."""
        places = [MAX_FETCHED] * len(self._sockets)
        for image in self._images.values():
            if image.state is _State.FETCHED or image.is_asked:
                places[image.routers[0]] -= 1
        for image in self._images.values():
            router = image.routers[0]
            if image.state is not _State.WANTED:
                continue
            if not image.is_asked:
                if places[router] <= 0:
                    continue
                places[router] -= 1
                image.is_asked, image.due_s, image.wait_s = True, now_s, self._retry_s
            if now_s >= image.due_s:
                self._send_fetch(image, now_s)

    def _send_fetch(self, image: _Image, now_s: float) -> None:
        router, wanted = image.routers[0], FetchImage(image.key, len(image.data), PART_BYTES)
        try:
            self._sockets[router].send(encode_for(self._version_of(router), wanted), zmq.NOBLOCK)
        except zmq.Again:  # not connected
            image.due_s = now_s + UNCONNECTED_S
        else:
            image.due_s = now_s + image.wait_s
            image.wait_s = min(2 * image.wait_s, max(MAX_RETRY_S, self._retry_s))

    def _receive(self, router: int, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                reply = coordination_reply_codec.decode(frames[-1])
            except (BadFrame, UnknownKind) as error:
                logger.warning("images: bad frame from a router: %s", error)
                continue
            if isinstance(reply, ImageFile):
                self._take_file(router, reply)

    def _take_file(self, router: int, file: ImageFile) -> None:
        """Take an answer. Those that nobody waits for are repetitions, or of images that were dropped."""
        waiting = (number for number, each in self._images.items() if each.key == file.key and each.is_asked)
        number = next(waiting, 0)
        if not number or self._images[number].routers[0] != router:
            return
        image = self._images[number]
        if file.is_here and file.num_bytes and not self._take_part(image, file):
            return
        image.is_asked = False
        if not file.is_here:
            image.routers.pop(0)
            image.data = bytearray()
            if not image.routers:
                self._finish(number, RequestLost("the router has no file of an image: its request is over there"))
            return
        if not file.num_bytes:
            image.data = bytearray(file.data)
        if not hmac.compare_digest(key_of(image.data, self._form), file.key):
            self._finish(number, _other_processor())
        else:
            image.state = _State.FETCHED
            self._give_sign()

    def _take_part(self, image: _Image, file: ImageFile) -> bool:
        """Take a part, and have the next one asked for at once. Return whether it was the last one. One that came
        already is a repetition."""
        if file.start != len(image.data) or not file.data:
            return False
        image.data += file.data
        self._give_sign()
        image.due_s, image.wait_s = 0.0, self._retry_s
        return len(image.data) >= file.num_bytes

    def _begin_next(self) -> None:
        """Hand the process the next image, if it has none."""
        if self._patches.is_busy:
            return
        for number, image in list(self._images.items()):
            if image.state is not _State.FETCHED:
                continue
            data, image.data = image.data, bytearray()
            try:
                self._patches.begin(data)
            except ChituError as error:
                self._finish(number, error)
                continue
            image.state, self._making = _State.MAKING, number
            return

    def _take_patches(self) -> None:
        found = self._patches.take()
        if (signs := self._patches.num_signs) != self._patches_signs:
            self._patches_signs = signs
            self._give_sign()
        if found is None:
            return
        number, self._making = self._making, 0
        if number not in self._images:  # dropped meanwhile
            if isinstance(found, PatchFile):
                found.close()
        elif isinstance(found, ChituError):
            self._finish(number, found)
        else:
            image = self._images[number]
            image.made, image.state = found, _State.MADE
            self._tell(number, PreparedImage(image.key, found.path))

    def _finish(self, number: int, error: ChituError) -> None:
        key = self._images[number].key
        self._remove(number)
        self._tell(number, PreparedImage(key, error=error))

    def _give_sign(self) -> None:
        """Show the step thread that an image is worked on."""
        self.num_signs += 1
        self._wake()

    def _tell(self, number: int, prepared: PreparedImage) -> None:
        self._ready.append((number, prepared))
        self._wake()


def _other_processor() -> IncompatibleLayout:
    return IncompatibleLayout(
        f"an image was prepared for another image processor than that of this instance ({versions()}): the router and "
        "all instances need the same versions of both, and the same preprocessor_config.json"
    )
