"""The side of a unified instance, which moves no KV: with features of images from E (`PullingAlone`), or with no peers
at all (`NoPeers`)."""

from __future__ import annotations

from chitu.kv_transfer.pulling import EncodeReceiver
from chitu.protocol import ClusterView, PathLoad


class NoPeers:
    """Every frame is unknown."""

    stale_frames = 0
    suspended_ranks: tuple[int, ...] = ()
    path_loads: tuple[PathLoad, ...] = ()
    silent_prefills: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.unknown_frames = 0

    def start(self) -> None: ...

    def close(self) -> None: ...

    def on_frame(self, room: bytes, payload: bytes) -> None:
        """Count a frame."""
        self.unknown_frames += 1

    def on_image_frame(self, room: bytes, payload: bytes) -> None:
        """Count a frame on the port for E."""
        self.unknown_frames += 1

    def on_view(self, view: ClusterView, router: int = 0) -> None: ...

    def on_silence(self, router: int) -> None: ...

    def tick(self, now_s: float) -> None: ...


class PullingAlone(NoPeers):
    """With E as its only peers. `images`: what it receives features with."""

    def __init__(self, images: EncodeReceiver) -> None:
        super().__init__()
        self.images = images

    def start(self) -> None:
        self.images.start()

    def close(self) -> None:
        self.images.close()

    def on_image_frame(self, room: bytes, payload: bytes) -> None:
        self.images.on_frame(room, payload)

    def on_view(self, view: ClusterView, router: int = 0) -> None:
        self.images.on_view(view, router)

    def on_silence(self, router: int) -> None:
        self.images.on_silence(router)

    def tick(self, now_s: float) -> None:
        self.images.tick(now_s)
