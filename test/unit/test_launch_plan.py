"""From a topology to processes."""

from __future__ import annotations

from pathlib import Path

from chitu.config.load import load_topology
from chitu.config.topology import router_ports, with_router_ports
from chitu.launch.plan import Entries, plan
from chitu.process.progress import Progress, ProgressWriter, read_progress, write_progress

DEADLINES = "dp_config.router.pd_disaggregation.deadlines"


def test_the_router_is_a_plain_process_and_an_instance_is_one_torchrun() -> None:
    topology = load_topology("pd_disagg_2p3d_multi_node")
    specs = plan(topology, "F.yaml", ["scheduler.chunk_size=64"], cores=12, entries=Entries(python="python3"))
    assert [spec.name for spec in specs] == ["router", "P0", "P1", "D0", "D1", "D2"]
    assert specs[0].argv == ("python3", "-m", "chitu.serve.api_server", "--config", "F.yaml", "scheduler.chunk_size=64")
    decode_1 = specs[4]
    assert decode_1.host == "node-a.example"
    assert decode_1.argv == (
        *("python3", "-m", "torch.distributed.run", "--local-addr=127.0.0.1"),
        *("--rdzv-backend=c10d", "--rdzv-conf=store_type=file"),
        *("--nproc-per-node=1", "--max-restarts=0"),
        *("-m", "chitu.serve.scheduler", "--config", "F.yaml", "--role", "decode", "--rank", "1"),
        "scheduler.chunk_size=64",
    )
    assert decode_1.env["PD_MASTER_ADDR"] == "node-a.example"
    assert decode_1.env["OMP_NUM_THREADS"] == "4"


def test_torchrun_leaves_its_ranks_the_time_to_drain() -> None:
    topology = load_topology(None, [f"{DEADLINES}.drain_s=60.5", f"{DEADLINES}.drain_delay_s=20"])
    decode = plan(topology, "F.yaml", [], cores=4, entries=Entries())[-1]
    assert int(decode.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 81


def test_a_scheduler_without_torch_is_started_by_itself() -> None:
    entries = Entries(scheduler="standin", python="python3", torchrun=False)
    decode = plan(load_topology(None), "F.yaml", [], cores=4, entries=entries)[-1]
    assert decode.argv == ("python3", "-m", "standin", "--config", "F.yaml", "--role", "decode", "--rank", "0")


def test_actual_ports_take_the_place_of_those_of_the_file() -> None:
    ports = {"port": 1001, "stats_port": 1002, "token_port": 1003, "coordination_port": 1004, "bootstrap_port": 1006}
    topology = with_router_ports(load_topology(None), {**ports, "metadata_sync_port": 1005, "other_port": 9})
    assert list(router_ports(topology.dp_config.router).values()) == [1001, 1002, 1003, 1004, 1005, 1006]


def test_the_ports_of_a_router_count_only_when_the_line_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "router.progress"
    ProgressWriter(path).ready(ports={"port": 21003, "stats_port": 4})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert read_progress(path) == Progress("starting")
    path.write_bytes(b"[]\n")
    assert read_progress(path) == Progress("starting")


def test_progress_is_the_last_record_and_takes_no_more_space(tmp_path: Path) -> None:
    path = tmp_path / "P0.progress"
    assert read_progress(path) == Progress("starting")
    writer = ProgressWriter(path)
    writer.ready(7, {"stats_port": 65535, "coordination_port": 65535})
    size = path.stat().st_size
    writer.loading(10, 40)
    assert read_progress(path) == Progress("loading", 10, 40)
    writer.loading(11, 40)  # too soon after the last line to write another
    assert read_progress(path) == Progress("loading", 10, 40)
    writer.loading(40, 40)
    assert read_progress(path) == Progress("loading", 40, 40)
    write_progress(path, Progress())
    assert (read_progress(path), path.stat().st_size) == (Progress("starting"), size)
