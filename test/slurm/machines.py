"""Machines made of namespaces: each has its own network, host name, processes and shared memory; a bridge joins them.

Used by `slurm_cluster.py`. Files are shared, as on a cluster with one home directory. The bridge lives in the first
machine, so the host gets no address and nothing can leave. A machine is the process tree below its PID 1, which ends
with the process that created it. Its namespaces have no names, so nothing is left behind. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.router_process import wait_until

from chitu.process.descendants import die_with_parent

TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "mount": "mount", "ip": "iproute2", "curl": "curl"}
FREEZER = Path("/sys/fs/cgroup/freezer")

INIT = """
set -e
hostname=$1 folder=$2 group=$3
echo "$hostname" > /proc/sys/kernel/hostname
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
resolv=$(readlink -f /etc/resolv.conf)
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/munge /run/slurm "$(dirname "$resolv")"
[ -e "$resolv" ] || touch "$resolv"
mount --bind "$folder/resolv.conf" "$resolv"
mount --bind "$folder/$hostname.hosts" /etc/hosts
mount --bind "$folder/slurm" /etc/slurm
if [ -e /sys/fs/cgroup/freezer/tasks ]; then
    # A freezer subtree of its own, seen as the root: slurmd's groups of two nodes do not mix.
    mkdir -p "$group"
    echo $$ > "$group/cgroup.procs"
    mount --bind "$group" /sys/fs/cgroup/freezer
fi
set +e
touch "$folder/$hostname.up"
while :; do sleep 1000 & wait $!; done    # bash reaps every orphan
"""


def missing() -> list[str]:
    """Return what this machine lacks to create machines; empty if nothing."""
    if os.geteuid() != 0:
        return ["root"]
    absent = [f"{tool} (package {package})" for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if not absent:
        probe = subprocess.run(
            ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "ip", "link", "add", "type", "bridge"],
            capture_output=True,
            text=True,
        )
        if probe.returncode:
            absent.append(f"the right to make namespaces and bridges ({probe.stderr.strip()})")
    return absent


class Machines:
    """`names[0]` has address SUBNET.1 and the bridge; `names[k]` has SUBNET.(9+k)."""

    def __init__(self, folder: Path, names: Sequence[str], subnet: str) -> None:
        self.addresses = {name: f"{subnet}.{9 + k if k else 1}" for k, name in enumerate(names)}
        self._folder = folder
        self._hub = names[0]
        self._unshare: dict[str, subprocess.Popen[bytes]] = {}
        self._init: dict[str, int] = {}
        (folder / "slurm").mkdir(parents=True)
        Path("/etc/slurm").mkdir(exist_ok=True)  # only serves as a mount point
        for own in names:
            # Debian's habit: a machine's own name is 127.0.1.1. The hub's is not, since srun tells it to the others.
            known = {**self.addresses, own: self.addresses[own] if own == self._hub else "127.0.1.1"}
            lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in known.items())]
            (folder / f"{own}.hosts").write_text("\n".join(lines) + "\n")
        (folder / "resolv.conf").write_text("options timeout:1 attempts:1\n")
        (folder / "init.sh").write_text(INIT)

    def up(self) -> None:
        for name in self.addresses:
            self._boot(name)
        for command in (
            "link add br0 type bridge",
            f"addr add {self.addresses[self._hub]}/24 dev br0",
            "link set br0 up",
        ):
            self._ip(self._hub, command)
        for name, address in self.addresses.items():
            self._ip(name, "link set lo up")
            if name != self._hub:
                self._ip(self._hub, f"link add {name} type veth peer name eth0 netns {self._init[name]}")
                self._ip(self._hub, f"link set {name} master br0 up")
                self._ip(name, f"addr add {address}/24 dev eth0")
                self._ip(name, "link set eth0 up")
                self._ip(name, f"route add default via {self.addresses[self._hub]}")

    def down(self) -> None:
        """End every process of every machine. Idempotent."""
        for process in self._unshare.values():
            process.kill()  # --kill-child: its PID 1 follows, and with that everything in the PID namespace
            process.wait()
        groups = [self._group(name) for name in self._unshare]
        wait_until(lambda: all([remove_groups(group) for group in groups]), 10, lambda: f"{groups} have no processes")
        self._unshare.clear()
        self._init.clear()

    def argv(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` in a machine, in the current directory."""
        target = ["nsenter", f"--target={self._init[name]}", "--net", "--uts", "--mount", "--ipc", "--pid"]
        return [*target, f"--wdns={os.getcwd()}", *command]

    def output(self, name: str, command: Sequence[str], timeout_s: float = 30.0) -> str:
        """Return standard output of a command that must succeed."""
        done = subprocess.run(
            self.argv(name, command), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, f"{' '.join(command)} on {name}: exit code {done.returncode}: {done.stderr}"
        return done.stdout

    def processes(self, name: str) -> dict[int, str]:
        """Return command lines by pid (in the machine's own numbering) of every process except PID 1 and its sleep."""
        lines = self.output(name, ["ps", "-e", "-ww", "-o", "pid=,ppid=,stat=,args="]).splitlines()
        found = {}
        for pid, ppid, stat, args in (line.split(None, 3) for line in lines):
            if (
                pid != "1"
                and not (ppid == "1" and args == "sleep 1000")
                and stat[0] != "Z"
                and not args.startswith("ps -e")
            ):
                found[int(pid)] = args
        return found

    def listening(self, name: str) -> list[int]:
        """Return the TCP ports that have a listener."""
        rows = self.output(name, ["ss", "-Hltn"]).splitlines()
        return sorted({int(row.split()[3].rpartition(":")[2]) for row in rows})

    def cut(self, name: str) -> None:
        """Pull the plug: peers see silence, no reset."""
        self._ip(self._hub, f"link set {name} down")

    def mend(self, name: str) -> None:
        self._ip(self._hub, f"link set {name} up")

    def _boot(self, name: str) -> None:
        for left_over in FREEZER.glob(f"{name}-*"):  # left by a killed run; one that still has processes stays
            remove_groups(left_over)
        parent = os.getpid()
        flags = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (self._folder / f"{name}.init.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    "unshare",
                    *flags,
                    "bash",
                    str(self._folder / "init.sh"),
                    name,
                    str(self._folder),
                    str(self._group(name)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),
            )
        self._unshare[name] = process
        up = self._folder / f"{name}.up"
        wait_until(
            lambda: up.exists() or process.poll() is not None, 20, lambda: f"{name} is up: {Path(log.name).read_text()}"
        )
        assert process.poll() is None, f"{name} did not start: {Path(log.name).read_text()}"
        self._init[name] = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])

    def _group(self, name: str) -> Path:
        """Return the machine's control group. Its name has our pid: clusters on one host must not see each other's
        processes."""
        return FREEZER / f"{name}-{os.getpid()}"

    def _ip(self, name: str, command: str) -> None:
        argv = ["nsenter", f"--target={self._init[name]}", "--net", "ip", *command.split()]
        done = subprocess.run(argv, capture_output=True, text=True)
        assert done.returncode == 0, f"ip {command} in {name}: {done.stderr}"


def remove_groups(group: Path) -> bool:
    """Remove an empty tree of control groups; False while processes are in it."""
    if group.is_dir():
        for folder, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
    return not group.exists()
