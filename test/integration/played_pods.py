"""Kubernetes, as far as a roll-out of our chart goes: pods of its manifests on hosts made of network namespaces.

A pod gets an address that none had before, its containers' own command, environment and temporary folder, its probes
and its hook. `PlayedPods` is what the cluster would be: it starts pods and waits until they are ready, has names (a
file in the place of /etc/hosts, which all pods read), the endpoints of a Service, and ends pods as a kubelet does: out
of the endpoints, hook, SIGTERM, and SIGKILL when the grace is over. It rolls all workloads out at the same time.

Clients notice only after `LAG_S` that a pod has gone from the endpoints, as where kube-proxy tells the nodes. Not
played: schedulers, volumes, limits, a NetworkPolicy, names that lag.
"""

from __future__ import annotations

import base64
import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from network import Network
from nursery import DESCRIPTOR, Nursery
from serve_process import ServeProcess
from support.router_process import wait_until

from chitu.launch.plan import Entries

Manifest = Mapping[str, Any]
HEALTHY = range(200, 400)
READY_S = 120.0
PERIOD_S = 0.2
LAG_S = 1.0
NAMES_BYTES = 4096
COMPONENT = "app.kubernetes.io/component"


@dataclass
class Pod:
    name: str
    index: int
    host: str
    address: str
    spec: Manifest
    process: ServeProcess
    environment: dict[str, str]
    ends_since_s: float | None = None
    is_ready: bool = False
    exit_code: int | None = None
    """Of the container; None while it runs."""
    was_killed: bool = False
    hook_code: int | None = None
    """Exit code of the hook; None without one."""
    hook_lines: list[str] = field(default_factory=list)

    @property
    def container(self) -> Manifest:
        (only,) = self.spec["containers"]
        return only  # type: ignore[no-any-return]


@dataclass
class Workload:
    """A Deployment or a StatefulSet."""

    manifest: Manifest
    pods: list[Pod] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def kind(self) -> str:
        return str(self.manifest["kind"])

    @property
    def replicas(self) -> int:
        return int(self.manifest["spec"]["replicas"])

    @property
    def component(self) -> str:
        return str(self.manifest["spec"]["template"]["metadata"]["labels"][COMPONENT])


class PlayedPods:
    """`with PlayedPods(folder, network, hosts, manifests, namespace) as pods:` starts all workloads and waits until
    they are ready. Each pod takes the next of `hosts`."""

    def __init__(
        self, folder: Path, net: Network, hosts: Sequence[str], manifests: Sequence[Manifest], namespace: str
    ) -> None:
        self._folder, self._net, self._hosts, self._namespace = folder, net, list(hosts), namespace
        kinds: dict[str, list[Manifest]] = {}
        for one in manifests:
            kinds.setdefault(one["kind"], []).append(one)
        self._secrets = {one["metadata"]["name"]: one["data"] for one in kinds["Secret"]}
        self.workloads = [Workload(one) for one in (*kinds["StatefulSet"], *kinds["Deployment"])]
        (self._headless,) = (one["metadata"]["name"] for one in kinds["Service"] if "clusterIP" in one["spec"])
        self.ended: list[Pod] = []
        self._names = folder / "hosts"
        self._lock = threading.RLock()
        self._stack = contextlib.ExitStack()
        self._stopped = threading.Event()
        self._number = 0

    def __enter__(self) -> PlayedPods:
        self._write_names()
        self._nursery = Nursery("", hosts=self._names)
        with self._stack:
            for workload in self.workloads:
                for index in range(workload.replicas):
                    self._start(workload, index)
            probes = threading.Thread(target=self._probe_all)
            probes.start()
            self._stack.callback(probes.join)
            self._stack.callback(self._stopped.set)
            self._wait_ready([pod for workload in self.workloads for pod in workload.pods])
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    # ---------------------------------------------------------------------------------------------------------- seen

    def endpoints(self, component: str) -> list[Pod]:
        """Return the pods to which a Service of the component sends: those that are ready and not ending."""
        now_s = time.monotonic()
        with self._lock:
            pods = [pod for each in self.workloads if each.component == component for pod in each.pods]
            late = [pod for pod in pods if pod.ends_since_s is not None and now_s < pod.ends_since_s + LAG_S]
            return [*late, *(pod for pod in pods if pod.is_ready and pod.ends_since_s is None)]

    def said(self) -> str:
        pods = [*self.ended, *(pod for workload in self.workloads for pod in workload.pods)]
        parts = []
        for pod in pods:
            with contextlib.suppress(AssertionError):
                pod.process.wait_line("no such line", 0.01)
            parts.append(
                f"{pod.name} at {pod.address}, exit code {pod.exit_code}: " + "\n".join(pod.process.lines[-12:])
            )
        return "\n\n".join(parts)

    # ------------------------------------------------------------------------------------------------------ roll-out

    def roll_out(self) -> None:
        """Replace the pods of all workloads at the same time, each as its strategy says. Return when all new ones are
        ready and all old ones have ended."""
        with ThreadPoolExecutor(len(self.workloads)) as pool:
            for done in [pool.submit(self._roll_out, workload) for workload in self.workloads]:
                done.result()

    def _roll_out(self, workload: Workload) -> None:
        old = list(workload.pods)
        if (
            workload.kind == "StatefulSet"
        ):  # the last first; the new one has the name of the old one, which must be gone
            for pod in sorted(old, key=lambda pod: -pod.index):
                self._end(workload, pod)
                self._wait_ready([self._start(workload, pod.index)])
            return
        limits = workload.manifest["spec"]["strategy"]["rollingUpdate"]
        assert (limits["maxSurge"], limits["maxUnavailable"]) == (1, 0), "what is played"
        with ThreadPoolExecutor(len(old)) as pool:
            ending: list[Future[None]] = []
            for pod in old:
                self._wait_ready([self._start(workload, pod.index)])
                ending.append(pool.submit(self._end, workload, pod))
            for done in ending:
                done.result()

    # ------------------------------------------------------------------------------------------------------- kubelet

    def _start(self, workload: Workload, index: int) -> Pod:
        with self._lock:
            self._number += 1
            is_set = workload.kind == "StatefulSet"
            name = f"{workload.name}-{index}" if is_set else f"{workload.name}-{self._number}"
            host = self._hosts.pop(0)
            address = self._net.address(host)
            spec = workload.manifest["spec"]["template"]["spec"]
            folder = self._folder / f"{name}.{self._number}"
            folder.mkdir()
            (container,) = spec["containers"]
            given = {"POD_IP": address, "metadata.labels['apps.kubernetes.io/pod-index']": str(index)}
            environment = {"TMPDIR": str(folder), **dict(self._environment(container, given))}
            argv = self._argv(host, [*container["command"], *container["args"]], environment)
            process = self._stack.enter_context(ServeProcess(argv, environment, folder, self._popen))
            pod = Pod(name, index, host, address, spec, process, environment)
            workload.pods.append(pod)
            self._write_names()
        return pod

    def _environment(self, container: Manifest, fields: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        for one in container["env"]:
            source = one.get("valueFrom", {})
            if "fieldRef" in source:
                path = source["fieldRef"]["fieldPath"]
                yield one["name"], fields["POD_IP" if path == "status.podIP" else path]
            elif "secretKeyRef" in source:
                data, key = self._secrets[source["secretKeyRef"]["name"]], source["secretKeyRef"]["key"]
                if key in data:
                    yield one["name"], base64.b64decode(data[key]).decode()
                else:
                    assert source["secretKeyRef"].get("optional"), f"no {key} in the Secret"
            else:
                yield one["name"], one["value"]

    def _argv(self, host: str, words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        program, *rest = (re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word) for word in words)
        assert program == "chitu", program
        entries = Entries()
        own = ("forked_chitu", entries.router, entries.scheduler, "direct")
        return self._net.argv(host, [sys.executable, "-m", *own, *rest])

    def _popen(self, argv: Sequence[str], **options: Any) -> Any:
        own = self._nursery
        environment = {**options.pop("env"), DESCRIPTOR: str(own.fileno())}
        return own.popen(argv, env=environment, pass_fds=[own.fileno()], **options)

    def _end(self, workload: Workload, pod: Pod) -> None:
        pod.ends_since_s = time.monotonic()
        end_s = pod.ends_since_s + pod.spec["terminationGracePeriodSeconds"]
        hook = pod.container.get("lifecycle", {}).get("preStop")
        process = pod.process.process
        if hook is not None:
            argv = self._argv(pod.host, hook["exec"]["command"], pod.environment)
            run = ServeProcess(argv, pod.environment, self._folder, self._popen)
            pod.hook_code = run.process.wait(_left(end_s))
            with contextlib.suppress(AssertionError):
                run.wait_line("no such line", 0.1)
            pod.hook_lines = run.lines
        process.send_signal(signal.SIGTERM)
        try:
            pod.exit_code = process.wait(_left(end_s))
        except subprocess.TimeoutExpired:
            pod.was_killed = True
            process.kill()
        with self._lock:
            workload.pods.remove(pod)
            self.ended.append(pod)
            self._write_names()

    def _probe_all(self) -> None:
        """Do what the kubelets do until the end: ask the readiness of each pod."""
        while not self._stopped.wait(PERIOD_S):
            with self._lock:
                pods = [pod for workload in self.workloads for pod in workload.pods]
            for pod in pods:
                pod.is_ready = self._answers(pod, "readinessProbe")

    def _answers(self, pod: Pod, probe: str) -> bool:
        asked = pod.container[probe]["httpGet"]
        (port,) = (each["containerPort"] for each in pod.container["ports"] if each["name"] == asked["port"])
        with self._net.inside(pod.host), contextlib.suppress(httpx.TransportError):
            url = f"http://{pod.address}:{port}{asked['path']}"
            return httpx.get(url, timeout=2.0, trust_env=False).status_code in HEALTHY
        return False

    def _wait_ready(self, pods: Sequence[Pod]) -> None:
        def are_ready() -> bool:
            ended = [pod.name for pod in pods if pod.process.process.poll() is not None]
            assert not ended, f"{ended} have ended\n{self.said()}"
            return all(pod.is_ready for pod in pods)

        wait_until(are_ready, READY_S, self.said)

    def _write_names(self) -> None:
        """Write what the cluster's name server would say: also of pods that are not ready, as the headless Service
        wants it."""
        lines = ["127.0.0.1 localhost"]
        for workload in self.workloads:
            for pod in workload.pods if workload.component == "router" else ():
                domain = f"{self._headless}.{self._namespace}.svc.cluster.local"
                lines.append(f"{pod.address} {pod.name}.{domain} {domain} {self._headless}")
        text = "\n".join(lines).encode()
        assert len(text) < NAMES_BYTES
        with self._names.open("r+b" if self._names.exists() else "wb") as file:  # in place: it is mounted
            file.write(text.ljust(NAMES_BYTES, b"\n"))  # and with one call, since others read it


def _left(end_s: float) -> float:
    return max(0.0, end_s - time.monotonic())
