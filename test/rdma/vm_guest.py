"""Process 1 inside a VM of `virtual_machines.py`: sets up network and soft-RoCE, then runs the commands of its host.

One virtio console port carries frames both ways: `!IBI` (number of the command, kind, length), then the payload. The
host sends START (JSON: argv, cwd, env), INPUT, END_OF_INPUT and KILL; the answers are READY (once), OUTPUT, ERRORS and
EXIT (the exit status). KILL ends a command's process group. Written for Python's standard library alone, one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time

HEADER = struct.Struct("!IBI")
START, INPUT, END_OF_INPUT, KILL, READY, OUTPUT, ERRORS, EXIT = range(8)
PORT = "/dev/vport0p1"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMMANDS = """
ip link set lo up
ip link set {nic} name data0
ip addr add 10.77.0.{node}/24 dev data0
ip addr add 10.77.1.{node}/24 dev data0
ip link set data0 up
rdma link add rxe0 type rxe netdev data0
"""
"""The first address is for RDMA; over the second, TCP can be disturbed alone."""


def set_up(node: str) -> None:
    os.environ.clear()
    os.environ.update(PATH=PATH, HOME="/root", LANG="C.UTF-8", VM_NODE=node)
    with open("/etc/hosts", "w") as hosts:
        print("127.0.0.1 localhost", "10.77.0.1 vm1", "10.77.0.2 vm2", sep="\n", file=hosts)
    socket.sethostname(f"vm{node}")
    (nic,) = set(os.listdir("/sys/class/net")) - {"lo"}
    for line in COMMANDS.format(node=node, nic=nic).strip().splitlines():
        subprocess.run(line.split(), check=True)


class Agent:
    """Runs commands. `_children` by number; a command has ended when its process and both of its pipes have."""

    def __init__(self) -> None:
        self._port = os.open(PORT, os.O_RDWR)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._port, selectors.EVENT_READ)
        self._received = b""

    def run(self) -> None:
        self._send(0, READY, b"")
        while True:
            for key, _ in self._selector.select(0.05):
                if key.fileobj == self._port:
                    self._receive()
                else:
                    number, kind = key.data
                    if data := os.read(key.fd, 1 << 16):
                        self._send(number, kind, data)
                    else:
                        self._selector.unregister(key.fileobj)
            self._reap()

    def _receive(self) -> None:
        data = os.read(self._port, 1 << 16)
        if not data:  # nobody is there
            time.sleep(0.1)
        self._received += data
        while len(self._received) >= HEADER.size:
            number, kind, length = HEADER.unpack_from(self._received)
            end = HEADER.size + length
            if len(self._received) < end:
                return
            payload, self._received = self._received[HEADER.size : end], self._received[end:]
            if kind == START:
                self._start(number, **json.loads(payload))
            elif number in self._children:
                self._tell(self._children[number], kind, payload)

    def _start(self, number: int, argv: list[str], cwd: str, env: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        env = {**os.environ, **env}
        try:
            child = subprocess.Popen(
                argv, cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
            )
        except OSError as error:
            self._send(number, ERRORS, f"{error}\n".encode())
            self._send(number, EXIT, b"127")
            return
        self._children[number] = child
        self._selector.register(child.stdout, selectors.EVENT_READ, (number, OUTPUT))
        self._selector.register(child.stderr, selectors.EVENT_READ, (number, ERRORS))

    def _tell(self, child: subprocess.Popen[bytes], kind: int, payload: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended, or closed its input
            if kind == INPUT:
                child.stdin.write(payload)
            elif kind == END_OF_INPUT:
                child.stdin.close()
            elif kind == KILL:
                os.killpg(child.pid, signal.SIGKILL)

    def _reap(self) -> None:
        for number, child in list(self._children.items()):
            if child.poll() is None:
                continue
            for kind, pipe in ((OUTPUT, child.stdout), (ERRORS, child.stderr)):
                os.set_blocking(pipe.fileno(), False)  # a process that the command left behind may hold it
                with contextlib.suppress(OSError):
                    while data := os.read(pipe.fileno(), 1 << 16):
                        self._send(number, kind, data)
                with contextlib.suppress(KeyError):
                    self._selector.unregister(pipe)
                pipe.close()
            child.stdin.close()
            self._send(number, EXIT, str(child.returncode).encode())
            del self._children[number]

    def _send(self, number: int, kind: int, payload: bytes) -> None:
        data = HEADER.pack(number, kind, len(payload)) + payload
        while data:
            data = data[os.write(self._port, data) :]


def main() -> None:
    if agent := os.fork():  # process 1 only inherits orphans and collects them; without the agent, the machine ends
        while os.wait()[0] != agent:
            pass
        return
    set_up(sys.argv[1])
    Agent().run()


if __name__ == "__main__":
    main()
