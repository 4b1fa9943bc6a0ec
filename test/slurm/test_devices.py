"""GPUs that a real Slurm hands out to the launch scripts: which process gets which, what each rank sees, what is
refused.

Driver, torch and torchrun are stand-ins (`fake_gpus/`), so nothing computes; Slurm, scripts and `chitu node` are real.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from slurm_cluster import NODES, SlurmCluster
from support.router_process import wait_until
from test_two_nodes import Launched, cluster, model

from chitu.config.load import load_topology

__all__ = ["cluster", "model"]

FAKES = Path(__file__).parent / "fake_gpus"
SCRIPT = ["bash", "script/srun_pd_disagg_2p3d_two_nodes.sh"]
pytestmark = pytest.mark.timeout(300)


def launch(
    cluster: SlurmCluster, model: str, folder: Path, srun: list[str], has_driver: bool = True, **cards: str
) -> Launched:
    """Run the launch script under srun, on nodes whose driver lists `cards`."""
    driver = [f"PATH={FAKES}:{os.environ['PATH']}"] if has_driver else []
    given = [f"PYTHONPATH={FAKES}", f"FAKE_RANKS={folder}", *(f"{name}={count}" for name, count in cards.items())]
    options = ["--model", model, "--partition", "main", "--cpus-per-gpu", "8", "--log-dir", str(folder / "logs")]
    return Launched(cluster, ["env", *driver, *given, "srun", "-N", "2", *srun, *SCRIPT, *options], folder)


def test_every_rank_is_shown_the_gpus_of_its_instance(cluster: SlurmCluster, model: str, tmp_path: Path) -> None:
    launched = launch(cluster, model, tmp_path, ["--gpus-per-node=8"], GPUS="8")
    try:
        names = {f"{name}.{rank}" for name in ("P0", "P1", "D0", "D1", "D2") for rank in (0, 1)}

        def ranks() -> set[str]:
            return {path.name for path in tmp_path.iterdir()} & names

        wait_until(lambda: ranks() == names or launched.process.poll() is not None, 120, launched.output)
        assert ranks() == names, launched.output()
        found = {name: json.loads((tmp_path / name).read_text()) for name in names}
        pairs = {"D0": "0,1", "D1": "2,3", "D2": "4,5", "P0": "0,1", "P1": "2,3"}
        assert {name: record["CUDA_VISIBLE_DEVICES"] for name, record in found.items()} == {
            name: pairs[name[:2]] for name in names
        }
        assert {name: record["host"] for name, record in found.items()} == {
            name: NODES[0 if name.startswith("D") else 1] for name in names
        }
        assert {record["OMP_NUM_THREADS"] for record in found.values()} == {"8"}
        record = found["D1.0"]
        assert record["CHITU_DEVICES"] == "cuda:2,cuda:3"
        router = load_topology(record["words"][record["words"].index("--config") + 1]).dp_config.router
        assert router.decode_schedulers[1].devices == ("cuda:2", "cuda:3")
        assert router.prefill_schedulers[0].devices == ("cuda:other", "cuda:other")
        text = launched.output()
        assert "node 0 devices: D0 on GPU 0,1; D1 on GPU 2,3; D2 on GPU 4,5" in text
        assert "node 0 devices: 2 GPUs of 8 stay idle (6,7)" in text
        assert "node 1 devices: P0 on GPU 0,1; P1 on GPU 2,3" in text
        assert "node 0 transfers: mooncake over tcp between hosts (this host has no RDMA device" in text
    finally:
        if left := cluster.jobs():
            cluster.output(["scancel", *left])
    launched.process.wait(60)
    launched.wait_nothing_left()


def test_rdma_that_is_not_there_is_refused_before_anything_loads(
    cluster: SlurmCluster, model: str, tmp_path: Path
) -> None:
    protocol = "dp_config.router.pd_disaggregation.mooncake_protocol=rdma"
    command = ["srun", "-N", "2", *SCRIPT, "--model", model, protocol]
    launched = Launched(cluster, command, tmp_path)
    assert launched.process.wait(60) != 0
    assert "mooncake_protocol is rdma, but this host has no RDMA device" in launched.output()
    assert "starting" not in launched.output()
    launched.wait_nothing_left()


@pytest.mark.parametrize(
    ("srun", "has_driver", "cards", "words"),
    [
        (
            ["--gpus-per-node=4"],
            True,
            {"GPUS": "8"},
            "node 0 (198.18.77.10): this node has 4 GPUs (nvidia-smi lists 8; CUDA_VISIBLE_DEVICES=0,1,2,3), but "
            "D0, D1, D2 need 6 (tp_size 2)",
        ),
        pytest.param(
            [],
            True,
            {"GPUS": "8", "GPUS_pd_node1": "3"},
            "node 1 (198.18.77.11): this node has 3 GPUs (nvidia-smi lists 3; this Slurm job asked for none by "
            "itself), but P0, P1 need 4 (tp_size 2)",
            marks=pytest.mark.by_hand,
        ),
        pytest.param(
            ["--gpus-per-node=8"],
            True,
            {"GPUS": "8", "GPUS_pd_node1": "0"},
            "node 1 (198.18.77.11): CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 gives GPUs, but nvidia-smi lists no GPU",
            marks=pytest.mark.by_hand,
        ),
        pytest.param(
            ["--gpus-per-node=8"],
            False,
            {},
            "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 gives GPUs, but there is no NVIDIA driver here",
            marks=pytest.mark.by_hand,
        ),
    ],
    ids=["too-few", "uneven", "one-without", "none-that-were-given"],
)
def test_a_node_that_cannot_serve_its_part_ends_the_job_before_anything_loads(
    srun: list[str],
    has_driver: bool,
    cards: dict[str, str],
    words: str,
    cluster: SlurmCluster,
    model: str,
    tmp_path: Path,
) -> None:
    launched = launch(cluster, model, tmp_path, srun, has_driver, **cards)
    assert launched.process.wait(60) != 0
    assert words in launched.output()
    launched.wait_nothing_left()
