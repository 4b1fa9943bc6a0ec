"""`free_ports`: no two test processes get the same port, even if neither listens there yet."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

from ports import BLOCK, free_ports

ANOTHER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from ports import free_ports
print(free_ports(3), flush=True)
sys.stdin.read()
"""


def test_ports_are_given_once_while_those_live_who_asked_for_them() -> None:
    ours = free_ports(3)
    argv = [sys.executable, "-c", ANOTHER, json.dumps(sys.path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        theirs = json.loads(process.stdout.readline())
        ours += free_ports(BLOCK)  # past the end of a block
        process.communicate()
    assert len({*ours, *theirs}) == len(ours) + 3


def test_what_somebody_else_listens_on_is_left_out() -> None:
    while (port := free_ports(1)[0]) % BLOCK == BLOCK - 1:  # the port after the last of a block is another process's
        pass
    with socket.create_server(("127.0.0.1", port + 1)):
        assert free_ports(1) == [port + 2]
