"""A 2P2D cluster of checksum engines, each process on its own host (`network.py`), under a steady load that is checked.

Used by the silence tests, from the main thread. That thread is on the router's host meanwhile, and so are the load's
connections.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from chaos_cluster import PATIENCE_S, right_tokens, short_ask
from network import Network
from nursery import popen
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from support.router_process import wait_until
from support.steady_load import RIGHT, SteadyLoad

from chitu.config.load import load_topology
from chitu.errors import ChituError
from chitu.launch.plan import plan
from chitu.launch.router_client import RouterClient
from chitu.process.child import ROUTER
from chitu.process.supervisor import Supervisor

INSTANCES = ("P0", "P1", "D0", "D1")
KEY = "dp_config.router"
READY_S = 60.0


class SilenceCluster:
    """`with SilenceCluster(folder) as cluster:` serves, with `cluster.load` paused; `cluster.net` is its network."""

    def __init__(self, folder: Path, *settings: str, clients: int = 4, env: Mapping[str, str] | None = None) -> None:
        self.net = Network([ROUTER, *INSTANCES])
        self._clients = clients
        self._settings = settings
        self._folder = folder
        self._env = dict(env or {})
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> SilenceCluster:
        with self._stack:
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        net = self._stack.enter_context(self.net)
        self._stack.enter_context(net.inside(ROUTER))
        model = make_checksum_model(self._folder / "model", EngineConfig(0.004, 0.0002))
        hosts = {role: ", ".join(f"{{host: {net.address(f'{role}{rank}')}}}" for rank in range(2)) for role in "PD"}
        overrides = [
            f"model.path={model}",
            "model.served_name=m",
            "model.max_model_len=1024",
            "cache.num_pages=320",
            f"{KEY}.host={net.address(ROUTER)}",
            f"{KEY}.prefill_schedulers=[{hosts['P']}]",
            f"{KEY}.decode_schedulers=[{hosts['D']}]",
            f"{KEY}.pd_disaggregation.transport=auto",
            f"{KEY}.breaker={{open_s: 1.0, max_open_s: 1.0}}",
            *self._settings,
        ]
        topology = load_topology("pd_disagg_2p2d_multi_node", overrides)
        specs = {spec.name: spec for spec in plan(topology, "pd_disagg_2p2d_multi_node", overrides, 1, ENTRIES)}
        logs = self._folder / "logs"
        logs.mkdir()
        specs = {name: replace(spec, argv=tuple(net.argv(name, spec.argv))) for name, spec in specs.items()}
        self.processes = Supervisor(
            list(specs),
            specs.__getitem__,
            logs,
            restart=False,
            on_event=lambda text: None,
            env=self._env,
            max_log_bytes=topology.log.max_mb << 20,
            popen=popen,
        )
        self._stack.callback(lambda: self.processes.stop(1.0))
        for name in specs:
            self.processes.start(name)
        self._client = RouterClient(f"http://{net.address(ROUTER)}:{topology.dp_config.router.port}")
        wait_until(self._is_ready, READY_S, lambda: "; ".join(self.away()))
        self.load = SteadyLoad(
            lambda: f"http://{net.address(ROUTER)}:{topology.dp_config.router.port}",
            "m",
            short_ask,
            right_tokens,
            PATIENCE_S,
        )
        self._stack.callback(self.load.close)
        self.load.start(self._clients)
        self.load.pause(PATIENCE_S)
        self.load.take_answers()

    def _is_ready(self) -> bool:
        self.processes.poll()
        return not self.away()

    # ------------------------------------------------------------------------------------------------- what is seen

    def away(self) -> list[str]:
        """Describe in a few words each instance that is not `up`."""
        try:
            snapshot = self._client.cluster()
        except ChituError as error:
            return [error.message]
        up = {instance.name for instance in snapshot.instances if instance.status == "up"}
        return [f"{name} is not up" for name in INSTANCES if name not in up]

    def not_at_rest(self) -> list[str]:
        """Describe in a few words what still runs, waits or is kept."""
        words = self.away()
        if words:
            return words
        for instance in self._client.cluster().instances:
            load = instance.load
            if (
                load is None
                or load.pages_free + load.pages_cached != load.pages_total
                or load.aux_free != load.aux_total
            ):
                words.append(f"{instance.name}: {load}")
        return words

    def suspended(self, name: str) -> tuple[int, ...]:
        """Return the engine ranks of each D to which this P currently does not write, as the router knows it."""
        loads = {instance.name: instance.load for instance in self._client.cluster().instances}
        load = loads[name]
        return load.suspended if load is not None else ()

    def descriptors(self) -> dict[str, int]:
        """Return the number of open descriptors of each process."""
        pids = {name: member.child.pid for name, member in self.processes.members.items() if member.child}
        return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()}

    def check_all_serve(self) -> None:
        """Check that every pair answers right: both instances of each role get requests."""
        asks = [short_ask(random.Random(seed)) for seed in range(12)]
        for future in self.load.send(asks):
            answer = future.result(PATIENCE_S + 10)
            assert answer.outcome == RIGHT, f"after the heal: {answer.outcome}: {answer.detail}"
        self.load.pause(PATIENCE_S)  # closes its connections
        self.load.take_answers()
