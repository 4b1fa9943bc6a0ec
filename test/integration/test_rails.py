"""Two network devices between two hosts: UCX divides each write of NIXL between them, or takes one, as its variables
say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from network import require_network
from transport_process import LAYOUT, NUM_PAGES

from chitu.process.descendants import die_with_parent

pytest.importorskip("nixl_cu13")
DEVICES = ("r0", "r1")
BYTES = NUM_PAGES * sum(LAYOUT.bytes_by_layer)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[int]]:
    """Yield a process of each host. UCX looks for its devices in /sys, so each has its own."""
    require_network()
    command = [
        "unshare",
        "--net",
        "--mount",
        "sh",
        "-c",
        "mount -t sysfs none /sys && ip link set lo up && echo up && exec sleep infinity",
    ]
    keepers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: die_with_parent(os.getppid()))
        for _ in range(2)
    ]
    pids = [keeper.pid for keeper in keepers]
    try:
        assert all(keeper.stdout is not None and keeper.stdout.readline() == "up\n" for keeper in keepers)
        for rail, device in enumerate(DEVICES):
            run(pids[0], "ip", "link", "add", device, "type", "veth", "peer", "name", device, "netns", str(pids[1]))
            for number, pid in enumerate(pids, 1):
                run(pid, "ip", "addr", "add", f"10.8{rail}.0.{number}/24", "dev", device)
                run(pid, "ip", "link", "set", device, "up")
        yield pids
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.communicate()


def inside(pid: int, *command: str) -> list[str]:
    return ["nsenter", f"--target={pid}", "--net", "--mount", f"--wd={Path.cwd()}", *command]


def run(pid: int, *command: str) -> str:
    return subprocess.run(inside(pid, *command), capture_output=True, text=True, check=True).stdout


def sent_bytes(pid: int, device: str) -> int:
    return int(run(pid, "cat", f"/sys/class/net/{device}/statistics/tx_bytes"))


@pytest.mark.parametrize("rails", [pytest.param(1, marks=pytest.mark.by_hand), 2])
def test_a_write_goes_over_as_many_devices_as_it_may(hosts: list[int], rails: int) -> None:
    env = os.environ | {
        "UCX_NET_DEVICES": ",".join(DEVICES),
        "UCX_MAX_RMA_RAILS": str(rails),
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(Path(__file__).parent), str(Path(__file__).parents[1])]),
    }
    before = [sent_bytes(hosts[1], device) for device in DEVICES]
    words = [sys.executable, "-m", "transport_process"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    with subprocess.Popen(inside(hosts[0], *words, "receive", "nixl", "10.80.0.1"), **pipes) as receiver:
        memory = receiver.stdout.readline()
        send = inside(hosts[1], *words, "send", "nixl", "10.80.0.2", str(NUM_PAGES))
        done = subprocess.run(send, input=memory, capture_output=True, text=True, env=env, timeout=120, check=False)
        receiver.stdin.close()
    assert (done.returncode, done.stdout) == (0, "sent\n"), done.stderr
    sent = [sent_bytes(hosts[1], device) - start for device, start in zip(DEVICES, before, strict=True)]
    assert sum(sent) > BYTES
    assert min(sent) > BYTES / 4 if rails == 2 else min(sent) < BYTES / 100, sent
