"""Two small virtual machines, each with a soft-RoCE device, joined by a network that can be disturbed. No KVM, no root.

    with VirtualMachines(folder, memory="1536M") as (one, two):
        print(one.run("ibv_devinfo").stdout)
        two.lose(100, roce_only=True)

QEMU emulates the processors, so it runs wherever QEMU does. A machine's root file system is the host's `/`, read-only,
under an overlay in its memory: a checkout and its .venv run in it unchanged, as the user who started it, who is root
inside. The machines have addresses 10.77.0.1 and 10.77.0.2 for RDMA, 10.77.1.1 and 10.77.1.2 for TCP. Nothing else is
on their network. Wire and consoles are pairs of sockets that QEMU inherits, so nobody else can reach a machine, and it
reaches nothing. QEMU ends with the process (and thread) that started it.

Threads: one for each machine reads what its commands say. Everything else belongs to the callers; commands of one
machine may be run from several threads.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import queue
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from chitu.process.descendants import die_with_parent

HERE = Path(__file__).parent
KERNEL = HERE.parents[1] / ".venv/vm"
"""What `vm_kernel.py` has packed."""
TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "rdma": "iproute2",
    "tc": "iproute2",
}
PROVIDERS = "/etc/libibverbs.d/rxe.driver"
HEADER = struct.Struct("!IBI")
START, INPUT, END_OF_INPUT, KILL, READY, OUTPUT, ERRORS, EXIT = range(8)
"""Frames of `vm_guest.py`."""
BOOT_S = 240.0
COMMAND_S = 60.0
MTU = 4200
"""Enough for RoCE's largest packet."""
CPU = "Nehalem"
"""Without AVX: its emulation is slow, and libraries that find it use it."""


def missing() -> list[str]:
    """Return what this host lacks; empty if the machines can start."""
    if platform.machine() != "x86_64":
        return ["an x86_64 processor"]
    absent = [f"{tool} (package {package})" for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if not os.path.exists(PROVIDERS):
        absent.append("soft-RoCE's driver (package ibverbs-providers)")
    if not (KERNEL / "vmlinuz").exists():
        absent.append("Debian's kernel (package linux-image-amd64)")
    return absent


class Command:
    """A command that runs in a machine. Its output is read line by line; its stderr is kept."""

    def __init__(self, machine: Machine, number: int, argv: Sequence[str]) -> None:
        self.argv = argv
        self.status: int | None = None
        """Its exit status once it has ended; negative: the signal that ended it."""
        self._machine = machine
        self._number = number
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._partial = b""
        self._errors = bytearray()

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        self._machine.send(self._number, INPUT, line.encode() + b"\n")

    def line(self, timeout_s: float = COMMAND_S) -> str:
        """Return the next line of its output. Raise EOFError if it has ended, TimeoutError if it says nothing."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"{self} said nothing for {timeout_s:g} s; {self.tail()}") from None
        if line is None:
            self._lines.put(None)
            raise EOFError(f"{self} has ended with {self.status}; {self.tail()}")
        return line.decode(errors="replace")

    def wait(self, timeout_s: float = COMMAND_S) -> str:
        """Wait until it has ended and return the output that nobody has read."""
        end_s, lines = time.monotonic() + timeout_s, []
        with contextlib.suppress(EOFError):
            while True:
                lines.append(self.line(max(0.0, end_s - time.monotonic())))
        return "\n".join(lines)

    def kill(self) -> None:
        """Kill it and all processes of its session, by SIGKILL."""
        self._machine.send(self._number, KILL)

    def tail(self) -> str:
        """Return the last lines of its standard error."""
        return f"its last words:\n{self._errors.decode(errors='replace')[-4000:]}"

    @property
    def errors(self) -> str:
        return self._errors.decode(errors="replace")

    def __str__(self) -> str:
        return f"{' '.join(self.argv)[:200]} on {self._machine.name}"

    def on_frame(self, kind: int, payload: bytes) -> None:
        """Take a frame of the machine. Its reader."""
        if kind == OUTPUT:
            *lines, self._partial = (self._partial + payload).split(b"\n")
            for line in lines:
                self._lines.put(line)
        elif kind == ERRORS:
            self._errors += payload
        elif kind == EXIT:
            self.status = int(payload)
            if self._partial:
                self._lines.put(self._partial)
            self._lines.put(None)


class Machine:
    """One machine; see the module's docstring."""

    def __init__(self, node: int, folder: Path, memory: str, wire: socket.socket) -> None:
        self.node = node
        self.name = f"vm{node}"
        self.address, self.tcp_address = f"10.77.0.{node}", f"10.77.1.{node}"
        self._console = folder / f"{self.name}.console"
        self._numbers = itertools.count(1)
        self._commands: dict[int, Command] = {}
        self._ready = threading.Event()
        self._sending = threading.Lock()
        self._agent, agent = socket.socketpair()
        self._monitor, monitor = socket.socketpair()
        given = (wire, agent, monitor)
        command = self._qemu(memory, *(end.fileno() for end in given))
        parent = os.getpid()
        with open(folder / f"{self.name}.qemu", "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[end.fileno() for end in given],
                preexec_fn=lambda: die_with_parent(parent),
            )
        self._log = folder / f"{self.name}.qemu"
        for end in given:
            end.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _qemu(self, memory: str, wire: int, agent: int, monitor: int) -> list[str]:
        words = {"node": self.node, "guest": HERE / "vm_guest.py", "python": os.path.realpath(sys.executable)}
        append = "console=ttyS0 quiet panic=-1 mitigations=off " + " ".join(f"vm.{k}={v}" for k, v in words.items())
        return [
            *("qemu-system-x86_64", "-machine", "q35,accel=tcg", "-cpu", CPU, "-m", memory, "-smp", "2"),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-kernel", str(KERNEL / "vmlinuz"), "-initrd", str(KERNEL / "initramfs"), "-append", append),
            *("-serial", f"file:{self._console}"),
            *("-chardev", f"socket,id=monitor,fd={monitor}", "-mon", "chardev=monitor,mode=control"),
            *("-chardev", f"socket,id=agent,fd={agent}", "-device", "virtio-serial"),
            *("-device", "virtserialport,chardev=agent,nr=1"),
            *("-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap"),
            *("-device", "virtio-9p-pci,fsdev=root,mount_tag=host"),
            *("-netdev", f"socket,id=data,fd={wire}"),
            *("-device", f"virtio-net-pci,id=nic,netdev=data,mac=52:54:00:77:00:0{self.node},host_mtu={MTU}"),
        ]

    # ------------------------------------------------------------------------------------------------------- commands
    def start(self, *argv: str, cwd: str = "/", env: Mapping[str, str] | None = None) -> Command:
        """Start a command in this machine."""
        number = next(self._numbers)
        command = self._commands[number] = Command(self, number, argv)
        self.send(number, START, json.dumps({"argv": argv, "cwd": cwd, "env": dict(env or {})}).encode())
        return command

    def run(
        self, *argv: str, timeout_s: float = COMMAND_S, cwd: str = "/", env: Mapping[str, str] | None = None
    ) -> str:
        """Run a command in this machine and return its output. Raise RuntimeError if it fails."""
        command = self.start(*argv, cwd=cwd, env=env)
        output = command.wait(timeout_s)
        if command.status != 0:
            raise RuntimeError(f"{command} ended with {command.status}: {output[-2000:]}; {command.tail()}")
        return output

    def send(self, number: int, kind: int, payload: bytes = b"") -> None:
        with self._sending:
            self._agent.sendall(HEADER.pack(number, kind, len(payload)) + payload)

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._agent.makefile("rb") as stream:
            while len(header := stream.read(HEADER.size)) == HEADER.size:
                number, kind, length = HEADER.unpack(header)
                payload = stream.read(length)
                if kind == READY:
                    self._ready.set()
                elif number in self._commands:
                    self._commands[number].on_frame(kind, payload)
                    if kind == EXIT:
                        del self._commands[number]
        for command in self._commands.values():  # the machine is gone
            command.on_frame(EXIT, str(-signal.SIGKILL).encode())

    # --------------------------------------------------------------------------------------------------------- faults
    def lose(self, percent: int, *, roce_only: bool = False) -> None:
        """Lose packets that this machine sends: all of them, or those of RDMA and of the TCP address, so that control
        messages at the RDMA address pass."""
        if not roce_only:
            self._tc("qdisc replace dev data0 root netem loss", f"{percent}%")
            return
        self._tc("qdisc replace dev data0 root handle 1: prio bands 4 priomap" + " 1" * 16)
        self._tc("qdisc add dev data0 parent 1:4 handle 40: netem loss", f"{percent}%")
        chosen = "filter add dev data0 parent 1: protocol ip u32 match"
        self._tc(chosen, "ip protocol 17 0xff match ip dport 4791 0xffff flowid 1:4")
        self._tc(chosen, "ip dst 10.77.1.0/24 flowid 1:4")

    def delay(self, milliseconds: float) -> None:
        """Delay what this machine sends."""
        self._tc("qdisc replace dev data0 root netem limit 100000 delay", f"{milliseconds}ms")

    def heal(self) -> None:
        """End what `lose` or `delay` has begun."""
        self._tc("qdisc delete dev data0 root")

    def _tc(self, *words: str) -> None:
        self.run("tc", *" ".join(words).split())

    def set_carrier(self, is_up: bool) -> None:
        """Plug or pull the cable, as this machine sees it."""
        self._command_qemu("set_link", name="nic", up=is_up)

    def pause(self) -> None:
        """Stop its processors: a silent machine, whose memory stays."""
        self._command_qemu("stop")

    def resume(self) -> None:
        self._command_qemu("cont")

    def _command_qemu(self, command: str, **arguments: object) -> None:
        """Run a command of QEMU's monitor, on a connection that stays open."""
        for execute, given in (("qmp_capabilities", {}), (command, arguments)):
            self._monitor.sendall(json.dumps({"execute": execute, "arguments": given}).encode() + b"\n")
            while True:
                answer = json.loads(self._monitor_line())
                if "error" in answer and execute == command:  # the first is for the first time only
                    raise RuntimeError(f"QEMU of {self.name}: {answer['error']['desc']}")
                if "return" in answer or "error" in answer:  # neither a greeting nor an event
                    break

    def _monitor_line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            data = self._monitor.recv(1)
            if not data:
                raise RuntimeError(f"QEMU of {self.name} has ended: {self.story()}")
            line += data
        return line

    # ------------------------------------------------------------------------------------------------------------ life
    def wait_ready(self, end_s: float) -> None:
        while not self._ready.wait(0.1):
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"{self.name} did not start: {self.story()}")

    def story(self) -> str:
        """Return what a stranger needs if something fails: the end of the machine's console and QEMU's errors."""
        console, errors = (path.read_text(errors="replace")[-3000:] for path in (self._console, self._log))
        return f"console of {self.name}:\n{console}\nQEMU (exit status {self._process.poll()}):\n{errors}"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._agent.close()
        self._monitor.close()


class VirtualMachines:
    """Both machines; see the module's docstring. `folder`: for their consoles, on a file system of the host."""

    def __init__(self, folder: Path, memory: str = "1536M") -> None:
        self._folder = folder
        self._memory = memory
        self._machines: list[Machine] = []
        self.boot_s = 0.0

    def __enter__(self) -> tuple[Machine, Machine]:
        self._folder.mkdir(parents=True, exist_ok=True)
        started_s = time.monotonic()
        wires = socket.socketpair()
        try:
            for node, wire in enumerate(wires, 1):
                self._machines.append(Machine(node, self._folder, self._memory, wire))
            for machine in self._machines:
                machine.wait_ready(started_s + BOOT_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.boot_s = time.monotonic() - started_s
        one, two = self._machines
        return one, two

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for machine in self._machines:
            machine.end()
        self._machines.clear()
