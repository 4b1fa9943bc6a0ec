"""A cluster with groups of several hosts: network namespaces (`network.py`), with one `chitu node` on each.

Used from the main thread, by the tests of groups over hosts. Topologies name the hosts by their addresses.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from network import Network
from nursery import launcher
from serve_process import ServeProcess
from support.router_process import wait_until

from chitu.config.load import dump_topology, load_topology
from chitu.config.topology import host_names
from chitu.errors import ChituError
from chitu.launch.plan import Entries
from chitu.launch.router_client import RouterClient
from chitu.net.curve import derive

KEY = "of this cluster 0123456789"
SECRETS = derive(KEY)
CONFIG = "dp_config.router"
SOURCE = "pd_disagg_2p2d_multi_node"
RENDEZVOUS_PORT = 29400
READY_S = 120.0


class HostCluster:
    """`with HostCluster(folder, network, settings) as cluster:` serves. The first name of the network is the router's
    host."""

    def __init__(
        self, folder: Path, net: Network, names: Sequence[str], settings: Sequence[str], entries: Entries = Entries()
    ) -> None:
        self.net, self.names = net, names
        self._entries = entries
        topology = load_topology(SOURCE, [f"{CONFIG}.host={net.address(names[0])}", *settings])
        assert host_names(topology) == [net.address(name) for name in names], host_names(topology)
        self.url = f"http://{net.address(names[0])}:{topology.dp_config.router.port}"
        self.file = folder / "hosts.yaml"
        self.file.write_text(dump_topology(topology), encoding="utf-8")
        self._folder = folder
        self.nodes: dict[str, ServeProcess] = {}
        assert SECRETS is not None
        self.client = RouterClient(self.url, SECRETS.token)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> HostCluster:
        with self._stack:
            self._stack.enter_context(self.net.inside(self.names[0]))
            for name in self.names:
                self.start(name)
            wait_until(self._is_ready_or_ended, READY_S, self.said)
            assert len(self.up()) == self.size, self.said()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start(self, name: str, *more: str) -> ServeProcess:
        """Start the node of a host."""
        words = [self._entries.router, self._entries.scheduler, "direct", "node", str(self.file)]
        words += ["--node-index", str(self.names.index(name)), "--log-dir", str(self._folder / "logs"), *more]
        argv = self.net.argv(name, [sys.executable, "-m", "forked_chitu", *words])
        node = self.nodes[name] = self._stack.enter_context(
            ServeProcess(argv, {"CHITU_CLUSTER_KEY": KEY}, popen=launcher)
        )
        return node

    def _is_ready_or_ended(self) -> bool:
        return len(self.up()) >= self.size or any(node.process.poll() is not None for node in self.nodes.values())

    @property
    def size(self) -> int:
        topology = load_topology(str(self.file), [])
        router = topology.dp_config.router
        entries = (*router.prefill_schedulers, *router.decode_schedulers, *router.unified_schedulers)
        return sum(entry.dp_size for entry in entries)

    def up(self) -> Mapping[str, str]:
        """Return the instances that are up, with their incarnations."""
        try:
            return {i.name: i.incarnation for i in self.client.cluster().instances if i.status == "up"}
        except ChituError:
            return {}

    def log(self, name: str) -> str:
        """Return what a process has written."""
        return (self._folder / "logs" / f"{name}.log").read_text(errors="replace")

    def said(self) -> str:
        """Return the last words of all nodes and processes, for a failed test."""
        logs = sorted((self._folder / "logs").glob("*.log"))
        words = [f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in logs]
        for name, node in self.nodes.items():
            with contextlib.suppress(AssertionError):
                node.wait_line("no such line", 0.01)
            words.append(f"{name}: {node.lines[-20:]}")
        return "\n".join([str(dict(self.up())), *words])
