"""Which GPUs of a machine are ours: what nvidia-smi, /proc, CUDA_VISIBLE_DEVICES and Slurm report and mean."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
