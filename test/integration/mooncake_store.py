"""A Mooncake Store on this machine, for tests: `mooncake_master`, and a client from the wheel that contributes the
memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_ports
from support.router_process import wait_until

PATIENCE_S = 60.0


@dataclass
class Store:
    """The two processes of a store."""

    master: subprocess.Popen[bytes]
    memory: subprocess.Popen[bytes]
    address: str
    metrics_url: str

    def num_keys(self) -> int:
        text = httpx.get(self.metrics_url, timeout=5.0, trust_env=False).text
        return int(next(line.split()[1] for line in text.splitlines() if line.startswith("master_key_count ")))

    @contextmanager
    def client(self) -> Iterator[Any]:
        from mooncake.store import MooncakeDistributedStore

        client = MooncakeDistributedStore()
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", self.address) == 0
        try:
            yield client
        finally:
            client.close()


@contextmanager
def running(command: list[str], folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    with open(folder / f"{name}.log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def mooncake_store(folder: Path) -> Iterator[Store]:
    """Yield a store whose logs go to `folder`. Skip the test if the library does not import."""
    try:
        import mooncake.store  # noqa: F401
    except (ImportError, OSError) as error:
        pytest.skip(f"mooncake does not import here: {error}")
    bin_folder = Path(sys.executable).parent
    master_port, metrics_port, memory_port = free_ports(3)
    address = f"127.0.0.1:{master_port}"
    master = [
        str(bin_folder / "mooncake_master"),
        *("--rpc_address=127.0.0.1", f"--rpc_port={master_port}"),
        *("--metrics_host=127.0.0.1", f"--metrics_port={metrics_port}", "--default_kv_lease_ttl=60000"),
    ]
    memory = [
        str(bin_folder / "mooncake_client"),
        *(f"--master_server_address={address}", "--metadata_server=P2PHANDSHAKE", "--host=127.0.0.1"),
        *(f"--port={memory_port}", "--protocol=tcp", "--global_segment_size=64 MB"),
    ]
    with running(master, folder, "master") as master_process:
        url = f"http://127.0.0.1:{metrics_port}/metrics"

        def answers(line: str) -> bool:
            try:
                return line in httpx.get(url, timeout=5.0, trust_env=False).text
            except httpx.HTTPError:
                return False

        def logs() -> str:
            return "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))

        wait_until(lambda: answers("master_key_count 0"), PATIENCE_S, logs)
        with running(memory, folder, "memory") as memory_process:
            wait_until(lambda: answers("master_mount_segment_requests_total 1"), PATIENCE_S, logs)
            yield Store(master_process, memory_process, address, url)
