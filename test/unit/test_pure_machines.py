"""The state machines of P, D and the router use no thread, socket, clock, lock or log."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import chitu

ROOT = Path(chitu.__file__).parent
PURE = (
    "kv_transfer/receiver.py",
    "kv_transfer/receiver.py",
    "kv_transfer/receiver.py",
    "kv_transfer/sender.py",
    "kv_transfer/sender.py",
    "router/request.py",
    "router/request.py",
    "router/retry.py",
)


@pytest.mark.parametrize("name", PURE)
def test_a_machine_knows_no_thread_socket_clock_lock_or_log(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {module.split(".")[0] for module in imported}
    assert not roots & {"threading", "asyncio", "time", "queue", "zmq", "socket", "random", "secrets"}
    assert not {module for module in imported if module.startswith(("chitu.net", "chitu.clock", "chitu.log"))}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not used & {"getLogger", "monotonic", "acquire", "release", "new_room"}
