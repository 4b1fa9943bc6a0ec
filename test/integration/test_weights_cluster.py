"""Weights that change while a P of two ranks and a D serve: roll-outs before and after are those of `transformers` with
the two folders, whatever dies meanwhile."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch
from nursery import FORKED
from safetensors.torch import load_file, save_file
from support.router_process import wait_until
from transformers import AutoModelForCausalLM

from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.models.config import model_hash
from chitu.net.curve import derive
from chitu.protocol.receipt import Receipt
from chitu.tools.make_model import make_model
from chitu.tools.replay import ReplayOptions, Saved, replay_receipts

pytestmark = pytest.mark.timeout(300)
VOCAB, PROMPT_TOKENS, OUTPUT_TOKENS = 500, 40, 12
SIZES: dict[str, Any] = {"layers": 2, "hidden_size": 64, "heads": 4, "kv_heads": 2, "vocab_size": VOCAB}
LOGPROB_NATS = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    made = {name: make_model(base / name, seed=seed, **SIZES) for seed, name in enumerate(("first", "second"))}
    made["shape"] = make_model(base / "shape", **{**SIZES, "hidden_size": 128})
    for name in ("words", "nan", "adapter"):
        made[name] = base / name
        shutil.copytree(made["second"], made[name])
    words = json.loads((made["words"] / "tokenizer.json").read_text())
    words["added_tokens"] = words["added_tokens"][:-1]
    (made["words"] / "tokenizer.json").write_text(json.dumps(words))
    tensors = load_file(made["nan"] / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, made["nan"] / "model.safetensors", {"format": "pt"})
    (made["adapter"] / "adapter_config.json").write_text("{}")
    return made


@pytest.fixture(scope="module")
def cluster(folders: dict[str, Path]) -> Iterator[LocalCluster]:
    settings = [f"model.path={folders['first']}", "model.served_name=m", "cache.num_pages=600"]
    settings += ["scheduler.threads=1", "model.max_model_len=1400", "cache.host_bytes=4000000"]
    settings += [f"dp_config.router.prefill_schedulers.0.{each}" for each in ("tp_size=2", "devices=[cpu,cpu]")]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


def operator(cluster: LocalCluster, route: str, **body: object) -> httpx.Response:
    secrets = derive(cluster_key_of(cluster.topology))
    assert secrets is not None
    headers = {"Authorization": f"Bearer {secrets.token}"}
    return httpx.post(f"{cluster.url}{route}", json=body, headers=headers, trust_env=False, timeout=120)


def change(cluster: LocalCluster, folder: Path, **more: object) -> dict[str, Any]:
    reply = operator(cluster, "/admin/weights", path=str(folder), **more)
    assert reply.status_code == 200, reply.text
    state: dict[str, Any] = reply.json()
    assert state["model_hash"] == model_hash(folder) and state["missing"] == []
    return state


def complete(cluster: LocalCluster, prompts: list[list[int]], **more: object) -> list[dict[str, Any]]:
    body = {"prompt": prompts, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "logprobs": 0, **more}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, trust_env=False, timeout=120)
    assert reply.status_code == 200, reply.text
    choices: list[dict[str, Any]] = reply.json()["choices"]
    return choices


def prompts_of(seed: int, count: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(10, VOCAB - 20, (count, PROMPT_TOKENS)).tolist()


class Reference:
    """A folder's model, as `transformers` computes it."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)

    def made(self, prompts: list[list[int]], choices: list[dict[str, Any]]) -> bool:
        """Return whether these greedy answers are this model's; their logprobs are then, too."""
        tokens = torch.tensor([p + c["token_ids"] for p, c in zip(prompts, choices, strict=True)])
        with torch.inference_mode():
            logits = self._model(tokens[:, :-1]).logits[:, len(prompts[0]) - 1 :]
        output = tokens[:, len(prompts[0]) :]
        if not torch.equal(logits.argmax(-1), output):
            return False
        expected = logits.log_softmax(-1).gather(-1, output.unsqueeze(-1)).squeeze(-1)
        found = torch.tensor([choice["logprobs"]["token_logprobs"] for choice in choices])
        assert (found - expected).abs().max() < LOGPROB_NATS
        return True

    def goes_on(self, earlier: Reference, prompt: list[int], output: list[int], first: int) -> bool:
        """Return whether this model made the output from token `first` on, over what the earlier one had computed."""
        tokens, split = torch.tensor([prompt + output]), len(prompt) + first - 1
        with torch.inference_mode():
            before = earlier._model(tokens[:, :split], use_cache=True)
            after = self._model(tokens[:, split:-1], past_key_values=before.past_key_values)
        is_earlier = torch.equal(before.logits[0, len(prompt) - 1 :].argmax(-1), tokens[0, len(prompt) : split + 1])
        return is_earlier and torch.equal(after.logits[0].argmax(-1), tokens[0, split + 1 :])


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, Reference]:
    return {name: Reference(folders[name]) for name in ("first", "second")}


def test_an_rl_loop_changes_the_weights_between_roll_outs_and_under_running_requests(
    cluster: LocalCluster, folders: dict[str, Path], references: dict[str, Reference]
) -> None:
    prompts = prompts_of(1, 100)
    assert references["first"].made(prompts, complete(cluster, prompts))

    long_ones, during = prompts_of(2, 4), prompts_of(3, 12)
    answers: dict[int, list[dict[str, Any]]] = {}

    def ask(number: int, prompt: list[int], max_tokens: int) -> None:
        answers[number] = complete(cluster, [prompt], max_tokens=max_tokens)

    threads = [threading.Thread(target=ask, args=(i, prompt, 300)) for i, prompt in enumerate(long_ones)]
    for thread in threads:
        thread.start()
    changing = threading.Thread(target=change, args=(cluster, folders["second"]))
    changing.start()
    for number, prompt in enumerate(during, len(long_ones)):
        threads.append(threading.Thread(target=ask, args=(number, prompt, OUTPUT_TOKENS)))
        threads[-1].start()
    for thread in [*threads, changing]:
        thread.join()
    assert len(answers) == len(threads)
    for number, prompt in enumerate([*long_ones, *during]):
        by = [name for name, reference in references.items() if reference.made([prompt], answers[number])]
        assert len(by) == 1, f"answer {number} is of {by or 'no model alone'}"

    # The same prompts: a page that the caches of P and D kept would be seen.
    choices = complete(cluster, prompts)
    assert references["second"].made(prompts, choices)
    receipt = httpx.post(
        f"{cluster.url}/v1/completions",
        json={"prompt": prompts[0], "max_tokens": 2, "return_proof": True, "return_receipt": True},
        trust_env=False,
        timeout=60.0,
    ).json()["chitu"]["receipt"]
    assert receipt["model_hash"] == model_hash(folders["second"])
    saved = [Saved(msgspec.convert(receipt, Receipt))]
    assert [one.verdict for one in replay_receipts(ReplayOptions(cluster.url), saved, print)] == ["same"]
    change(cluster, folders["first"])
    assert references["first"].made(prompts, complete(cluster, prompts))
    (other,) = replay_receipts(ReplayOptions(cluster.url), saved, print)
    assert other.verdict == "unjudged" and "the engine has another model than the receipt" in other.says


def test_a_mixed_change_keeps_what_runs_and_says_of_each_token_whose_it_is(
    cluster: LocalCluster, folders: dict[str, Path], references: dict[str, Reference]
) -> None:
    (prompt,) = prompts_of(7, 1)
    body = {"prompt": prompt, "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"return_token_ids": True, "return_proof": True}
    output: list[int] = []
    proof: dict[str, Any] = {}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, trust_env=False, timeout=60) as reply:
        for line in reply.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {}
            output += [token for choice in event.get("choices", ()) for token in choice.get("token_ids", ())]
            proof = event.get("chitu", proof)
            if output and not proof and len(output) < 8:
                assert operator(cluster, "/admin/pause", mode="keep").json()["paused"] == "keep"
                refused = operator(cluster, "/admin/weights", path=str(folders["second"])).json()["error"]
                assert "running requests are stopped" in refused["message"]
                change(cluster, folders["second"], mixed=True)
                assert operator(cluster, "/admin/resume").json()["paused"] == ""
                output += [-1] * 8  # once
    output = [token for token in output if token >= 0]
    (choice,) = proof["choices"]
    (_, later), names = choice["weights"], ("first", "second")
    assert [each["model_hash"] for each in choice["weights"]] == [model_hash(folders[name]) for name in names]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, output) and 0 < later["first_token"] < 1000
    assert references["second"].goes_on(references["first"], prompt, output, later["first_token"])
    assert not references["second"].goes_on(references["first"], prompt, output, later["first_token"] + 1)
    # Pages that hold K and V of both are found by nobody.
    assert references["second"].made([prompt], complete(cluster, [prompt]))
    change(cluster, folders["first"])


@pytest.mark.parametrize("topology", [pytest.param("unified_local", marks=pytest.mark.by_hand), "pd_disagg_1p1d_local"])
def test_what_ran_through_mixed_changes_is_cached_neither_in_memory_nor_on_disk(
    folders: dict[str, Path], tmp_path: Path, topology: str
) -> None:
    """Its prompt is shorter than a page, so no page is cached before its end."""
    settings = [f"model.path={folders['first']}", "cache.num_pages=200", "scheduler.threads=1"]
    settings += ["model.max_model_len=1400", "cache.host_bytes=4000000", f"cache.disk.path={tmp_path}"]
    max_tokens = 1300

    def run_through(cluster: LocalCluster, prompt: list[int], *changes: str) -> list[int]:
        """Return prompt and answer of a request that goes on with the weights in these folders, one after the other."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"return_token_ids": True, "return_proof": True}
        tokens, proof, due = list(prompt), dict[str, Any](), list(changes)
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, trust_env=False, timeout=60) as reply:
            for line in reply.iter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                tokens += [token for choice in event.get("choices", ()) for token in choice.get("token_ids", ())]
                proof = event.get("chitu", proof)
                if due and len(tokens) > 200 * (len(changes) - len(due)) + len(prompt):
                    operator(cluster, "/admin/pause", mode="keep")
                    change(cluster, folders[due.pop(0)], mixed=True)
                    operator(cluster, "/admin/resume")
        hashes = [each["model_hash"] for each in proof["choices"][0]["weights"]]
        assert len(tokens) == len(prompt) + max_tokens
        assert hashes[1:] == [model_hash(folders[name]) for name in changes], "it ended before the changes"
        return tokens

    def check_behind(cluster: LocalCluster, tokens: list[int]) -> None:
        prompts = [[*tokens[:length], 7] for length in range(16, len(tokens), 120)]
        with_cache, without = (complete(cluster, prompts, cache_prompt=each) for each in (True, False))
        for prompt, one, other in zip(prompts, with_cache, without, strict=True):
            differs = np.abs(np.subtract(*(each["logprobs"]["token_logprobs"] for each in (one, other)))).max()
            assert one["token_ids"] == other["token_ids"] and differs < LOGPROB_NATS, f"{differs} behind {len(prompt)}"

    with LocalCluster(load_topology(topology, settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        tokens = run_through(cluster, [11, 12, 13], "second")
    with LocalCluster(load_topology(topology, settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        check_behind(cluster, tokens)  # before the next change, which clears the disk
        change(cluster, folders["second"])
        check_behind(cluster, run_through(cluster, [14, 15, 16], "first", "second"))


def test_requests_wait_while_the_cluster_is_paused(
    cluster: LocalCluster, folders: dict[str, Path], references: dict[str, Reference]
) -> None:
    assert operator(cluster, "/admin/pause").json()["paused"] == "finish"
    prompts, answers = prompts_of(8, 6), list[dict[str, Any]]()
    asking = threading.Thread(target=lambda: answers.extend(complete(cluster, prompts)))
    asking.start()
    late = httpx.post(
        f"{cluster.url}/v1/completions",
        json={"prompt": "a", "max_tokens": 1},
        headers={"X-Request-Timeout": "0.2"},
        trust_env=False,
        timeout=60.0,
    )
    assert late.status_code == 504 and "the cluster is paused" in late.json()["error"]["message"]
    change(cluster, folders["second"])  # a pause may be a change
    assert not answers
    operator(cluster, "/admin/resume")
    asking.join()
    assert references["second"].made(prompts, answers)
    change(cluster, folders["first"])


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "return_proof": True},
        ),
        ("/v1/responses", {"input": "a", "max_output_tokens": 3}),
        ("/v1/messages", {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ],
)
def test_every_route_returns_the_tokens_of_prompt_and_answer(
    cluster: LocalCluster, route: str, body: dict[str, Any]
) -> None:
    asked = {**body, "return_token_ids": True, "temperature": 0}
    reply = httpx.post(f"{cluster.url}{route}", json=asked, trust_env=False, timeout=60).json()
    (choice,) = reply["chitu"]["choices"]
    again = complete(cluster, [choice["prompt_token_ids"]], max_tokens=3, ignore_eos=False)
    assert choice["token_ids"] == again[0]["token_ids"] and choice["weights"][0]["first_token"] == 0


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_lost(
    cluster: LocalCluster, folders: dict[str, Path], references: dict[str, Reference], tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(folders["second"], cut)
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    for folder, says in (
        (
            folders["shape"],
            "another kind of model than the one that serves: head_dim is 32, not 16; hidden_size is 128, not 64",
        ),
        (folders["words"], "tokenizer.json differs from the one in"),
        (folders["nan"], "'model.layers.1.mlp.down_proj.weight' has numbers that are not finite"),
        (folders["adapter"], "holds an adapter (adapter_config.json)"),
        (cut, "is cut off"),
        (tmp_path / "nothing", "holds no safetensors file"),
    ):
        reply = operator(cluster, "/admin/weights", path=str(folder))
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (409, "weights_refused") and says in error["message"], error
    assert operator(cluster, "/admin/weights", path="second").json()["error"]["param"] == "path"
    assert operator(cluster, "/admin/weights", path="/x", timeout_s=0).json()["error"]["param"] == "timeout_s"
    reply = httpx.post(f"{cluster.url}/admin/weights", json={"path": "/x"}, trust_env=False, timeout=60.0)
    assert reply.status_code == 401
    prompts = prompts_of(4, 8)
    assert references["first"].made(prompts, complete(cluster, prompts))


def test_whoever_dies_after_a_change_the_cluster_serves_the_new_weights_again(
    cluster: LocalCluster, folders: dict[str, Path], references: dict[str, Reference]
) -> None:
    """They start again with the old folder on their command lines."""
    change(cluster, folders["second"])
    prompts = prompts_of(5, 8)
    for dead in (("D0",), ("P0",), ("router",), ("router", "D0")):
        for name in dead:
            cluster.kill(name)
        for name in dead:
            cluster.wait_exit(name)
            cluster.restart(name)
        wait_for_weights(cluster, folders["second"])
        assert references["second"].made(prompts, complete(cluster, prompts)), dead


def wait_for_weights(cluster: LocalCluster, folder: Path) -> None:
    cluster.wait_ready()

    def serves() -> bool:
        state = operator(cluster, "/admin/resume").json()
        return state["model_hash"] == model_hash(folder) and not state["missing"]

    wait_until(serves, 60, f"the weights in {folder}")
    cluster.wait_ready()


@pytest.mark.parametrize("victim", ["D0", "P0", "router"])
def test_a_death_in_the_middle_of_a_change_leaves_one_version_everywhere(
    cluster: LocalCluster, folders: dict[str, Path], references: dict[str, Reference], victim: str
) -> None:
    prompts = prompts_of(6, 8)
    folder = folders["first"]

    def change_anyhow() -> None:
        with suppress(httpx.HTTPError):
            operator(cluster, "/admin/weights", path=str(folder))

    changing = threading.Thread(target=change_anyhow)
    changing.start()
    cluster.kill(victim)
    cluster.wait_exit(victim)
    cluster.restart(victim)
    changing.join()
    cluster.wait_ready()
    wait_until(lambda: not operator(cluster, "/admin/resume").json()["missing"], 60, "one version everywhere")
    cluster.wait_ready()
    by = [name for name, reference in references.items() if reference.made(prompts, complete(cluster, prompts))]
    assert len(by) == 1
    change(cluster, folders["second"])
    assert references["second"].made(prompts, complete(cluster, prompts))
