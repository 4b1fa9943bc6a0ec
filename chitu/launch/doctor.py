"""`chitu doctor`: checks whether this machine, or all nodes of a topology, can serve it. Called by the command line
only.

Alone it checks this machine as `chitu serve` would use it. With `--hosts` and a node index, which Slurm sets itself, it
runs on all nodes at once: they meet (`doctor_meeting.py`), and the router's node judges and prints. Every node exits
with 0 without an error, 1 with one, 2 for a topology that cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from chitu.config.load import load_topology, pd_master_addr, slurm_node
from chitu.config.schema import Topology
from chitu.config.topology import bound_ports, host_names, on_one_host
from chitu.config.topology_checks import problems
from chitu.errors import ConfigError
from chitu.launch.addresses import address_problems, addresses_of
from chitu.launch.doctor_checks import check_cluster, check_node
from chitu.launch.doctor_meeting import Lead, NotMet, follow, hold
from chitu.launch.node_facts import NodeFacts, gather
from chitu.launch.plan import host_overrides, launch_problems
from chitu.launch.preflight import Finding, Level, look_at_model
from chitu.launch.slurm import expand_nodelist

WAIT_S = 30.0
"""Time to wait for the other nodes."""
MARKS = {Level.OK: "ok   ", Level.WARNING: "WARN ", Level.ERROR: "ERROR"}


def doctor(name: str | None, overrides: Sequence[str], hosts: Sequence[str] | None, index: int | None) -> int:
    """Check and return the exit code. `hosts` replace the topology's; `index` is this node's index among them."""
    topology = load_topology(name, overrides)
    slurm = slurm_node()
    if slurm is not None and len(host_names(topology)) > 1:
        hosts = hosts or expand_nodelist(slurm[1])
        index = slurm[0] if index is None else index
    if hosts is None and index is None:
        elsewhere = [Finding(Level.WARNING, "hosts", problem) for problem in address_problems(topology)]
        topology = on_one_host(topology)
        return _report(topology, [gather(topology, topology.dp_config.router.host)], elsewhere)
    if hosts is not None:
        topology = load_topology(name, [*overrides, *host_overrides(topology, addresses_of(hosts))])
    names = host_names(topology)
    if index is None or not 0 <= index < len(names):
        raise ConfigError(
            f"run it on each of {', '.join(names)} at once, with --node-index 0 to {len(names) - 1} (srun gives that "
            "by itself)"
        )
    return _meet(topology, names, index)


def _meet(topology: Topology, names: Sequence[str], index: int) -> int:
    facts = gather(topology, names[index])
    meeting_port = topology.dp_config.router.pd_disaggregation.coordination_port
    held = hold(facts.binds)
    try:
        if index:
            try:
                return follow((topology.dp_config.router.host, meeting_port), facts, WAIT_S)
            except NotMet as error:
                _tell(Finding(Level.ERROR, "meeting", error.message))
                _report(topology, [facts])
                return 1
        if meeting_port not in held:
            return _report(topology, [facts])
        lead = Lead(held[meeting_port], WAIT_S)
        ports = {host: [port for _, where, port in bound_ports(topology) if port and where == host] for host in names}
        code = 1
        try:
            code = _report(topology, lead.gather(facts, ports))
        finally:
            lead.dismiss(code)
        return code
    finally:
        for listener in held.values():
            listener.close()


def _report(topology: Topology, nodes: Sequence[NodeFacts], more: Sequence[Finding] = ()) -> int:
    """Print all findings, and `more` about the topology. Return 1 if one is an error, else 0."""
    spec, _ = look_at_model(topology)
    code = 0
    sections = [("topology", [*_of_topology(topology, nodes), *more])]
    sections += [(_title(node), check_node(topology, spec, node)) for node in nodes]
    sections.append(("between the nodes", check_cluster(topology, nodes)))
    for title, findings in sections:
        if findings:
            print(title)
        for finding in findings:
            _tell(finding)
            code = max(code, finding.level is Level.ERROR)
    return int(code)


def _of_topology(topology: Topology, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    needs_model = bool(topology.model.path)
    found = chain(problems(topology, pd_master_addr(), need_model=needs_model), launch_problems(topology))
    for problem in found:
        yield Finding(Level.ERROR, "topology", problem)


def _title(node: NodeFacts) -> str:
    return node.host if node.name in ("", node.host) else f"{node.host} ({node.name})"


def _tell(finding: Finding) -> None:
    print(f"  {MARKS[finding.level]} {finding.what:16} {finding.says}")
    if finding.cure and finding.level is not Level.OK:
        print(f"        {'':16} cure: {finding.cure}")
