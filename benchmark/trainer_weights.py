"""A change of weights from a trainer on the same host.

    python -m benchmark.trainer_weights [--model smollm2] [--rounds 5]

A 1P1D of CPUs follows one trainer in three ways, in turn: it writes a checkpoint to `/dev/shm`; it publishes tensors of
its own memory; it publishes tensors in shared memory, where it computes. All numbers are others in each round. Medians
of the time of the trainer before the call, of the call until all instances serve, of both, and the bytes in `/dev/shm`
beside the trainer's tensors.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file, save_file

from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.models.config import model_hash
from chitu.net.curve import derive
from chitu.tools.bench.model_argument import MODEL_HELP, model_folder
from chitu.tools.bench.report import DEFAULT_DIR, publish
from chitu.tools.publish import DESCRIPTIONS, Publisher

NOISE = 1e-3
MIB = 1 << 20


def train(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor += NOISE * torch.randn(tensor.shape).to(tensor.dtype)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=model_folder, default="smollm2", help=MODEL_HELP)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-dir", type=Path, default=DEFAULT_DIR)
    args = parser.parse_args()
    own: dict[str, torch.Tensor] = {}
    for file in sorted(args.model.glob("*.safetensors")):
        own |= load_file(file)
    settings = [f"model.path={args.model}", "cache.num_pages=64", "model.max_model_len=512"]
    topology = load_topology("pd_disagg_1p1d_local", settings)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, LocalCluster(topology) as cluster:
        cluster.wait_ready()
        secrets = derive(cluster_key_of(cluster.topology))
        headers = {"Authorization": f"Bearer {secrets.token}"} if secrets is not None else {}
        url = f"{cluster.url}/admin/weights"
        ways = _ways(Path(memory), args.model, own)
        before_s: dict[str, list[float]] = {name: [] for name in ways}
        call_s: dict[str, list[float]] = {name: [] for name in ways}
        beside: dict[str, int] = {}
        for number in range(args.rounds + 1):
            for name, (tensors, offer, folder) in ways.items():
                train(tensors)
                begin_s = time.perf_counter()
                offer()
                offered_s = time.perf_counter()
                reply = httpx.post(url, json={"path": str(folder)}, headers=headers, trust_env=False, timeout=600)
                done_s = time.perf_counter()
                if reply.status_code != 200 or reply.json()["model_hash"] != model_hash(folder):
                    raise SystemExit(f"{name}: {reply.text}")
                own_bytes = sum(tensor.nbytes for tensor in tensors.values()) if tensors is not own else 0
                beside[name] = size_of(folder) - own_bytes
                if number:  # the first round is the warm-up
                    before_s[name].append(offered_s - begin_s)
                    call_s[name].append(done_s - offered_s)
    rows = [
        (
            name,
            f"{statistics.median(before_s[name]):.2f}",
            f"{statistics.median(call_s[name]):.2f}",
            f"{statistics.median(map(sum, zip(before_s[name], call_s[name], strict=True))):.2f}",
            f"{beside[name] / MIB:.0f}",
        )
        for name in ways
    ]
    publish("trainer_weights", ("way", "trainer, s", "call, s", "both, s", "more memory, MiB"), rows, args.output_dir)


Way = tuple[dict[str, torch.Tensor], Callable[[], object], Path]


def _ways(memory: Path, model: Path, own: dict[str, torch.Tensor]) -> dict[str, Way]:
    """Return the trainer's tensors, what it does with them, and the folder for the call."""
    files = memory / "files"
    files.mkdir()
    for name in DESCRIPTIONS:
        if (model / name).is_file():
            shutil.copyfile(model / name, files / name)
    copying, sharing = (Publisher(memory / name, like=model) for name in ("copied", "shared"))
    shared = sharing.allocate(own)
    for name, tensor in own.items():
        shared[name].copy_(tensor)
    return {
        "a checkpoint in /dev/shm": (own, lambda: save_file(own, files / "model.safetensors"), files),
        "tensors, copied": (own, lambda: copying.publish(own), memory / "copied"),
        "tensors in shared memory": (shared, lambda: sharing.publish(shared), memory / "shared"),
    }


if __name__ == "__main__":
    main()
