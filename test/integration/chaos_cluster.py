"""A real 2P2D cluster for fault injection: checksum engines behind proxied wires, under a steady load whose answers are
all checked.

Used by the chaos and drain tests, from one thread. A *blow* hits one process: SIGKILL, SIGSTOP, a cut (all its
connections break and stay away for a while), a blink (connections lose what is in flight and are re-established at
once), a change of its role, or a drain; `mend` undoes it. Holds (files that P's engine and transport look for) keep
requests in the phase in which the blow shall hit them; the router reports which phase that is (`GET /cluster`).
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal

from chaos_proxy import Wires
from nursery import forked
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from support.router_process import wait_until
from support.steady_load import HUNG, RIGHT, WRONG, Ask, SteadyLoad

from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.fake.executor import expected_tokens
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient, RouterUnreachable
from chitu.net.curve import derive
from chitu.protocol import LoadReport, SamplingParams
from chitu.protocol.snapshot import ClusterSnapshot
from chitu.types import Role

Blow = Literal["SIGKILL", "SIGSTOP", "cut", "blink", "change", "drain"]
VOCAB_SIZE = 1280
"""Size of the embedded model's vocabulary."""
PATIENCE_S = 40.0
"""Timeout of a client's request; a client that waits longer counts as hung."""
ADDRESSES = {"router": "127.0.9.1", "P0": "127.0.1.1", "P1": "127.0.1.2", "D0": "127.0.2.1", "D1": "127.0.2.2"}
ROUTER = "dp_config.router"
DEADLINES = f"{ROUTER}.pd_disaggregation.deadlines"
ANY_PORTS = [
    *(f"{ROUTER}.{name}_port=0" for name in ("stats", "token")),
    *(f"{ROUTER}.pd_disaggregation.{name}_port=0" for name in ("coordination", "metadata_sync", "bootstrap")),
]
SETTINGS = [
    "model.served_name=m",
    "model.max_model_len=1024",
    "cache.num_pages=320",
    "cache.num_aux_slots=8",
    "scheduler.max_running_requests=16",
    "scheduler.chunk_size=64",
    f"{ROUTER}.prefill_schedulers=[{{host: 127.0.1.1}}, {{host: 127.0.1.2}}]",
    f"{ROUTER}.decode_schedulers=[{{host: 127.0.2.1}}, {{host: 127.0.2.2}}]",
    f"{ROUTER}.pd_disaggregation.transport=shm",
    f"{ROUTER}.breaker={{open_s: 1.0, max_open_s: 1.0}}",
    f"{DEADLINES}.bootstrap_s=2",
    f"{DEADLINES}.queue_s=4",
    f"{DEADLINES}.transfer_s=4",
    f"{DEADLINES}.router_s=3",
    f"{DEADLINES}.heartbeat_interval_s=0.2",
    f"{DEADLINES}.lease_s=3.5",
    f"{DEADLINES}.retry_interval_s=0.2",
    f"{DEADLINES}.role_change_s=0.6",
]
"""Short deadlines, so that a blow can outlast all of them and an instance that was hit gets requests again soon. The
lease is longer than a busy machine keeps a process from its cores. Clients that are rejected because of the queue
behind a hold retry."""
REST_S = 0.1
"""Rest of a client between two requests: most of a cell waits for deadlines."""
CUT_S = 4.5
BLINK_S = 0.4
"""Duration of a blink, far shorter than a lease, so that every process stays in the cluster."""
STOP_S = 4.5
"""Duration of a SIGSTOP, longer than every deadline above."""


def short_ask(rng: random.Random) -> Ask:
    """Return a request of the steady load: short, half of them streamed, a third sampled. Most prompts share a prefix
    of random length with others, so P and D have pages of them."""
    family, fork = rng.randrange(3), rng.randint(0, 50)
    opening = tuple(16 + (family * 31 + at * 7) % (VOCAB_SIZE - 16) for at in range(fork))
    prompt = opening + tuple(rng.randrange(16, VOCAB_SIZE) for _ in range(rng.randint(4, 25)))
    seed = rng.randrange(1 << 32) if rng.random() < 0.3 else None
    return Ask(prompt, rng.randint(4, 40), seed, stream=rng.random() < 0.5)


def right_tokens(ask: Ask) -> list[int]:
    sampling = None
    if ask.seed is not None:
        sampling = SamplingParams(max_tokens=ask.max_tokens, temperature=1.0, seed=ask.seed)
    return expected_tokens(ask.prompt, ask.max_tokens, VOCAB_SIZE, sampling)


class ChaosCluster:
    """`with ChaosCluster(folder) as cluster:` serves, with `cluster.load` paused."""

    def __init__(
        self,
        folder: Path,
        *settings: str,
        clients: int = 4,
        restart: bool = False,
        env: Mapping[str, str] | None = None,
        has_state: bool = False,
    ) -> None:
        self.holds = folder / "holds"
        self.holds.mkdir(parents=True)
        model = make_checksum_model(folder / "model", EngineConfig(0.004, 0.0002, str(self.holds), has_state=has_state))
        topology = load_topology("pd_disagg_2p2d_multi_node", [f"model.path={model}", *ANY_PORTS, *SETTINGS, *settings])
        self.processes = LocalCluster(
            topology,
            entries=forked(ENTRIES),
            log_dir=str(folder / "logs"),
            restart=restart,
            env={"PD_MASTER_ADDR": ADDRESSES["router"], **(env or {})},
        )
        self.wires = Wires(ADDRESSES, self._pids)
        self.load = SteadyLoad(lambda: self.processes.url, "m", short_ask, right_tokens, PATIENCE_S, rest_s=REST_S)
        self._clients = clients

    def __enter__(self) -> ChaosCluster:
        try:
            self.processes.start()
            wait_until(self._router_listens, 60, lambda: self.processes.logs("router"))
            ports = dict(self.processes.ports)
            del ports["port"]
            secrets = derive(cluster_key_of(self.processes.topology))
            assert secrets is not None
            self.wires.open(ports.values(), ports["metadata_sync_port"], secrets)
            self.processes.wait_ready(60)
            self.load.start(self._clients)
            self.load.pause(PATIENCE_S)
            self.load.take_answers()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.release()
        self.load.close()
        self.wires.close()
        self.processes.stop()

    def _router_listens(self) -> bool:
        self.processes.poll()
        return bool(self.processes.ports)

    def _pids(self) -> dict[str, int]:
        children = {name: member.child for name, member in self.processes.members.items()}
        return {name: child.pid for name, child in children.items() if child is not None}

    # ------------------------------------------------------------------------------------------------- what is seen

    @property
    def client(self) -> RouterClient:
        secrets = derive(cluster_key_of(self.processes.topology))
        assert secrets is not None
        return RouterClient(self.processes.url, secrets.token)

    def snapshot(self) -> ClusterSnapshot:
        return self.client.cluster()

    def loads(self) -> dict[str, LoadReport]:
        """Return the last load report of each instance that is up."""
        return {i.name: i.load for i in self.snapshot().instances if i.load is not None}

    def not_whole(self) -> list[str]:
        """Describe in a few words each thing that differs from a cluster at rest."""
        snapshot = self.snapshot()
        words = [f"{i.name} is {i.status}" for i in snapshot.instances if i.status != "up"]
        words += [f"{snapshot.in_flight} requests in flight"] if snapshot.in_flight else []
        for instance in snapshot.instances:
            if (load := instance.load) is not None:
                pages, aux = load.pages_total - load.pages_free - load.pages_cached, load.aux_total - load.aux_free
                busy = load.waiting + load.transferring + load.running + load.retracted + load.closing
                rows = aux + load.states_total - load.states_free
                if pages or rows or busy or not load.pages_total:
                    words.append(f"{instance.name}: {pages} pages and {rows} rows not free, {busy} requests")
        return words

    def pages_not_free(self) -> int:
        return sum(load.pages_total - load.pages_free - load.pages_cached for load in self.loads().values())

    # ------------------------------------------------------------------------------------------------------------ blows

    def hold(self, what: str) -> None:
        (self.holds / what).touch()

    def release(self) -> None:
        for path in self.holds.iterdir():
            path.unlink()

    def strike(self, blow: Blow, name: str) -> None:
        if blow == "cut":
            assert self.wires.connections_of(name), f"{name} has no connection that could be cut"
            self.wires.cut(name)
        elif blow == "blink":
            self.wires.freeze(name)
        elif blow == "change":
            self.change_role(name, Role.DECODE if name.startswith("P") else Role.PREFILL)
        elif blow == "drain":
            self.client.drain(name, force=False)
        else:
            self.processes.kill(name, signal.Signals[blow])

    def mend(self, blow: Blow, name: str) -> None:
        """Undo a blow after its time: a killed or drained process is started again at once, and one that changed its
        role, as it may have before it was killed, changes it back."""
        pause = threading.Event()
        if blow == "cut":
            pause.wait(CUT_S)
            self.wires.heal(name)
        elif blow == "blink":
            pause.wait(BLINK_S)
            self.wires.cut(name)
            self.wires.heal(name)
        elif blow == "SIGSTOP":
            pause.wait(STOP_S)
            self.processes.kill(name, signal.SIGCONT)
        elif blow == "change":
            wait_until(lambda: self.serves(name), 20, lambda: f"{name} does not serve")
            now = next(i for i in self.snapshot().instances if name in (i.name, i.home))
            if now.home:
                self.change_role(now.name, Role.PREFILL if name.startswith("P") else Role.DECODE)
                wait_until(lambda: self.serves(name, at_home=True), 20, lambda: f"{name} is not back")
        else:
            self.processes.wait_exit(name, 20.0)
            self.processes.restart(name)

    def change_role(self, name: str, role: Role) -> None:
        self.client.change_role(name, role, force=False)

    def serves(self, name: str, at_home: bool = False) -> bool:
        """Return whether a process serves, as what it was started, or as what it has become, and a router that was
        started again says so."""
        try:
            instances = self.snapshot().instances
        except RouterUnreachable:
            return False
        found = [i for i in instances if name == i.name or (name == i.home and not at_home)]
        return any(i.status == "up" for i in found)

    def wait_recovered(self, timeout_s: float) -> float:
        """Return the seconds until every process is up and four concurrent requests were right.

        On a busy machine a lease may end once more; the caller knows whether that may fail a request.
        """
        start_s = time.monotonic()
        while True:
            left_s = start_s + timeout_s - time.monotonic()
            wait_until(self.processes.ready, left_s, lambda: "; ".join(self.not_whole()))
            answers = [future.result() for future in self.load.send([short_ask(random.Random(n)) for n in range(4)])]
            failed = [answer for answer in answers if answer.outcome != RIGHT]
            if not failed:
                return time.monotonic() - start_s
            words = "; ".join(f"{answer.outcome}: {answer.detail}" for answer in failed)
            assert not {answer.outcome for answer in failed} & {WRONG, HUNG}, f"after the recovery: {words}"
            assert time.monotonic() < start_s + timeout_s, f"not right within {timeout_s:g} s: {words}"
