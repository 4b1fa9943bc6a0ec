"""Devices: what a node has, who gets which, and what a thread sees."""

from __future__ import annotations

import itertools
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import chitu
from chitu.config.devices import on_visible_devices, with_step_sizes
from chitu.config.load import dump_topology, load_topology
from chitu.config.schema import Topology
from chitu.config.topology import find_instance, instances, instances_on
from chitu.errors import ConfigError
from chitu.launch.plan import Entries, host_overrides, plan
from chitu.net.threads import JobThread, ServiceThread
from chitu.process.node_devices import (
    Device,
    NodeDevices,
    choose,
    look,
    parse_mig,
    parse_proc,
    parse_smi,
    parse_torch_version,
    split_indices,
    with_torch,
)
from chitu.process.placement import (
    SHOWN,
    DeviceAssignment,
    assign_devices,
    describe,
    environment_of,
    place,
    with_shares,
)
from chitu.types import Role

# ----------------------------------------------------------------------------------------------------------------------
# Which GPUs of a machine are ours: what nvidia-smi, /proc, CUDA_VISIBLE_DEVICES and Slurm report and mean.


SMI = """\
0, GPU-aaaa1111-0000-0000-0000-000000000000, NVIDIA H200, 143771, Disabled
1, GPU-aaaa2222-0000-0000-0000-000000000000, NVIDIA H200, 143771, Enabled
2, GPU-bbbb3333-0000-0000-0000-000000000000, NVIDIA GB200, Grace, [N/A], [N/A]
3, GPU-cccc4444-0000-0000-0000-000000000000, NVIDIA L4, [N/A], [N/A]
"""
LIST = """\
GPU 0: NVIDIA H200 (UUID: GPU-aaaa1111-0000-0000-0000-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-aaaa2222-0000-0000-0000-000000000000)
  MIG 3g.71gb     Device  0: (UUID: MIG-11111111-0000-5555-0000-000000000000)
  MIG 1c.3g.71gb  Device  1: (UUID: MIG-GPU-aaaa2222-0000-0000-0000-000000000000/2/0)
GPU 3: NVIDIA L4 (UUID: GPU-cccc4444-0000-0000-0000-000000000000)
"""
FOUR = tuple(Device(str(k), f"GPU-{k}{k}{k}{k}-ab", "NVIDIA H200", 139 << 30) for k in range(4))
HOW = "nvidia-smi lists 4"


def tokens(found: NodeDevices) -> list[str]:
    return [device.token for device in found.devices]


def test_cards_are_read_with_their_memory_where_it_is_told() -> None:
    cards, cut = parse_smi(SMI)
    assert [(card.token, card.name, card.memory_bytes) for card in cards] == [
        ("0", "NVIDIA H200", 143771 << 20),
        ("1", "NVIDIA H200", 143771 << 20),
        ("3", "NVIDIA L4", None),
    ], "a line that has other columns is no card"
    assert cut == {"GPU-aaaa2222-0000-0000-0000-000000000000"}
    assert parse_smi("No devices were found\n") == ((), frozenset())


def test_the_parts_of_a_card_stand_in_its_place() -> None:
    parts = parse_mig(LIST, *parse_smi(SMI))
    assert [(part.token, part.is_mig) for part in parts] == [
        ("0", False),
        ("MIG-11111111-0000-5555-0000-000000000000", True),
        ("MIG-GPU-aaaa2222-0000-0000-0000-000000000000/2/0", True),
        ("3", False),
    ]
    assert parts[1].name == "MIG 3g.71gb"
    whole = parse_mig(LIST.replace("MIG", "???"), *parse_smi(SMI))
    assert [part.token for part in whole] == ["0", "3"], "a card in MIG mode without parts cannot be used"


def test_without_nvidia_smi_the_kernel_module_knows_the_cards() -> None:
    text = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 35\nGPU UUID: \t GPU-1-2\nVideo BIOS: \t 96\nDevice Minor: \t 0\n"
    unread = "Model: \t\t Unknown\nGPU UUID: \t GPU-????????-????\n"
    assert parse_proc([text, unread]) == (
        Device("0", "GPU-1-2", "NVIDIA H200"),
        Device("1", "", "Unknown"),
    )


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0,1", ["0", "1"]),
        ("3, 1", ["3", "1"]),
        ("GPU-2222-ab", ["GPU-2222-ab"]),
        ("GPU-33,GPU-00", ["GPU-33", "GPU-00"]),
        ("", []),
        ("-1", []),
        ("-1,2", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_chooses(visible: str, expected: list[str]) -> None:
    found = choose(FOUR, HOW, {"CUDA_VISIBLE_DEVICES": visible, "SLURM_JOB_GPUS": "2"})
    assert (tokens(found), found.problem) == (expected, "")
    assert found.num_hidden == 4 - len(expected)
    assert found.is_given == bool(expected)
    assert all(device.memory_bytes == 139 << 30 for device in found.devices)


@pytest.mark.parametrize(
    ("visible", "words"),
    [
        ("0,7", "'7' of CUDA_VISIBLE_DEVICES=0,7 names no GPU of this machine (0, 1, 2, 3)"),
        ("0,x", "'x' of CUDA_VISIBLE_DEVICES=0,x names no GPU"),
        ("GPU-", "'GPU-' of CUDA_VISIBLE_DEVICES=GPU- names 4 GPUs"),
        ("1,1", "CUDA_VISIBLE_DEVICES=1,1 names 1 twice"),
    ],
)
def test_a_choice_that_cuda_would_cut_short_is_a_problem(visible: str, words: str) -> None:
    found = choose(FOUR, HOW, {"CUDA_VISIBLE_DEVICES": visible})
    assert words in found.problem
    assert (tokens(found), found.is_given) == ([], True)


def test_gpus_that_were_given_but_are_not_there_are_a_problem() -> None:
    found = choose((), "there is no NVIDIA driver here", {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert "CUDA_VISIBLE_DEVICES=0,1 gives GPUs, but there is no NVIDIA driver here" in found.problem


@pytest.mark.parametrize(
    ("environment", "expected", "is_given"),
    [
        ({}, ["0", "1", "2", "3"], False),
        ({"SLURM_JOB_ID": "7"}, ["0", "1", "2", "3"], False),
        ({"SLURM_JOB_GPUS": "1,3"}, ["1", "3"], True),
        ({"SLURM_JOB_GPUS": "1-3", "SLURM_STEP_GPUS": "2"}, ["2"], True),
        ({"SLURM_JOB_GPUS": "4-7"}, ["0", "1", "2", "3"], True),
        ({"SLURM_GPUS_ON_NODE": "4"}, ["0", "1", "2", "3"], True),
        ({"SLURM_GPUS_ON_NODE": "0"}, ["0", "1", "2", "3"], False),
    ],
)
def test_without_cuda_visible_devices_slurm_says_which(
    environment: dict[str, str], expected: list[str], is_given: bool
) -> None:
    found = choose(FOUR, HOW, environment)
    assert (tokens(found), found.is_given, found.problem) == (expected, is_given, "")


def test_slurm_that_gave_some_and_does_not_say_which_is_a_problem() -> None:
    assert "Slurm gave 2 of 4 GPUs" in choose(FOUR, HOW, {"SLURM_GPUS_ON_NODE": "2"}).problem


def test_a_job_without_gpus_is_told_how_to_ask_for_some() -> None:
    assert "--gpus-per-node" in choose((), "nvidia-smi lists no GPU", {"SLURM_JOB_ID": "7"}).source


def test_indices_of_slurm_may_be_ranges() -> None:
    assert split_indices("0,2-4,7") == ["0", "2", "3", "4", "7"]


def test_a_torch_without_cuda_cannot_use_what_is_there() -> None:
    version = "from typing import Optional\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip = None\n"
    assert parse_torch_version(version) == ("2.13.0+cpu", None)
    version = "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n"
    assert parse_torch_version(version) == ("2.11.0+cu130", "13.0")
    found = choose(FOUR, HOW, {})
    assert with_torch(found, "2.11.0+cu130", "13.0") == found
    without = with_torch(found, "2.13.0+cpu", None)
    assert "4 GPUs (NVIDIA H200) cannot be used because torch 2.13.0+cpu is built without CUDA" in without.problem
    assert without.devices == found.devices


@pytest.mark.parametrize(
    ("script", "expected", "words"),
    [
        (f"cat <<'END'\n{SMI}END", ["0", "3"], ""),
        ("echo No devices were found; exit 6", [], ""),
        ("echo NVIDIA-SMI has failed; exit 9", [], "nvidia-smi ends with 9 (NVIDIA-SMI has failed)"),
    ],
)
def test_a_machine_is_looked_at_by_its_driver_s_tool(
    script: str, expected: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    listed = LIST.replace("MIG", "???")
    tool.write_text(f"#!/bin/bash\nif [ \"$1\" = -L ]; then cat <<'END'\n{listed}END\nexit; fi\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith(("CUDA_VISIBLE", "SLURM_"))]:
        monkeypatch.delenv(name)
    found = look()
    assert tokens(found) == expected
    assert words in found.problem
    assert bool(words) == bool(found.problem) or expected, "of a torch without CUDA there is another word"


# ----------------------------------------------------------------------------------------------------------------------
# `devices: auto`: which instance gets which GPUs of a node, what its processes see, and what is refused at once.


A, B = "10.0.0.1", "10.0.0.2"
NONE = NodeDevices((), "there is no NVIDIA driver here")
BROKEN = with_torch(NodeDevices((Device("0"), Device("1")), "nvidia-smi lists 2"), "2.13.0+cpu", None)


def node(count: int, is_given: bool = True, first: int = 0) -> NodeDevices:
    return NodeDevices(tuple(Device(str(first + k), name="NVIDIA H200") for k in range(count)), "fake", is_given)


def two_nodes(*overrides: str) -> Topology:
    """Return a 2P3D topology on two nodes, with two ranks an instance."""
    name = "pd_disagg_2p3d_gpu"
    return load_topology(name, [*host_overrides(load_topology(name), [A, B]), *overrides])


def pair(*overrides: str) -> Topology:
    return load_topology(None, list(overrides))


def shares(topology: Topology, found: NodeDevices, host: str = "127.0.0.1") -> DeviceAssignment:
    return assign_devices(topology, instances_on(topology, host), found)


def by_name(topology: Topology, found: DeviceAssignment) -> dict[str, str]:
    return {item.name: ",".join(found.devices.get(item.key, ("?",))) for item in instances(topology)}


def test_two_gpus_a_rank_pair_in_the_order_of_the_topology() -> None:
    topology = two_nodes()
    elsewhere = "cuda:other,cuda:other"
    of_a = shares(topology, node(8), A)
    assert by_name(topology, of_a) == {
        **dict.fromkeys(("P0", "P1"), elsewhere),
        **{"D0": "cuda:0,cuda:1", "D1": "cuda:2,cuda:3", "D2": "cuda:4,cuda:5"},
    }
    assert of_a.notes == ("2 GPUs of 8 stay idle (6,7)",)
    of_b = shares(topology, node(4), B)
    assert by_name(topology, of_b) == {
        **{"P0": "cuda:0,cuda:1", "P1": "cuda:2,cuda:3"},
        **dict.fromkeys(("D0", "D1", "D2"), elsewhere),
    }
    assert of_b.notes == ()
    for found in (of_a, of_b):  # as the node's processes read it
        overrides = [f"{key}.devices=[{','.join(names)}]" for key, names in found.devices.items()]
        assert two_nodes(*overrides) == with_step_sizes(with_shares(topology, found), ())


def test_every_process_is_shown_its_own_gpus_and_no_others() -> None:
    topology = with_shares(two := two_nodes(), shares(two, node(6, first=2), A))
    specs = plan(topology, "F.yaml", [], 8, Entries(), node(6, first=2))
    seen = {
        spec.name: {key: spec.env[key] for key in (SHOWN, "CUDA_VISIBLE_DEVICES") if key in spec.env} for spec in specs
    }
    assert seen == {
        **{"router": {}, "P0": {}, "P1": {}},
        "D0": {SHOWN: "cuda:0,cuda:1", "CUDA_VISIBLE_DEVICES": "2,3"},
        "D1": {SHOWN: "cuda:2,cuda:3", "CUDA_VISIBLE_DEVICES": "4,5"},
        "D2": {SHOWN: "cuda:4,cuda:5", "CUDA_VISIBLE_DEVICES": "6,7"},
    }
    assert describe(instances_on(topology, A), node(6, first=2)) == "D0 on GPU 2,3; D1 on GPU 4,5; D2 on GPU 6,7"
    config = find_instance(topology, Role.DECODE, 1).config
    assert on_visible_devices(config, ("cuda:2", "cuda:3")).devices == ("cuda:0", "cuda:1"), "there they count from 0"
    assert on_visible_devices(config, ()) == config, "without a launcher a process sees all"


def test_who_counts_the_gpus_numbers_them() -> None:
    (instance, *_) = instances(pair("dp_config.router.prefill_schedulers.0.devices=[cuda:1]"))
    assert environment_of(instance, node(2)) == {"CUDA_VISIBLE_DEVICES": "1", SHOWN: "cuda:1"}
    assert environment_of(instance, node(2, is_given=False))["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment_of(instance, node(1)) == {}, "a plan for another machine"


def test_what_was_decided_makes_the_step_sizes_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for found, tokens in ((node(2), 8192), (NONE, 2048)):
        monkeypatch.setattr("chitu.process.placement.look", lambda found=found: found)
        placement = place(None, [], instances)
        assert placement.topology.scheduler.max_batched_tokens == tokens
        file = tmp_path / "topology.yaml"
        file.write_text(dump_topology(placement.topology))
        assert load_topology(str(file)) == placement.topology, "for every process the same"


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (5, "this node has 5 GPUs (fake), but D0, D1, D2 need 6 (tp_size 2)"),
        (1, "this node has 1 GPU (fake), but D0, D1, D2 need 6 (tp_size 2)"),
    ],
)
def test_too_few_gpus_are_refused(count: int, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        shares(two_nodes(), node(count), A)
    assert words in refused.value.message


def test_to_share_one_gpu_must_be_said_and_the_refusal_says_how() -> None:
    with pytest.raises(ConfigError) as refused:
        shares(pair(), node(1))
    words = refused.value.message.partition("say so: ")[2].split()
    assert words == [f"dp_config.router.{role}_schedulers.0.devices=[cuda:0]" for role in ("prefill", "decode")]
    said = pair(*words)
    assert shares(said, node(1)) == DeviceAssignment({}, ("P0 and D0 share cuda:0",))
    topology = with_shares(said, shares(said, node(1)))
    assert {environment_of(item, node(1))["CUDA_VISIBLE_DEVICES"] for item in instances(topology)} == {"0"}


def test_named_gpus_are_not_given_to_others() -> None:
    topology = pair("dp_config.router.decode_schedulers.0.devices=[cuda]")
    assert by_name(topology, shares(topology, node(2)))["P0"] == "cuda:1"
    with pytest.raises(ConfigError, match=r"this node has 1 GPU \(fake\), of which 0 are free, but P0 need 1"):
        shares(topology, node(1))
    with pytest.raises(ConfigError, match=r"decode_schedulers\.0\.devices names cuda:3, but this node has 2"):
        shares(pair("dp_config.router.decode_schedulers.0.devices=[cuda:3]"), node(2))


def test_a_node_without_gpus_serves_on_cpus_and_says_so() -> None:
    topology = two_nodes()
    found = shares(topology, NONE, A)
    assert set(by_name(topology, found).values()) == {"cpu,cpu"}
    assert found.notes == ("D0, D1, D2 on CPUs, in float32: this node has no GPU (there is no NVIDIA driver here)",)
    (note,) = shares(two_nodes("model.dtype=bfloat16"), NONE, A).notes
    assert note.startswith("D0, D1, D2 on CPUs, in bfloat16: ")


def test_gpus_that_torch_cannot_use_are_told_and_refused_where_somebody_gave_them() -> None:
    topology = pair()
    found = shares(topology, BROKEN)
    assert set(by_name(topology, found).values()) == {"cpu"}
    assert "torch 2.13.0+cpu is built without CUDA" in found.notes[0]
    given = NodeDevices(BROKEN.devices, "fake", True, BROKEN.problem)
    for wanted, state in ((topology, given), (pair("dp_config.router.prefill_schedulers.0.devices=[cuda:0]"), BROKEN)):
        with pytest.raises(ConfigError, match="is built without CUDA"):
            shares(wanted, state)


@pytest.mark.parametrize("devices", ["cpu", "cuda:0"])
def test_p_and_d_follow_those_that_name_their_devices(devices: str) -> None:
    topology = pair(f"dp_config.router.decode_schedulers.0.devices=[{devices}]")
    assert by_name(topology, shares(topology, node(2)))["P0"] == ("cpu" if devices == "cpu" else "cuda:1")
    if devices != "cpu":
        remote = two_nodes("dp_config.router.decode_schedulers.0.devices=[cuda:0,cuda:1]")
        with pytest.raises(ConfigError, match="P0, P1: other P and D have GPUs, but this node has no GPU"):
            shares(remote, NONE, B)


def test_parts_of_a_gpu_are_for_one_rank_each() -> None:
    parts = NodeDevices(tuple(Device(f"MIG-{k}", is_mig=True) for k in range(2)), "fake")
    topology = pair()
    alone = with_shares(topology, shares(topology, parts))
    assert [environment_of(item, parts)["CUDA_VISIBLE_DEVICES"] for item in instances(alone)] == ["MIG-0", "MIG-1"]
    with pytest.raises(ConfigError, match="MIG parts of a GPU"):
        shares(load_topology("unified_local", ["dp_config.router.unified_schedulers.0.tp_size=2"]), parts)


def test_a_process_without_a_launcher_takes_the_first_gpus_that_it_sees() -> None:
    topology = two_nodes()
    second = find_instance(topology, Role.DECODE, 1)
    found = assign_devices(topology, [second], node(2))
    assert found.devices[second.key] == ("cuda:0", "cuda:1")
    others = set(itertools.chain(*(found.devices[item.key] for item in instances(topology) if item != second)))
    assert others == {"cuda:other"}, "on cards that it does not see"


# ----------------------------------------------------------------------------------------------------------------------
# The GPU of a process's threads: a thread works on the device of the thread that made it, and on no other.


class FakeCuda:
    """A fake of CUDA: each thread begins on device 0."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.is_used = True
        self.chosen: dict[str, int] = {}
        """Device of each thread, by its name."""

    def is_initialized(self) -> bool:
        return self.is_used

    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    def set_device(self, device: int) -> None:
        self._local.device = device
        self.chosen[threading.current_thread().name] = device


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake))
    return fake


def test_a_thread_works_on_the_device_of_the_thread_that_made_it(cuda: FakeCuda) -> None:
    cuda.set_device(3)
    seen: list[int] = []
    outer = ServiceThread("outer", lambda: _run(ServiceThread("inner", lambda: seen.append(cuda.current_device()))))
    _run(outer)
    assert seen == [3]
    assert cuda.chosen == {threading.current_thread().name: 3, "outer": 3, "inner": 3}


def test_jobs_run_on_the_device_of_their_maker(cuda: FakeCuda) -> None:
    cuda.set_device(1)
    jobs = JobThread[int]("verify", lambda _job: None)
    jobs.start(ServiceThread)
    jobs.close()
    assert cuda.chosen["verify"] == 1


def test_a_process_without_a_gpu_is_not_asked_for_one(cuda: FakeCuda) -> None:
    cuda.is_used = False
    _run(ServiceThread("plain", lambda: None))
    assert not cuda.chosen


def test_no_thread_that_may_touch_a_device_is_made_in_another_way() -> None:
    """A stream is entered only together with its device: leaving it would otherwise select another device."""
    root = Path(chitu.__file__).parent
    instance = [
        path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in ("tools", "process", "launch")
    ]
    made = [path for path in instance if re.search(r"threading\.Thread\(|ThreadPoolExecutor\(", path.read_text())]
    # threads that only read files or compile grammars, and the lane of prompts, which is refused on GPUs
    allowed = {"models/config.py", "grammars/store.py", "engine/lanes.py"}
    assert {str(path.relative_to(root)) for path in made} <= allowed | {"net/threads.py"}
    entered = [path for path in instance if "torch.cuda.stream(" in path.read_text()]
    assert [str(path.relative_to(root)) for path in entered] == ["ops/cuda_device.py"]


def _run(thread: threading.Thread) -> None:
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
