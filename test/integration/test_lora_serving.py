"""LoRA adapters loaded and unloaded while two pairs serve behind two routers, one P of two ranks: answers are those of
`transformers` with the adapter that the request began with, whoever dies meanwhile, and base requests lose nothing."""

from __future__ import annotations

import json
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from chaos_cluster import ANY_PORTS, ROUTER
from nursery import FORKED
from safetensors.torch import load_file, save_file
from support.router_process import wait_until
from test_lora import SQL, TONE, linear_layers, merged, sql_layer, tone_layer, write_adapter

from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.net.curve import derive
from chitu.tools.make_model import make_model

pytestmark = pytest.mark.timeout(400)
LOGPROB_NATS = 1e-4
PROMPT = list(range(40, 110))
REST_S = 0.03
"""Rest of a client between two requests of many."""
LONG = 500
"""Tokens of a request during which others come and go."""
FORMS: dict[str, tuple[dict[str, Any], Any]] = {"sql": (SQL, sql_layer), "tone": (TONE, tone_layer)}
PAIRS = {f"P{p}-D{d}" for p in (0, 1) for d in (0, 1)}


@dataclass
class Serving:
    cluster: LocalCluster
    folders: dict[str, Path]
    other: Path
    """Folder of other weights of the model."""
    references: dict[str, transformers.PreTrainedModel] = field(default_factory=dict)
    """By content: `m` is the model alone, `tone2` another content for the name `tone`."""

    @property
    def urls(self) -> list[str]:
        return list(self.cluster.router_urls.values())

    @property
    def headers(self) -> dict[str, str]:
        secrets = derive(cluster_key_of(self.cluster.topology))
        assert secrets is not None
        return {"Authorization": f"Bearer {secrets.token}"}

    def change(self, at: int = 0, **body: object) -> httpx.Response:
        return httpx.post(
            f"{self.urls[at]}/admin/adapters", json=body, headers=self.headers, trust_env=False, timeout=120
        )

    def changed(self, at: int = 0, **body: object) -> dict[str, Any]:
        reply = self.change(at, **body)
        assert reply.status_code == 200, reply.text
        state: dict[str, Any] = reply.json()
        assert state["missing"] == []
        return state

    def state(self, at: int = 0) -> dict[str, Any]:
        reply = httpx.get(f"{self.urls[at]}/admin/adapters", headers=self.headers, trust_env=False, timeout=30)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def reset(self) -> None:
        """Have the cluster serve what it was started with: sql."""
        self.wait_whole()
        names = [each["name"] for each in self.state()["adapters"]]
        self.changed(load={"sql": str(self.folders["sql"])}, unload=[name for name in names if name != "sql"])

    def wait_whole(self) -> None:
        for at in (0, 1):

            def is_whole(at: int = at) -> bool:
                found = httpx.get(f"{self.urls[at]}/cluster", trust_env=False, timeout=30).json()["instances"]
                state = self.state(at)
                return [one["status"] for one in found] == ["up"] * 4 and not state["missing"] + state["leaving"]

            wait_until(is_whole, 90, lambda at=at: str(self.state(at)))  # type: ignore[misc]

    def names(self, at: int) -> list[str]:
        cards = httpx.get(f"{self.urls[at]}/v1/models", trust_env=False, timeout=30).json()["data"]
        return [card["id"] for card in cards]

    def post(self, name: str, prompt: list[int], at: int = 0, **more: Any) -> httpx.Response:
        body = {"model": name, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        body |= {"return_token_ids": True, "return_proof": True, "return_receipt": "n" not in more, **more}
        return httpx.post(f"{self.urls[at]}/v1/completions", json=body, timeout=120.0, trust_env=False)

    def ask(self, name: str, prompt: list[int], at: int = 0, **more: Any) -> dict[str, Any]:
        reply = self.post(name, prompt, at, **more)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def error(self, content: str, answer: dict[str, Any], prompt: list[int]) -> float:
        """Return the largest error of the logprobs of an answer's tokens, by `transformers` with this content."""
        worst = 0.0
        for choice in answer["choices"]:
            tokens: list[int] = choice["token_ids"]
            with torch.inference_mode():
                logits = self.references[content](torch.tensor([prompt + tokens[:-1]])).logits[0, -len(tokens) :]
            theirs = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
            worst = max(worst, float((theirs - torch.tensor(choice["logprobs"]["token_logprobs"])).abs().max()))
        return worst

    def check(self, content: str, answer: dict[str, Any], prompt: list[int]) -> None:
        errors = {name: self.error(name, answer, prompt) for name in self.references}
        assert errors.pop(content) < LOGPROB_NATS, f"not of {content}: {errors}"
        assert min(errors.values()) > 10 * LOGPROB_NATS, "another content would do as well"


def write_contents(folder: Path, base: transformers.PreTrainedModel) -> dict[str, Path]:
    """Write the adapters: `tone2` has the form of `tone` and other numbers."""
    found = {}
    for name in ("sql", "tone", "tone2"):
        config, adapted = FORMS[name.removesuffix("2")]
        write_adapter(folder / name, config, linear_layers(base), adapted)
        found[name] = folder / name
    return found


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("lora")
    model, other = (make_model(folder / name, family="qwen3", layers=3, seed=seed) for seed, name in enumerate("mo"))
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    folders = write_contents(folder, base)
    references = {"m": base}
    for name, path in folders.items():
        references[name] = merged(base, path, FORMS[name.removesuffix("2")][1])
    settings = [f"model.path={model}", "model.served_name=m", f"model.adapters.sql={folders['sql']}", *ANY_PORTS]
    settings += [f"{ROUTER}.hosts=[127.0.0.1, 127.0.0.1]", f"{ROUTER}.host=127.0.0.1", "scheduler.threads=1"]
    settings += [
        f"{ROUTER}.prefill_schedulers=[{{host: 127.0.0.1, tp_size: 2, devices: [cpu, cpu]}}, {{host: 127.0.0.1}}]"
    ]
    settings += [f"{ROUTER}.decode_schedulers=[{{host: 127.0.0.1}}, {{host: 127.0.0.1}}]"]
    settings += [
        f"{ROUTER}.kept_requests.dir={folder / 'kept'}",
        "model.max_model_len=1400",
        "cache.num_pages=600",
        "cache.host_bytes=4000000",
    ]
    with LocalCluster(load_topology("pd_disagg_2p2d_multi_node", settings), entries=FORKED) as cluster:
        cluster.wait_ready(120)
        yield Serving(cluster, folders, other, references)


def prefill_of(answer: dict[str, Any]) -> str:
    found: str = answer["chitu"]["choices"][0]["attempts"][-1]["prefill"]
    return found


def fresh(number: int) -> list[int]:
    """Return a prompt that no other test has."""
    return [10 + number % 400, 11 + number // 400, *PROMPT]


@contextmanager
def asking(serving: Serving, name: str, **more: Any) -> Iterator[list[tuple[list[int], dict[str, Any]]]]:
    """Ask both routers, with prompts that come again, until the block ends. Yield what was answered."""
    answers: list[tuple[list[int], dict[str, Any]]] = []
    is_over = threading.Event()

    def ask(at: int) -> None:
        number = at
        while not is_over.is_set():
            prompt = fresh(5000 + number % 6)
            answers.append((prompt, serving.ask(name, prompt, at % 2, **more)))
            number += 4

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(ask, at) for at in range(4)]
        try:
            yield answers
        finally:
            is_over.set()
        for each in found:
            each.result()


def test_an_adapter_is_loaded_under_load_and_served_by_every_pair(serving: Serving) -> None:
    serving.reset()
    tone = str(serving.folders["tone"])
    assert serving.names(0) == serving.names(1) == ["m", "sql"]
    assert serving.post("tone", PROMPT).status_code == 404
    with asking(serving, "m") as answers:
        wait_until(lambda: len(answers) > 30, 60, lambda: str(len(answers)))
        warm = {(prefill_of(answer), tuple(prompt)) for prompt, answer in answers}
        state = serving.changed(load={"tone": tone})
        first = len(answers) + 4  # those before may have begun before
        wait_until(lambda: len(answers) > first + 12, 60, lambda: str(len(answers)))
    assert [each["name"] for each in state["adapters"]] == ["sql", "tone"] and state["leaving"] == []
    for prompt, answer in answers:
        serving.check("m", answer, prompt)
    again = [answer for prompt, answer in answers[first:] if (prefill_of(answer), tuple(prompt)) in warm]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in again]
    assert cached and set(cached) == {64}, "a cached page was lost"
    for at in (0, 1):
        assert serving.names(at) == ["m", "sql", "tone"]
    pairs = set()
    for number in range(60):
        name = ("tone", "sql")[number % 2]
        answer = serving.ask(
            name, fresh(number), number // 2 % 2, temperature=0.5, seed=1, **({} if number % 5 else {"n": 3})
        )
        serving.check(name, answer, fresh(number))
        pairs |= {f"{one['prefill']}-{one['decode']}" for one in answer["chitu"]["choices"][0]["attempts"]}
        if pairs == PAIRS and number > 10:
            break
    assert pairs == PAIRS


def hashes(serving: Serving) -> dict[str, str]:
    return {each["name"]: each["hash"] for each in serving.state()["adapters"]}


@pytest.mark.parametrize(
    "victims",
    [
        ("P0", "D1"),
        *[
            pytest.param(each, marks=pytest.mark.by_hand)
            for each in (("D0",), ("router",), ("router", "router.1", "P1"))
        ],
    ],
    ids=str,
)
def test_whoever_dies_the_list_stays_and_requests_go_on_with_their_adapter(
    serving: Serving, victims: tuple[str, ...]
) -> None:
    """They start again with the list of their command lines. A request under which two died one after the other is
    refused as poison, and asked again."""
    serving.reset()
    serving.changed(load={"tone": str(serving.folders["tone"])}, unload=["sql"])
    before, results = hashes(serving), list[tuple[list[int], dict[str, Any]]]()

    def ask(number: int) -> None:
        prompt = fresh(700 + number)
        reply = serving.post("tone", prompt, 1, max_tokens=200)
        if len(victims) == 2 and reply.status_code == 500 and reply.json()["error"]["code"] == "poison_request":
            reply = serving.post("tone", prompt, 1, max_tokens=200)
        assert reply.status_code == 200, reply.text
        results.append((prompt, reply.json()))

    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(ask, number) for number in range(6 * ("router.1" not in victims))]
        time.sleep(0.1 * bool(running))
        for name in victims:
            serving.cluster.kill(name)
        for name in victims:
            serving.cluster.wait_exit(name)
            serving.cluster.restart(name)
        for each in running:
            each.result()
    for prompt, answer in results:
        serving.check("tone", answer, prompt)
    serving.cluster.wait_ready(120)
    serving.wait_whole()
    assert hashes(serving) == before and serving.names(0) == serving.names(1) == ["m", "tone"]
    for number in range(12):
        serving.check("tone", serving.ask("tone", fresh(800 + number), number % 2), fresh(800 + number))
    assert {serving.post("sql", PROMPT, at).status_code for at in (0, 1)} == {404}


def test_an_adapter_is_unloaded_behind_the_requests_that_run_with_it(serving: Serving) -> None:
    serving.reset()
    serving.changed(load={"tone": str(serving.folders["tone"])})
    prompt, states = fresh(1), list[dict[str, Any]]()
    with ThreadPoolExecutor(2) as pool:
        long_one = pool.submit(serving.ask, "tone", prompt, 0, max_tokens=LONG)
        wait_until(lambda: running(serving) > 0, 30, lambda: "it does not run")
        states.append(serving.changed(1, unload=["tone"], timeout_s=0.2))
        assert not long_one.done() and {serving.post("tone", PROMPT, at).status_code for at in (0, 1)} == {404}
        assert len(states[0]["leaving"]) >= 1 and states[0]["leaving"][0].endswith(": tone (1 request)")
        serving.check("m", serving.ask("m", fresh(2)), fresh(2))
        serving.check("tone", long_one.result(), prompt)
    wait_until(lambda: not serving.state()["leaving"], 30, lambda: str(serving.state()))
    assert serving.change(unload=["tone"]).json()["error"]["code"] == "model_not_found"


def running(serving: Serving) -> int:
    found = httpx.get(f"{serving.urls[0]}/cluster", trust_env=False, timeout=30).json()["instances"]
    return sum(one["load"]["running"] for one in found if one["role"] == "decode")


@pytest.mark.by_hand
def test_another_content_under_a_name_is_for_new_requests_alone(serving: Serving) -> None:
    serving.reset()
    serving.changed(load={"tone": str(serving.folders["tone"])})
    old, prompt = hashes(serving)["tone"], fresh(3)
    serving.ask("tone", prompt)  # its pages stay, and are not found by the new one
    with ThreadPoolExecutor(4) as pool:
        several = {"n": 2, "temperature": 1}
        long_ones = [pool.submit(serving.ask, "tone", prompt, 0, max_tokens=LONG, **several)]
        long_ones.append(pool.submit(serving.ask, "tone", prompt, 1, max_tokens=LONG))
        wait_until(lambda: running(serving) > 0, 30, lambda: "none runs")
        changing = pool.submit(serving.changed, 0, load={"tone": str(serving.folders["tone2"])})
        wait_until(lambda: hashes(serving)["tone"] != old, 30, lambda: str(hashes(serving)))
        new = hashes(serving)["tone"]
        answer = serving.ask("tone", prompt)
        assert not any(each.done() for each in long_ones)
        serving.check("tone2", answer, prompt)
        assert answer["chitu"]["receipt"]["adapter_hash"] == new
        for each in long_ones:
            serving.check("tone", each.result(), prompt)
        assert long_ones[1].result()["chitu"]["receipt"]["adapter_hash"] == old
        assert changing.result()["leaving"] == []
    same = serving.changed(load={"tone": str(serving.folders["tone2"])})
    assert hashes(serving) == {each["name"]: each["hash"] for each in same["adapters"]}


def test_the_next_router_goes_on_with_the_content_that_a_request_began_with(serving: Serving) -> None:
    serving.reset()
    serving.changed(load={"tone": str(serving.folders["tone"])})
    prompt, name, headers = fresh(4), "long-one", {"X-Request-Id": "long-one"}
    body = {"model": "tone", "prompt": prompt, "max_tokens": LONG, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    body |= {"return_token_ids": True}
    url = serving.urls[0]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            lambda: httpx.post(f"{url}/v1/completions", json=body, headers=headers, trust_env=False, timeout=120)
        )
        wait_until(lambda: running(serving) > 0, 30, lambda: "it does not run")
        serving.cluster.kill("router", signal.SIGTERM)
        assert asked.result().json()["error"]["code"] == "request_kept", asked.result().text
    serving.cluster.wait_exit("router")
    serving.cluster.restart("router")
    serving.cluster.wait_ready(120)
    found: list[dict[str, Any]] = []

    def is_read() -> bool:
        """Ask both routers: one of them took the request, and until it has read all, it says to try again (503)."""
        kept = [httpx.get(f"{url}/v1/requests/{name}", trust_env=False, timeout=120) for url in serving.urls]
        assert {each.status_code for each in kept} <= {200, 404, 503}, [each.text for each in kept]
        found.extend(each.json() for each in kept if each.status_code == 200)
        return bool(found)

    wait_until(is_read, 60, "the answer")
    (answer,) = found
    serving.check("tone", answer, prompt)
    assert len(answer["choices"][0]["token_ids"]) == LONG


def test_what_sleeps_keeps_its_adapters_and_has_them_again_when_it_wakes(serving: Serving) -> None:
    serving.reset()
    serving.changed(load={"tone": str(serving.folders["tone"])})
    before = {name: serving.ask(name, PROMPT, logprobs=1) for name in ("m", "sql", "tone")}
    with httpx.Client(headers=serving.headers, trust_env=False, timeout=120) as client:
        state = client.post(f"{serving.urls[0]}/admin/sleep", json={"level": 2}).json()
        assert [one["level"] for one in state["instances"]] == [2] * 4, state
        assert all("LoRA adapters" in one["keeps"] for one in state["instances"])
        refused = serving.change(unload=["tone"])
        assert refused.status_code == 409 and "the cluster sleeps" in refused.text
        for name, answer in before.items():
            again = serving.ask(name, PROMPT, 1, logprobs=1)
            serving.check(name, again, PROMPT)
            assert again["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    serving.wait_whole()


@pytest.mark.by_hand
def test_other_weights_come_without_adapters_and_get_those_that_were_made_for_them(serving: Serving) -> None:
    """Who starts again then reads both."""

    def change(path: Path) -> httpx.Response:
        return httpx.post(
            f"{serving.urls[1]}/admin/weights",
            json={"path": str(path)},
            headers=serving.headers,
            trust_env=False,
            timeout=120,
        )

    serving.reset()
    refused = change(serving.other)
    assert refused.status_code == 409 and "the LoRA adapters (sql) were trained for" in refused.text
    serving.changed(unload=["sql"])
    assert change(serving.other).status_code == 200
    serving.changed(load={"tone": str(serving.folders["tone"])})
    base = transformers.AutoModelForCausalLM.from_pretrained(serving.other, dtype=torch.float32).eval()
    there = replace(serving, references={"m": base, "tone": merged(base, serving.folders["tone"], tone_layer)})
    for victims in ((), ("D0", "P0")):
        for name in victims:
            serving.cluster.kill(name)
            serving.cluster.wait_exit(name)
            serving.cluster.restart(name)
        serving.cluster.wait_ready(120)
        serving.wait_whole()
        for number in range(8):
            for content in ("m", "tone"):
                prompt = fresh(900 + number + 50 * len(victims))
                there.check(content, there.ask(content, prompt, number % 2), prompt)
    serving.changed(unload=["tone"])
    assert change(serving.other.parent / "m").status_code == 200
    serving.check("m", serving.ask("m", PROMPT), PROMPT)


@dataclass
class Lists:
    """Which contents the names have had, and when."""

    spans: list[tuple[float, float, dict[str, str]]] = field(default_factory=list)

    def change(self, serving: Serving, at: int, wanted: dict[str, str]) -> None:
        """Have the cluster serve these contents, by name. While it changes, the old list and the new one may serve."""
        before = self.spans[-1][2] if self.spans else {}
        began_s = time.monotonic()
        self.spans.append((began_s, float("inf"), wanted))
        load = {name: str(serving.folders[content]) for name, content in wanted.items()}
        same = [name for name in load if before.get(name) == wanted[name]]
        unload = [name for name in before if name not in wanted]
        load = {name: path for name, path in load.items() if name not in same}
        if load or unload:
            serving.changed(at, load=load, unload=unload, timeout_s=60)
        if len(self.spans) > 1:
            first_s, _, old = self.spans[-2]
            self.spans[-2] = first_s, time.monotonic(), old

    def of(self, name: str, began_s: float, ended_s: float) -> set[str]:
        """Return the contents that a request of this time may have; "" stands for none."""
        return {here.get(name, "") for first_s, last_s, here in self.spans if first_s <= ended_s and last_s >= began_s}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.by_hand) for seed in range(1, 30))])
def test_random_changes_under_random_requests_give_each_answer_a_content_that_served(
    serving: Serving, seed: int
) -> None:
    serving.reset()
    serving.changed(unload=["sql"])
    names, contents, lists = ("a", "b"), list(serving.folders), Lists()
    lists.change(serving, 0, {"a": "sql"})
    is_over, wrong, seen = threading.Event(), list[str](), set[str]()

    def ask(thread: int) -> int:
        rng, count = random.Random(100 * seed + thread), 0
        while not is_over.wait(REST_S):
            name, prompt = rng.choice((*names, "m")), fresh(3000 + rng.randrange(5))[: rng.choice((20, 40, 72))]
            more: dict[str, Any] = {"max_tokens": rng.choice((1, 8, 60)), "temperature": rng.choice((0, 1)), "seed": 7}
            more |= {"n": 2} if rng.random() < 0.2 else {}
            began_s = time.monotonic()
            reply = serving.post(name, prompt, rng.randrange(2), **more)
            allowed = {"m"} if name == "m" else lists.of(name, began_s, time.monotonic())
            count += 1
            if reply.status_code == 404 and "" in allowed:
                seen.add("")
                continue
            if reply.status_code != 200:
                wrong.append(f"{name}: {reply.text}")
                continue
            errors = {each: serving.error(each, reply.json(), prompt) for each in serving.references}
            right = {each for each, error in errors.items() if error < LOGPROB_NATS}
            seen.update(right)
            if not right & allowed:
                wrong.append(f"{name} may be {allowed}, is {right or errors}")
        return count

    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, thread) for thread in range(6)]
        rng = random.Random(seed)
        try:
            for _ in range(8):
                wanted = {name: rng.choice(contents) for name in names if rng.random() < 0.7}
                lists.change(serving, rng.randrange(2), wanted)
                time.sleep(rng.uniform(0, 0.6))
        finally:
            is_over.set()
        total = sum(each.result() for each in asked)
    assert not wrong, f"{len(wrong)} of {total}, the first: {wrong[0]}"
    assert total > 30 and len(seen) >= 4, (total, seen)
    wait_until(lambda: not serving.state()["leaving"], 30, lambda: str(serving.state()))


def damaged(serving: Serving, folder: Path, change: str) -> Path:
    shutil.copytree(serving.folders["tone"], folder)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = sorted(tensors)[0]
    if change == "nan":
        tensors[name][0, 0] = float("nan")
    elif change == "rank":
        tensors[name] = tensors[name][:-1].contiguous()
    elif change == "dora":
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    save_file(tensors, weights)
    if change == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif change == "none":
        weights.unlink()
    return folder


def test_what_cannot_be_served_changes_nothing_and_is_named(serving: Serving, tmp_path: Path) -> None:
    serving.reset()
    before = serving.state()
    for change, words in (
        ("nan", "has numbers that are not finite"),
        ("rank", "has shape (4, 384); by the model and adapter_config.json it is (5, 384)"),
        ("dora", "use_dora True is not supported"),
        ("cut", "is cut off"),
        ("none", "has no adapter_model.safetensors"),
    ):
        bad = str(damaged(serving, tmp_path / change, change))
        reply = serving.change(load={"good": str(serving.folders["tone"]), "bad": bad}, unload=["sql"])
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (409, "weights_refused"), error
        assert error["message"].split(":")[0] in {"P0", "P1", "D0", "D1"} and words in error["message"], error
    tone = str(serving.folders["tone"])
    for body, status, words in (
        ({}, 400, "there is nothing to change"),
        ({"load": {"tone": "tone"}}, 400, "'tone' is no absolute path"),
        ({"load": {"m": tone}}, 400, "'m' is the name of the model alone"),
        ({"load": {"a\nb": tone}}, 400, "is no name"),
        ({"load": {"sql": tone}, "unload": ["sql"]}, 400, "is in load and in unload"),
        ({"unload": ["poems"]}, 404, "there is no LoRA adapter 'poems'; there are sql"),
        ({"load": {f"a{n}": tone for n in range(64)}}, 409, "these would be 65 LoRA adapters; at most 64"),
        ({"load": {"tone": tone}, "timeout_s": -1}, 400, "timeout_s"),
    ):
        reply = serving.change(**body)
        assert reply.status_code == status and words in reply.json()["error"]["message"], reply.text
    for method in ("GET", "POST"):
        assert (
            httpx.request(method, f"{serving.urls[0]}/admin/adapters", trust_env=False, timeout=60.0).status_code == 401
        )
    assert serving.state() == before
    serving.check("sql", serving.ask("sql", PROMPT), PROMPT)
