"""Loading a checkpoint from a cold folder, from a warm one, and from a running neighbour, in turn.

    python -m benchmark.neighbour [--gib 4] [--rounds 5] [--transport shm] [--joiners 1] [--dtype bfloat16]
                                  [--disk-mb-s 200]

Writes a random Qwen3 checkpoint of 16 bits twice: the copy of the neighbour stays in the page cache, as a host's does
that has loaded it; that of the joiner is taken out of it before each load but the warm ones. Each load is a process of
its own, and so is the neighbour. `--joiners`: so many load at once, each from its own copy; those that have loaded are
asked, too, and say no, as their copies are not in memory. `--disk-mb-s`: what a joiner's disk gives, as a network file
system would (needs root and the block device controller of control groups, version 1 or 2). Prints the seconds of each
load and the medians, and the share of the joiner's file that is in memory before each.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import zmq

from benchmark.loading import LAYER, write
from chitu.config.schema import PDDisaggregationConfig
from chitu.instance.weights_pieces import Neighbour, NeighbourPieces, SessionOpener
from chitu.instance.weights_share import WeightsShare
from chitu.kv_transfer.transports.local import open_transports
from chitu.kv_transfer.transports.transport import Transport
from chitu.models.config import model_hash, weight_files, weights_stamp
from chitu.models.served_folder import ServedFolder
from chitu.net.threads import ServiceThread

HOST = "127.0.0.1"
WAYS = ("cold folder", "warm folder", "neighbour")


def transports(kind: str) -> list[Transport]:
    return open_transports(PDDisaggregationConfig(transport=kind), HOST)  # type: ignore[arg-type]


def serve(folder: str, kind: str) -> WeightsShare:
    """Serve a folder's weights from now on."""
    served = ServedFolder(folder, model_hash(folder), weights_stamp(folder))
    share = WeightsShare(zmq.Context(), HOST, lambda: served, lambda: transports(kind))
    share.start(ServiceThread, lambda: True)
    return share


def load(folder: str, kind: str, dtype: str, ports: Path | None) -> None:
    """Load a folder once told to, print the seconds, and serve it until the input ends. `ports`: a folder with a file
    for each source, named after its port; None: no neighbour is asked."""
    import torch

    from chitu.engine.build import load_model
    from chitu.ops.torch_ops import TorchOps

    torch.set_num_threads(1)
    pieces: NeighbourPieces | None = None
    if ports is not None:

        def find() -> list[Neighbour]:
            found = sorted(ports.iterdir(), key=lambda file: (int(file.name) * os.getpid()) % 97)
            return [Neighbour(file.name, int(file.name), HOST, int(file.name)) for file in found]

        opener = SessionOpener(str(os.getpid()), model_hash(folder), zmq.Context(), lambda: transports(kind))
        pieces = NeighbourPieces(find, opener, compares=False)
    print("ready", flush=True)
    sys.stdin.readline()
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    model = load_model(folder, dtype, max_model_len=1024, ops=TorchOps(), pieces=pieces)
    took_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
    from_folder = pieces.from_folder if pieces is not None else -1
    print(json.dumps({"seconds": took_s, "cpu": cpu_s, "from_folder": from_folder}), flush=True)
    if ports is not None and pieces is not None:
        (ports / str(serve(folder, kind).port)).touch()
        pieces.close()
    sys.stdin.readline()
    del model


def resident(file: Path) -> float:
    """Return the share of a file that is in the page cache."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
        num_pages = -(-len(mapped) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * num_pages)()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        if ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), found):
            return -1.0
        return sum(page & 1 for page in found) / num_pages


def evict(folder: Path) -> None:
    for file in weight_files(folder):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm(folder: Path) -> None:
    for file in weight_files(folder):
        with file.open("rb", buffering=0) as stream:
            while stream.read(16 << 20):
                pass


class SlowDisk:
    """A control group whose processes read the disk of a folder at so many bytes a second."""

    def __init__(self, folder: Path, bytes_per_s: int) -> None:
        status = folder.stat().st_dev
        disk = Path(f"/sys/dev/block/{os.major(status)}:{os.minor(status)}").resolve()
        if (disk / "partition").exists():
            disk = disk.parent
        device = (disk / "dev").read_text().strip()
        base = Path("/sys/fs/cgroup")
        is_first = (base / "blkio").is_dir()
        self._group = base / ("blkio" if is_first else "") / f"chitu-bench-{os.getpid()}"
        if not is_first:
            (base / "cgroup.subtree_control").write_text("+io")
        self._group.mkdir()
        limit = f"{device} {bytes_per_s}" if is_first else f"{device} rbps={bytes_per_s}"
        (self._group / ("blkio.throttle.read_bps_device" if is_first else "io.max")).write_text(limit)

    def add(self, pid: int) -> None:
        (self._group / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove it. Its processes have ended."""
        self._group.rmdir()


class Joiner:
    """A process that loads."""

    def __init__(self, folder: Path, arguments: argparse.Namespace, ports: Path | None, disk: SlowDisk | None) -> None:
        command = [sys.executable, "-m", "benchmark.neighbour", "--load", str(folder), "--dtype", arguments.dtype]
        command += ["--transport", arguments.transport] + (["--ports", str(ports)] if ports is not None else [])
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        if disk is not None:
            disk.add(self._process.pid)

    def run(self) -> dict[str, float]:
        """Load, and return what it took."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        result: dict[str, float] = json.loads(self._process.stdout.readline())
        return result

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(
    way: str, copies: list[Path], ports: Path, arguments: argparse.Namespace, disk: SlowDisk | None
) -> list[float]:
    """Load all copies at once in one way; return the seconds of each."""
    is_neighbour = way == "neighbour"
    before = set(ports.iterdir())
    joiners = [Joiner(copy, arguments, ports if is_neighbour else None, disk) for copy in copies]
    for copy in copies:
        (warm if way == "warm folder" else evict)(copy)
    share = statistics.mean(resident(weight_files(copy)[0]) for copy in copies)
    results: list[dict[str, float]] = []
    threads = [threading.Thread(target=lambda each=each: results.append(each.run())) for each in joiners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for file in set(ports.iterdir()) - before:
        file.unlink()
    for joiner in joiners:
        joiner.end()
    seconds = sorted(result["seconds"] for result in results)
    more = f", {sum(result['from_folder'] for result in results):.0f} bytes from folders" if is_neighbour else ""
    cpu = statistics.mean(result["cpu"] for result in results)
    print(f"  {way}: {share:.0%} in memory; {' '.join(f'{each:.2f}' for each in seconds)} s; {cpu:.2f} s of CPU{more}")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transport", default="shm", choices=["shm", "mooncake", "nixl"])
    parser.add_argument("--joiners", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--disk-mb-s", type=int, help="read the joiners' disk no faster; unset: as fast as it is")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load(arguments.load, arguments.transport, arguments.dtype, arguments.ports)
        return 0
    with tempfile.TemporaryDirectory(dir=os.environ.get("CHITU_BENCH_DIR")) as base:
        source, ports = Path(base, "source"), Path(base, "ports")
        source.mkdir()
        ports.mkdir()
        num_bytes = write(source, max(1, round(arguments.gib * (1 << 30) / 2 / LAYER)), is_fp8=False)
        copies = [Path(base, f"joiner{number}") for number in range(arguments.joiners)]
        for copy in copies:
            shutil.copytree(source, copy)
        print(f"{num_bytes / 2**30:.2f} GiB, {arguments.joiners} at once, over {arguments.transport}")
        warm(source)
        (ports / str(serve(str(source), arguments.transport).port)).touch()
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        disk = SlowDisk(source, arguments.disk_mb_s * 1_000_000) if arguments.disk_mb_s else None
        for _ in range(arguments.rounds):
            for way in WAYS:
                found[way].append(max(measure(way, copies, ports, arguments, disk)))
            warm(source)
        if disk is not None:
            disk.close()
        for way, seconds in found.items():
            print(f"{way}: median {statistics.median(seconds):.2f} s for all, best {min(seconds):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
