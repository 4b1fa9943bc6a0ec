"""The chart's manifests, played: a roll-out of all roles under load loses no answer and changes none."""

from __future__ import annotations

import itertools
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from network import Network
from played_pods import PlayedPods

from chitu.tools.make_model import make_model

helm = pytest.importorskip("helm_python", reason="script/setup.sh --dev installs it")

pytestmark = pytest.mark.timeout(600)
CHART = Path(__file__).parents[2] / "deploy" / "helm" / "chitu"
NAMESPACE = "llm"
GRACE_S = 30
DRAIN = {"delaySeconds": 3, "seconds": GRACE_S - 3 - 5}
SETTINGS = ["cache.num_pages=256", "scheduler.threads=1"]
PROMPTS = [[5 + number, *range(7, 7 + 9 * number)] for number in range(1, 6)]
LENGTHS = (3, 40, 160)
CLIENTS = 4
REQUEST_S = 60.0
REST_S = 0.1
"""Rest of a client between two requests: most of a roll-out waits for pods."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", layers=2)


def manifests(model: Path, **values: Any) -> list[Any]:
    given = {"model": {"path": str(model), "servedName": "m"}, "settings": SETTINGS, **values}
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values=given, name="serve", namespace=NAMESPACE)
    return [one for text in texts.values() if "kind:" in text for one in yaml.safe_load_all(text) if one]


class Load:
    """Clients that ask the Service all the time, and repeat nothing."""

    def __init__(self, net: Network, pods: PlayedPods) -> None:
        self._net, self._pods = net, pods
        self._turn = itertools.count()
        self.expected: dict[str, str] = {}
        self.wrong: list[str] = []
        self.num_right = 0
        for body in self._bodies():
            self.expected[json.dumps(body)] = self._ask(body)

    def _bodies(self) -> Iterator[dict[str, Any]]:
        for prompt, tokens in itertools.product(PROMPTS, LENGTHS):
            yield {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}

    def _ask(self, body: dict[str, Any]) -> str:
        """Return the text of the answer; every other request is streamed."""
        endpoints = self._pods.endpoints("router")
        assert endpoints, "no router is ready"
        turn = next(self._turn)
        url = f"http://{endpoints[turn % len(endpoints)].address}:21003/v1/completions"
        with self._net.inside("clients"), httpx.Client(timeout=REQUEST_S, trust_env=False) as client:
            answer = client.post(url, json={**body, "stream": turn % 2 == 1})
        assert answer.status_code == 200, answer.text
        if not turn % 2:
            return str(answer.json()["choices"][0]["text"])
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]", answer.text[-300:]
        return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])

    def _run(self, number: int, stopped: threading.Event) -> None:
        for body in itertools.islice(itertools.cycle(self._bodies()), number, None):
            if stopped.wait(REST_S):
                return
            try:
                text = self._ask(body)
            except (AssertionError, httpx.HTTPError) as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
                continue
            if text == self.expected[json.dumps(body)]:
                self.num_right += 1
            else:
                self.wrong.append(f"{body}: {text}")

    @contextmanager
    def running(self) -> Iterator[None]:
        stopped = threading.Event()
        threads = [threading.Thread(target=self._run, args=(3 * number, stopped)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stopped.set()
            for thread in threads:
                thread.join()


@contextmanager
def cluster(folder: Path, given: list[Any], num_hosts: int) -> Iterator[tuple[PlayedPods, Load]]:
    hosts = [f"pod{number}" for number in range(num_hosts)]
    with Network(["clients", *hosts]) as net, PlayedPods(folder, net, hosts, given, NAMESPACE) as pods:
        yield pods, Load(net, pods)


def without_hooks(given: list[Any]) -> list[Any]:
    for one in given:
        for container in one.get("spec", {}).get("template", {}).get("spec", {}).get("containers", ()):
            container.pop("lifecycle", None)
    return given


@pytest.mark.parametrize(
    ("replicas", "times", "has_hooks"),
    [
        pytest.param(1, 1, True, marks=pytest.mark.by_hand),
        pytest.param(2, 3, True, marks=pytest.mark.by_hand),
        pytest.param(2, 3, False, marks=pytest.mark.by_hand),
    ],
)
def test_a_roll_out_of_all_roles_loses_nothing(
    replicas: int, times: int, has_hooks: bool, model: Path, tmp_path: Path
) -> None:
    """Each pod is at a new address afterwards, and was replaced before its 30 s of grace were over; also where all that
    an instance gets is SIGTERM."""
    roles = {role: {"replicas": replicas} for role in ("prefill", "decode")}
    given = manifests(model, drain=DRAIN, router={"replicas": 2}, roles=roles)
    num_pods = 2 + 2 * replicas
    with cluster(tmp_path, given if has_hooks else without_hooks(given), num_pods * (1 + times)) as (pods, load):
        for turn in range(1, times + 1):
            before = {pod.address for workload in pods.workloads for pod in workload.pods}
            with load.running():
                pods.roll_out()
            after = {pod.address for workload in pods.workloads for pod in workload.pods}
            assert not load.wrong, f"{load.num_right} right, {len(load.wrong)} not: {load.wrong[:3]}\n{pods.said()}"
            assert load.num_right > 20 * turn and len(after) == num_pods and not before & after
        assert {pod.spec["terminationGracePeriodSeconds"] for pod in pods.ended} == {GRACE_S}
        assert len(pods.ended) == num_pods * times
        # One that was drained ends by itself, so the signal may meet an interpreter that is about to end.
        codes = {0, -signal.SIGTERM} if has_hooks else {0}
        assert not any(pod.was_killed or pod.exit_code not in codes for pod in pods.ended), pods.said()
        assert {pod.hook_code for pod in pods.ended} == ({None, 0} if has_hooks else {None}), pods.said()
