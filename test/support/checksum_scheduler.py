"""Process entry of an instance with the checksum engine: `python -m support.checksum_scheduler --role ...`.

Everything except the engine is real (`serve/scheduler.py`): sockets, threads, scheduler, transports. The "checkpoint"
is a folder with a tokenizer and a `config.json`, written by `make_checksum_model`. Its `checksum_engine.json` sets
computing times and the folder of holds: while a file `prefill` or `transfer` is in that folder, P waits before the last
of several chunks of a prompt, or before each write to D (not by Mooncake). A held thread behaves like one in a long
forward pass, or on a slow network, so a test knows the state of a request.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from support.faults import with_faults

from chitu.assets import TINY_MODEL_DIR
from chitu.config.schema import PDDisaggregationConfig, Topology
from chitu.config.topology import Instance
from chitu.fake.checksum import Pace
from chitu.kv_transfer.transports import local
from chitu.kv_transfer.transports.shm import ShmTransport
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle, Transport, WriteError
from chitu.launch.plan import Entries
from chitu.net.threads import end_process
from chitu.process.progress import ProgressWriter
from chitu.serve.factories import Factories
from chitu.serve.fake_scheduler import FakeRank, build_fake_rank
from chitu.serve.scheduler import main

if TYPE_CHECKING:
    from chitu.engine.rank_groups import RankGroup

ENTRIES = Entries(scheduler="support.checksum_scheduler", torchrun=False)
"""Entries of the checksum engine for `LocalCluster`."""
CONFIG_FILE = "checksum_engine.json"
MODEL_HASH = "checksum"
"""Not that of a fake: these instances stand for real ones."""
HOLD_POLL_S = 0.005


class EngineConfig(msgspec.Struct, frozen=True):
    """Contents of `CONFIG_FILE` in the model folder."""

    step_s: float = 0.0
    prompt_token_s: float = 0.0
    holds: str = ""
    """Folder of the holds; empty: none."""
    has_state: bool = False
    """Whether the model has a recurrent state, on which its tokens depend, too."""


def make_checksum_model(folder: Path, config: EngineConfig) -> Path:
    """Make a model folder without weights: the tokenizer of the embedded model, and `config`."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in TINY_MODEL_DIR.iterdir():
        if path.suffix == ".json" and "index" not in path.name:
            shutil.copyfile(path, folder / path.name)
    (folder / CONFIG_FILE).write_bytes(msgspec.json.encode(config))
    return folder


def read_engine_config(folder: Path) -> EngineConfig:
    return msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=EngineConfig)


def build_checksum_rank(topology: Topology, instance: Instance, tp_rank: int, progress: ProgressWriter) -> FakeRank:
    """Build one rank, which stands for that of a model, and whose pool has `num_pages` (unset: 1024) pages."""
    assert tp_rank == 0
    config = read_engine_config(Path(topology.model.path))
    lease_s = topology.dp_config.router.pd_disaggregation.deadlines.lease_s
    return build_fake_rank(
        topology,
        instance,
        progress,
        model_hash=MODEL_HASH,
        has_state=config.has_state,
        pace=Pace(config.step_s, config.prompt_token_s),
        hold=hold_in(config.holds),
        members=_members(instance, lease_s),
    )


def _members(instance: Instance, lease_s: float) -> RankGroup | None:
    """Return the group's members, which meet as those of a real engine do."""
    if instance.config.dp_size == 1:
        return None
    import torch

    from chitu.engine.rank_groups import Meeting, groups_of_rank
    from chitu.engine.rendezvous import Claim

    config, meeting = instance.config, None
    if len(config.hosts) > 1:
        claim = Claim(f"{instance.name} on {config.host}", {"the model": instance.config.rack})
        meeting = Meeting(config.hosts, config.rendezvous_port, claim, lease_s)
    return groups_of_rank(config.dp_size, 1, instance.data_rank, 0, torch.device("cpu"), meeting=meeting).members


def hold_in(folder: str) -> Callable[[str], None]:
    """Return a `hold(what)` that waits until no file `what` is in the folder."""
    pause = threading.Event()

    def hold(what: str) -> None:
        while folder and Path(folder, what).exists():
            pause.wait(HOLD_POLL_S)

    return hold


class HeldShmTransport(ShmTransport):
    """Transport that waits before each write while the hold `transfer` exists. Raises WriteError after the timeout."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._hold = Path(folder, "transfer") if folder else None

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        pause = threading.Event()
        while self._hold is not None and self._hold.exists():
            if time.monotonic() > end_s:
                raise WriteError(f"held for {timeout_s:g} s", fenced=True)
            pause.wait(HOLD_POLL_S)
        super().write(peer, copies, max(0.0, end_s - time.monotonic()))


def _main() -> int:
    holds = ""

    def build(topology: Topology, instance: Instance, tp_rank: int, progress: ProgressWriter) -> FakeRank:
        nonlocal holds
        holds = read_engine_config(Path(topology.model.path)).holds
        return build_checksum_rank(topology, instance, tp_rank, progress)

    def open_transports(config: PDDisaggregationConfig, host: str, device: str) -> list[Transport]:
        if config.transport == "mooncake":
            return with_faults(local.open_transports(config, host, device))
        return with_faults([HeldShmTransport(holds)])

    return main(factories=Factories(build, open_transports))


if __name__ == "__main__":
    end_process(_main())
