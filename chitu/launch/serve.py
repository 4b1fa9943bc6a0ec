"""`chitu serve`: runs the whole topology on this machine until a signal ends it.

Runs in the main thread of the supervisor process: it starts the processes, shows progress, prints how to use the
cluster, supervises, and on SIGTERM, SIGINT or SIGHUP drains and ends everything within 5 seconds. Ctrl-C then
ends it at once. Exit codes: 0 after a signal, 1 if the start failed or the router died for good, 2 for a wrong
configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import msgspec

from chitu.assets import TINY_MODEL_DIR, TINY_MODEL_NAME
from chitu.config.schema import Topology
from chitu.config.topology import host_names, instances, on_one_host
from chitu.config.topology_checks import missing_roles, open_api
from chitu.launch.display import greeting, make_display, stop_on_signals
from chitu.launch.local import LocalCluster, StartFailed
from chitu.launch.plan import Entries
from chitu.process.child import ROUTER, STDOUT, StdoutLog
from chitu.process.placement import Placement, describe

POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ServeOptions:
    port: int | None = None
    """HTTP port; overrides `dp_config.router.port`."""
    log_dir: str | None = None
    restart: bool = True
    entries: Entries | None = None


def serve(placement: Placement, options: ServeOptions, on_ready: Callable[[LocalCluster], bool] | None = None) -> int:
    """Serve until a signal and return the exit code. `on_ready` is called once the cluster serves; if it returns True,
    the cluster ends again (quickstart --once)."""
    topology = placement.topology
    stdout = StdoutLog() if (options.log_dir or topology.log.dir) == STDOUT else None
    with stop_on_signals() as stop, closing(make_display(stdout=stdout)) as display:
        here = host_names(on_one_host(topology))
        if moved := [host for host in host_names(topology) if host not in here]:
            display.say(f"all processes are started on this machine, not on {', '.join(moved)}")
        if not topology.model.path:
            topology = _with_default_model(topology, display.say)
        cluster = LocalCluster(
            topology,
            port=options.port,
            log_dir=options.log_dir,
            restart=options.restart,
            on_event=display.say,
            entries=options.entries,
            node=placement.node,
            stdout=stdout,
        )
        own = instances(cluster.topology)
        for note in (*placement.notes, *([describe(own, cluster.node)] if own else [])):
            display.say(f"devices: {note}")
        if (port := cluster.supervisor.probe_port) is not None:
            display.say(f"probes: /livez and /readyz on port {port}")
        if placement.ways:
            display.say(f"transfers: {placement.ways}")
        if stdout is None:
            display.say(f"logs: {cluster.log_dir}")
        if warning := open_api(cluster.topology):
            display.say(warning)
        try:
            cluster.start()
            while not stop.is_set() and not cluster.ready():
                if dead := cluster.supervisor.dead():
                    raise StartFailed(f"{dead[0].name} ended before the cluster served, and is not started again")
                display.update({name: member.progress for name, member in cluster.members.items()})
                stop.wait(POLL_S)
            display.update({name: member.progress for name, member in cluster.members.items()})
            display.close()
            if not stop.is_set():
                names = [name for name in cluster.members if name != ROUTER]
                missing = missing_roles(cluster.topology)
                log_dir = cluster.log_dir if stdout is None else None
                display.tell(greeting(cluster.topology.model, names, cluster.url, log_dir, missing))
                if on_ready is not None and on_ready(cluster):
                    stop.set()
            while not stop.is_set():
                cluster.poll()
                if not cluster.alive(ROUTER) and not options.restart:
                    return 1
                stop.wait(POLL_S)
            display.tell("stopping: waiting for running requests to finish")
            return 0
        except StartFailed as error:
            if stop.is_set():
                return 0
            display.close()
            display.tell(error.message)
            return 1
        finally:
            cluster.stop()
            if not (options.log_dir or topology.log.dir) and not cluster.supervisor.remove_logs():
                display.tell(f"the logs stay in {cluster.log_dir}")


def _with_default_model(topology: Topology, say: Callable[[str], None]) -> Topology:
    """Return the topology with the embedded model."""
    say(f"no model given (--model PATH): {TINY_MODEL_NAME} answers, which only knows lists of facts")
    name = topology.model.served_name or TINY_MODEL_NAME
    model = msgspec.structs.replace(topology.model, path=str(TINY_MODEL_DIR), served_name=name)
    return msgspec.structs.replace(topology, model=model)
