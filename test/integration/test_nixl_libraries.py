"""The wheel of NIXL and the system each have a libibverbs: how a process ends that has loaded both, and what it says if
UCX cannot start. In processes of their own: only these show destructors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chitu.net.rdma_devices import devices_of_verbs

START = """
import sys
from chitu.errors import ChituError
from chitu.kv_transfer.transports import nixl
from chitu.net.rdma_devices import Rdma

nixl._load_verbs(nixl._import_nixl(), Rdma({"rxe0": "ACTIVE"}))  # as on a host with soft-RoCE
try:
    nixl.NixlTransport("127.0.0.1").close()
except ChituError as error:
    sys.exit(error.message)
print(*{line.split()[-1] for line in open("/proc/self/maps") if "libibverbs" in line})
"""


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("nixl_cu13")
    command, env = [sys.executable, "-c", START], os.environ | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_process_with_both_libibverbs_ends_well() -> None:
    if devices_of_verbs() is None:
        pytest.skip("the system has no libibverbs")
    done = run(UCX_MODULES="all", UCX_TLS="tcp")  # all: the module for EFA, which needs both, too
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2, "the wheel's and the system's"


def test_what_keeps_ucx_from_a_start_is_a_sentence() -> None:
    done = run(UCX_TLS="rc")
    assert done.returncode == 1
    assert "nixl: UCX cannot start (NIXL_ERR_BACKEND)" in done.stderr and "UCX_TLS=rc" in done.stderr
    assert "Traceback" not in done.stderr
