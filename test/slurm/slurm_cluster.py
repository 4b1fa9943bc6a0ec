"""A real Slurm of two nodes on this machine: `pd-login` (slurmctld, where srun runs), `pd-node0`, `pd-node1` (slurmd).

Used by the tests of this folder; `missing()` says why it cannot run here. Daemons, munge's key and all state live in a
folder of their own and in the machines' namespaces (`machines.py`). It does not touch the host's Slurm.

    with SlurmCluster(folder) as cluster:
        cluster.output(["srun", "-N2", "hostname"])
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import machines
from machines import FREEZER, Machines
from support.router_process import wait_until

LOGIN = "pd-login"
NODES = ("pd-node0", "pd-node1")
SUBNET = "198.18.77"
"""Subnet from the block for tests of network equipment (RFC 2544); it exists inside the namespaces only."""
NUM_GPUS = 8
"""GPUs per node in Slurm's configuration; Slurm hands out their numbers. They are copies of /dev/null without a
driver."""
PACKAGES = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge", "ss": "iproute2"}

SLURM_CONF = """
ClusterName=pd
SlurmctldHost={login}({subnet}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
# Short, and on the machine's own tmpfs: a socket in it must not be longer than 108 characters.
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
# Believe the CPUs written below rather than the real machine's.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdTimeout=30
KillWait=8
MessageTimeout=10
ReturnToService=2
SchedulerParameters=batch_sched_delay=1,sched_interval=5
GresTypes=gpu
NodeName=pd-node[0-1] CPUs=16 RealMemory=1024 Gres=gpu:{num_gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP
"""


def missing() -> list[str]:
    """Return what Slurm needs and this machine lacks; empty if it can start."""
    absent = [f"{tool} (package {package})" for tool, package in PACKAGES.items() if shutil.which(tool) is None]
    return absent + machines.missing()


class SlurmCluster:
    """A two-node Slurm cluster; see the module's docstring."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.machines = Machines(folder, [LOGIN, *NODES], SUBNET)
        # With control groups Slurm tracks every process of a job; with parent links (version 2 only) it loses orphans.
        proctrack = "cgroup" if (FREEZER / "tasks").exists() else "linuxproc"
        conf = SLURM_CONF.format(login=LOGIN, subnet=SUBNET, folder=folder, proctrack=proctrack, num_gpus=NUM_GPUS)
        for k in range(NUM_GPUS):
            os.mknod(folder / f"gpu{k}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        (folder / "slurm" / "gres.conf").write_text(
            f"AutoDetect=off\nNodeName=pd-node[0-1] Name=gpu File={folder}/gpu[0-{NUM_GPUS - 1}]\n"
        )
        (folder / "slurm" / "slurm.conf").write_text(conf)
        (folder / "slurm" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n")
        (folder / "slurm" / "plugstack.conf").write_text("")
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def up(self) -> None:
        """Start machines and daemons, and wait until both nodes are idle."""
        self.machines.up()
        for name in (LOGIN, *NODES):
            self._start_munge(name)
        self._daemon(LOGIN, ["slurmctld", "-D"])
        for name in NODES:
            self._daemon(name, ["slurmd", "-D"])
        wait_until(lambda: self.idle_nodes() == list(NODES), 30, self._logs)

    def down(self) -> None:
        self.machines.down()
        for process in self._daemons.values():
            process.wait()

    def start(self, command: Sequence[str], log: Path, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """Start a client command on the login machine, with its output in `log`."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self.machines.argv(LOGIN, command),
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(),
            )

    def output(self, command: Sequence[str], timeout_s: float = 30.0) -> str:
        return self.machines.output(LOGIN, command, timeout_s)

    def idle_nodes(self) -> list[str]:
        done = subprocess.run(
            self.machines.argv(LOGIN, ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]), capture_output=True, text=True
        )
        return sorted(set(done.stdout.split()))

    def jobs(self) -> list[str]:
        """Return the ids of the jobs that have not ended."""
        return self.output(["squeue", "-h", "-o", "%i"]).split()

    def own_processes(self, name: str) -> dict[int, str]:
        """Return the processes of a machine that are not Slurm daemons."""
        daemons = ("munged", "slurmctld", "slurmd", "slurmscriptd")
        return {
            pid: args
            for pid, args in self.machines.processes(name).items()
            if not args.startswith(tuple(f"{daemon}{end}" for daemon in daemons for end in (" ", ":")))
            and args not in daemons
        }

    def _start_munge(self, name: str) -> None:
        files = [f"--{key}-file={self._folder}/{name}.munged.{key}" for key in ("log", "seed")]
        key = f"--key-file={self._folder}/munge.key"
        self._daemon(name, ["munged", "--foreground", "--force", key, *files, "--pid-file=/run/munge/munged.pid"])
        has_socket = self.machines.argv(name, ["test", "-S", "/run/munge/munge.socket.2"])
        wait_until(lambda: subprocess.run(has_socket).returncode == 0, 10, self._logs)

    def _daemon(self, name: str, command: Sequence[str]) -> None:
        with (self._folder / f"{name}.{command[0]}.log").open("wb") as log:
            self._daemons[f"{name} {command[0]}"] = subprocess.Popen(
                self.machines.argv(name, command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment()
            )

    def _logs(self) -> str:
        """Return the last lines of every daemon's log."""
        tails = [
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-8:])
            for path in sorted(self._folder.glob("*.log"))
        ]
        return "the nodes are idle\n" + "\n".join(tails)


def environment() -> dict[str, str]:
    """Return this process's environment without what must not reach other machines, plus its interpreter."""
    kept = {key: value for key, value in os.environ.items() if key not in ("HOSTNAME", "TMPDIR")}
    return {**kept, "PYTHON": sys.executable}
