"""Requests outlive their router: it ends in the middle of them, its successor on the same folder continues them, and
clients that reconnect with their ids read the rest. The answers are those of an uninterrupted run."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from nursery import FORKED
from support.router_process import wait_until
from thinking_model import make_thinking_model

from chitu import cli
from chitu.config.cluster_key import cluster_key_of, with_api_keys
from chitu.config.load import load_topology
from chitu.config.topology import instances, on_one_host, router_ports
from chitu.launch.local import LocalCluster
from chitu.process.child import ROUTER
from chitu.protocol.kept_request import KeptRequest, pack, unpack

pytestmark = pytest.mark.timeout(300)

TOKENS = 600
KEYS = ["key-of-one", "key-of-two"]
COMMON = {"model": "m", "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "count to ten"}]}
PROMPT = [7 * k % 97 + 5 for k in range(50)]
# Few candidates: a draw near the boundary of two depends on the last bits of logits, which differ in a continuation.
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": PROMPT, "temperature": 0},
    "seeded": {"prompt": PROMPT, "temperature": 1.0, "top_k": 4},
    "whole": {"prompt": PROMPT, "temperature": 1.0, "top_k": 4, "stream": False, "logprobs": 2},
    "penalties": {
        "prompt": PROMPT,
        "temperature": 0.9,
        "top_k": 4,
        "frequency_penalty": 0.3,
        "top_p": 0.9,
        "logprobs": 1,
    },
    "chat": {**CHAT, "temperature": 0.8, "top_k": 4, "logprobs": True, "stream_options": {"include_usage": True}},
    "grammar": {
        "prompt": PROMPT,
        "temperature": 1.0,
        "guided_regex": "([a-f0-9]{4} )*",
        "ignore_eos": None,
        "min_tokens": TOKENS,
    },
}
OTHERS = {
    "unread": {"prompt": PROMPT, "temperature": 0},
    "read": {"prompt": PROMPT, "temperature": 0},
    "aborted": {"prompt": PROMPT, "max_tokens": 3000},
}
REFUSED = {
    "n": {"prompt": PROMPT, "n": 2},
    "return_proof": {"prompt": PROMPT, "return_proof": True},
}


def settings(model: Path, folder: Path, topology_name: str = "pd_disagg_1p1d_local.yaml") -> list[str]:
    topology = on_one_host(load_topology(topology_name))
    ports = [f"{key}=0" for key in router_ports(topology.dp_config.router)]
    ports += [f"{instance.key}.port=0" for instance in instances(topology)]
    keys = [f"dp_config.router.kept_requests.dir={folder}", "dp_config.router.pd_disaggregation.deadlines.drain_s=40"]
    return [f"model.path={model}", "model.served_name=m", "cache.num_pages=2000", "scheduler.threads=1", *ports, *keys]


def auth(key: str = KEYS[0]) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@dataclass
class Answer:
    """Events and answer that a client has read."""

    events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Events with their numbers; 0 for an event without a number."""
    status: int = 0
    whole: dict[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> dict[str, Any]:
        last = self.whole if self.whole else self.events[-1][1]
        return dict(last.get("error", {}))

    @property
    def numbered(self) -> list[tuple[int, dict[str, Any]]]:
        return [event for event in self.events if event[0]]

    def told(self) -> dict[str, Any]:
        """Return the parts in which two answers must agree."""
        records = [self.whole] if self.whole else [record for _, record in self.numbered or self.events]
        choices = [choice for record in records for choice in record.get("choices", ())]
        texts = [c.get("text") or (c.get("message") or c.get("delta") or {}).get("content") or "" for c in choices]
        usages = [record["usage"] for record in records if record.get("usage")]
        return {
            "tokens": [token for choice in choices for token in choice.get("token_ids") or ()],
            "text": "".join(texts),
            "logprobs": [each for choice in choices for each in logprobs_of(choice.get("logprobs"))],
            "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
            "usage": [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages],
        }


class Near(float):
    """A logprob with a tolerance. After a restart of the router its last bits differ: a prompt's are computed in
    another order."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-4

    __hash__ = None  # type: ignore[assignment]


def logprobs_of(found: dict[str, Any] | None) -> list[Any]:
    """Return the logprob of each token. The last token may or may not share its event with the end."""
    if not found:
        return []
    return list(rounded(found.get("content") or [*zip(found["tokens"], found["token_logprobs"], strict=True)]))


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    return Near(value) if isinstance(value, float) else value


def read(url: str, answer: Answer, method: str, path: str, **options: Any) -> Answer:
    with httpx.stream(method, f"{url}{path}", timeout=120.0, trust_env=False, **options) as response:
        answer.status = response.status_code
        if "event-stream" not in response.headers.get("content-type", ""):
            answer.whole = json.loads(response.read())
            return answer
        number = 0
        for line in response.iter_lines():
            if line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("data: {"):
                answer.events.append((number, json.loads(line[6:])))
            elif not line:
                number = 0
    return answer


def ask(url: str, name: str, body: dict[str, Any], answer: Answer) -> Answer:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    headers = {**auth(), "x-request-id": name}
    return read(url, answer, "POST", path, json={**COMMON, **body}, headers=headers)


def kept(folder: Path) -> dict[str, KeptRequest]:
    records = [unpack(path.read_bytes()) for path in folder.glob("*.request")]
    return {record.request_id: record for record in records}


@dataclass
class Interrupted:
    folder: Path
    before: dict[str, Answer]
    records: dict[str, KeptRequest]
    cluster: LocalCluster
    """Cluster of the router's successor."""
    aborts: list[str] = field(default_factory=list)
    """Errors of reading `aborted` after another tenant has aborted it, and after its own has."""

    def get(self, name: str, behind: int = 0, key: str = KEYS[0]) -> Answer:
        headers = {**auth(key), **({"last-event-id": str(behind)} if behind else {})}
        return read(self.cluster.url, Answer(), "GET", f"/v1/requests/{name}", headers=headers)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_thinking_model(tmp_path_factory.mktemp("models") / "qwen3", heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def interrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interrupted]:
    """End a router when each stream has 40 events, and yield its successor."""
    folder = tmp_path_factory.mktemp("shared") / "kept"
    topology = with_api_keys(load_topology("pd_disagg_1p1d_local.yaml", settings(model, folder)), tuple(KEYS))
    bodies = {**BODIES, **OTHERS, **REFUSED}
    answers = {name: Answer() for name in bodies}
    with LocalCluster(topology, entries=FORKED) as first, concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        first.wait_ready(200)
        asked = [pool.submit(ask, first.url, name, body, answers[name]) for name, body in bodies.items()]
        streams = [answer for name, answer in answers.items() if bodies[name].get("stream", True)]
        wait_until(lambda: all(len(a.events) >= 40 or a.whole for a in streams), 100, lambda: answers)
        assert not any(answer.whole for answer in answers.values()), [a.whole for a in answers.values()]
        first.stop()
        for each in asked:
            each.result(30)
    records = kept(folder)
    # Files that a router must survive: one cut short, one modified, and one of another model.
    sound = pack(records["greedy"])
    (folder / "short.request").write_bytes(sound[: len(sound) // 2])
    (folder / "short.request").chmod(0o600)
    (folder / "changed.request").write_bytes(sound.replace(b'"finish":""', b'"finish":"stop"'))
    (folder / "changed.request").chmod(0o600)
    foreign = pack(
        KeptRequest(**{**{f: getattr(records["greedy"], f) for f in KeptRequest.__struct_fields__}, "model_hash": "x"})
    )
    (folder / "foreign.request").write_bytes(foreign)
    (folder / "foreign.request").chmod(0o600)
    with LocalCluster(topology, entries=FORKED) as second:
        second.wait_ready(200)
        wait_until_taken_up(folder)
        interrupted = Interrupted(folder, answers, records, second)
        for key in (KEYS[1], KEYS[0]):  # now: it has few seconds to run
            reply = httpx.post(
                f"{second.url}/abort_request", json={"rid": "aborted"}, headers=auth(key), timeout=10, trust_env=False
            )
            assert reply.status_code == 200, reply.text
            interrupted.aborts.append(interrupted.get("aborted", key=key).error.get("code", ""))
        yield interrupted


def wait_until_taken_up(folder: Path) -> None:
    def left() -> list[str]:
        return [path.name for path in folder.glob("*.request")]

    wait_until(lambda: left() == ["foreign.request"], 20, left)


@pytest.fixture(scope="module")
def undisturbed(interrupted: Interrupted) -> dict[str, Answer]:
    """Return the same answers from uninterrupted runs, with the same seeds. All run at once: a step of six takes hardly
    longer than a step of one."""
    seeds = {name: interrupted.records[name].sampling.seed for name in BODIES}
    with concurrent.futures.ThreadPoolExecutor(len(BODIES)) as pool:
        asked = {
            name: pool.submit(ask, interrupted.cluster.url, f"x-{name}", {**body, "seed": seeds[name]}, Answer())
            for name, body in BODIES.items()
        }
        return {name: each.result() for name, each in asked.items()}


@pytest.mark.parametrize("name", BODIES)
def test_the_rest_is_that_of_a_run_without_an_end(
    interrupted: Interrupted, undisturbed: dict[str, Answer], name: str
) -> None:
    before, record = interrupted.before[name], interrupted.records[name]
    assert 0 < len(record.token_ids) < TOKENS
    assert before.error["code"] == "request_kept" and f"/v1/requests/{name}" in before.error["message"]
    rest = interrupted.get(name, len(before.numbered))
    again = interrupted.get(name)
    whole = undisturbed[name]
    found, wanted = again.told()["tokens"], whole.told()["tokens"]
    same = next((k for k, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), len(wanted))
    assert found == wanted, f"{same} tokens are the same, {len(record.token_ids)} were kept: {found} {wanted}"
    assert again.told() == whole.told()
    assert len(whole.told()["tokens"]) == TOKENS
    if before.status == 200:
        joined = Answer(events=before.numbered + rest.numbered)
        assert [number for number, _ in joined.events] == list(range(1, len(joined.events) + 1))
        assert joined.told() == whole.told()
        assert len({record["id"] for _, record in joined.events}) == 1
    else:
        assert before.status == 503 and rest.told() == whole.told()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_has_the_time_of_a_drain(interrupted: Interrupted, name: str) -> None:
    assert name not in interrupted.records
    assert set(interrupted.before[name].told()["finish"]) == {"length"}, interrupted.before[name].events[-1]


def test_an_answer_is_its_askers_alone(interrupted: Interrupted) -> None:
    for stranger in (interrupted.get("greedy", key=KEYS[1]), interrupted.get("nobody")):
        assert (stranger.status, stranger.error["code"]) == (404, "unknown_request")
    assert interrupted.get("cmpl-greedy").status == 200
    posted = read(interrupted.cluster.url, Answer(), "POST", "/v1/requests/greedy", headers=auth())
    assert (posted.status, posted.error["message"]) == (405, "/v1/requests/greedy accepts GET, not POST")
    bad = read(interrupted.cluster.url, Answer(), "GET", "/v1/requests/greedy?starting_after=-1", headers=auth())
    assert bad.status == 400 and "starting_after" in bad.error["message"]


def test_bad_files_are_put_aside_by_name(interrupted: Interrupted) -> None:
    logs = interrupted.cluster.logs("router")
    for name in ("short", "changed"):
        assert (interrupted.folder / f"{name}.request.damaged").exists() and f"{name}.request: refused" in logs, logs
    assert "foreign.request of kept requests (greedy) is skipped" in logs or "foreign.request" in logs
    assert (interrupted.folder / "foreign.request").exists()


def test_one_that_is_aborted_goes_on_no_more(interrupted: Interrupted) -> None:
    assert interrupted.aborts == ["unknown_request", "cancelled"]


@pytest.mark.by_hand
def test_a_snapshot_goes_on_elsewhere_and_its_request_where_it_is(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It continues on one undivided instance of two ranks, which finds the prompt's pages where P of one rank left
    them."""
    disk = [f"cache.disk.path={tmp_path / 'disk'}", "cache.host_bytes=50000000", "cache.load_timeout_s=60"]
    key = "dp_config.router.unified_schedulers.0"
    two = [f"{key}.tp_size=2", f"{key}.devices=[cpu,cpu]"]
    here = load_topology("pd_disagg_1p1d_local.yaml", [*settings(model, tmp_path / "here"), *disk])
    there = load_topology(
        "unified_local.yaml", [*settings(model, tmp_path / "there", "unified_local.yaml"), *disk, *two]
    )
    body = {**BODIES["seeded"], "max_tokens": 1000, "prompt": [*range(5, 5 + 16 * 8)]}
    body["stream_options"] = {"include_usage": True}
    file, answer = tmp_path / "one.request", Answer()
    with LocalCluster(here, entries=FORKED) as first, LocalCluster(there, entries=FORKED) as second:
        first.wait_ready(200)
        second.wait_ready(200)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, first.url, "one", body, answer)
            wait_until(lambda: len(answer.events) >= 40, 60, lambda: answer)
            wait_until(lambda: len(list((tmp_path / "disk").glob("*/*.kv"))) >= 8, 60, "pages on disk")
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("CHITU_CLUSTER_KEY", cluster_key_of(first.topology))
                assert cli.main(["snapshot", "one", str(file), "--url", first.url]) == 0
                assert cli.main(["snapshot", "nobody", str(file) + ".no", "--url", first.url]) == 1
            record = unpack(file.read_bytes())
            asked.result(100)
        assert file.stat().st_mode & 0o777 == 0o600 and 40 <= len(record.token_ids) < 1000, capsys.readouterr()
        assert cli.main(["replay", str(file), "--url", second.url]) == 0, capsys.readouterr()
        (tmp_path / "there").mkdir(exist_ok=True)
        os.rename(file, tmp_path / "there" / file.name)
        found = read(second.url, Answer(), "GET", "/v1/requests/one")
    assert (found.told(), len(found.told()["tokens"])) == (answer.told(), 1000)
    usage = [event["usage"] for _, event in found.events if event.get("usage")][-1]
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(body["prompt"]), second.logs("U0")[-3000:]


def test_what_nobody_read_outlives_the_next_router_too(interrupted: Interrupted) -> None:
    assert set(interrupted.get("read").told()["finish"]) == {"length"}
    cluster = interrupted.cluster
    cluster.kill(ROUTER, signal.SIGTERM)
    cluster.wait_exit(ROUTER)
    again = kept(interrupted.folder)
    cluster.restart(ROUTER)  # for the other tests
    cluster.wait_ready()
    wait_until_taken_up(interrupted.folder)
    assert "unread" in again and "read" not in again
    before, after = interrupted.records["unread"], again["unread"]
    assert len(after.token_ids) > len(before.token_ids)
    assert after.token_ids[: len(before.token_ids)] == before.token_ids
    assert (after.expires_s, after.created_s) == (before.expires_s, before.created_s)
    assert (after.finish == "length") == (len(after.token_ids) == TOKENS)
