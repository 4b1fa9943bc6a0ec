"""A P of two ranks and a D follow a trainer, whose tensors they read out of its memory. Answers are those of
`transformers` with a checkpoint of the same tensors, and of the cluster itself with that checkpoint, to the bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from nursery import FORKED
from support.router_process import wait_until
from test_weights_cluster import SIZES, Reference, change, complete, operator, prompts_of

from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.models.config import model_hash
from chitu.net.curve import derive
from chitu.protocol.receipt import Receipt
from chitu.tools.make_model import make_model
from chitu.tools.replay import ReplayOptions, Saved, replay_receipts

pytestmark = pytest.mark.timeout(300)
PROGRAM = Path(__file__).with_name("trainer_process.py")
LOGPROB_NATS = 1e-5
ALIKE_TOKENS = 400
"""Two steps of a training may give the same tokens for a while."""
Answers = list[dict[str, Any]]


class Trainer:
    def __init__(self, base: Path, folder: Path) -> None:
        command = [sys.executable, str(PROGRAM), str(base), str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._base, self._saved = folder.parent, 0
        assert self._line() == "ready"

    def ask(self, *words: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def publish(self, seed: int) -> Path:
        """Train on, and publish."""
        self.ask("train", seed)
        return Path(self.ask("publish"))

    def checkpoint(self) -> Path:
        """Return a folder with the same tensors."""
        self._saved += 1
        folder = self._base / f"saved-{self.process.pid}-{self._saved}"
        assert self.ask("save", folder) == "done"
        return folder

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "base", seed=0, **SIZES)


@pytest.fixture(scope="module")
def cluster(base: Path) -> Iterator[LocalCluster]:
    settings = [f"model.path={base}", "model.served_name=m", "cache.num_pages=600", "scheduler.threads=1"]
    settings += ["model.max_model_len=1400", "cache.host_bytes=4000000"]
    settings += [f"dp_config.router.prefill_schedulers.0.{each}" for each in ("tp_size=2", "devices=[cpu,cpu]")]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.fixture(scope="module")
def trainer(base: Path) -> Iterator[Trainer]:
    found = Trainer(base, base.parent / "policy")
    yield found
    found.kill()


def check_logprobs(folder: Path, prompts: list[list[int]], choices: Answers) -> None:
    """Compare the logprobs of these tokens with those of `transformers` with this folder."""
    assert Reference(folder).made(prompts, choices)
    tokens = torch.tensor([p + c["token_ids"] for p, c in zip(prompts, choices, strict=True)])
    with torch.inference_mode():
        logits = Reference(folder)._model(tokens[:, :-1]).logits[:, len(prompts[0]) - 1 :]
    expected = logits.log_softmax(-1).gather(-1, tokens[:, len(prompts[0]) :].unsqueeze(-1)).squeeze(-1)
    found = torch.tensor([choice["logprobs"]["token_logprobs"] for choice in choices])
    assert (found - expected).abs().max() < LOGPROB_NATS


def refused(cluster: LocalCluster, folder: Path) -> str:
    reply = operator(cluster, "/admin/weights", path=str(folder))
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (409, "weights_refused"), reply.text
    message: str = error["message"]
    return message


def test_a_cluster_follows_a_trainer_whose_tensors_go_on_as_soon_as_the_call_has_returned(
    cluster: LocalCluster, trainer: Trainer
) -> None:
    prompts, hashes = prompts_of(1, 30), list[str]()
    for round_number, way in enumerate(("copy", "share", "share")):
        assert trainer.ask(way) == "done"
        path = trainer.publish(round_number)
        hashes.append(change(cluster, path)["model_hash"])
        folder = trainer.checkpoint()
        trainer.ask("train", 99)  # in place, as an optimizer does
        choices = complete(cluster, prompts)
        check_logprobs(folder, prompts, choices)
        change(cluster, folder)
        again = complete(cluster, prompts)
        assert [each["logprobs"] for each in again] == [each["logprobs"] for each in choices], "to the bit"
    assert len(set(hashes)) == 3


def test_a_receipt_names_the_tensors_and_a_replay_finds_others(cluster: LocalCluster, trainer: Trainer) -> None:
    path = trainer.publish(1)
    change(cluster, path)
    body = {"prompt": prompts_of(2, 1)[0], "max_tokens": 4, "return_proof": True, "return_receipt": True}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, trust_env=False, timeout=60.0).json()
    receipt = reply["chitu"]["receipt"]
    assert receipt["model_hash"] == model_hash(path)
    saved = [Saved(msgspec.convert(receipt, Receipt))]
    assert [(one.verdict, one.says) for one in replay_receipts(ReplayOptions(cluster.url), saved, print)] == [
        ("same", "")
    ]
    found = change(cluster, trainer.publish(2))["model_hash"]  # the same folder, with others

    def hashes() -> set[str]:
        instances = httpx.get(f"{cluster.url}/cluster", trust_env=False, timeout=60.0).json()["instances"]
        return {each["layout"]["model_hash"] for each in instances}

    wait_until(lambda: hashes() == {found}, 10, "a look at the cluster after the change")
    (other,) = replay_receipts(ReplayOptions(cluster.url), saved, print)
    assert other.verdict == "unjudged" and "the engine has another model than the receipt" in other.says


def test_a_mixed_change_goes_on_with_the_tensors_of_the_trainer(cluster: LocalCluster, trainer: Trainer) -> None:
    before = trainer.checkpoint()
    change(cluster, before)
    path = trainer.publish(3)
    after, (prompt,) = trainer.checkpoint(), prompts_of(7, 1)
    body = {"prompt": prompt, "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"return_token_ids": True, "return_proof": True}
    output: list[int] = []
    proof: dict[str, Any] = {}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, trust_env=False, timeout=60) as reply:
        for line in reply.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {}
            proof = event.get("chitu", proof)
            if not output and event.get("choices"):
                operator(cluster, "/admin/pause", mode="keep")
                change(cluster, path, mixed=True)
                operator(cluster, "/admin/resume")
            output += [token for choice in event.get("choices", ()) for token in choice.get("token_ids", ())]
    (choice,) = proof["choices"]
    assert [each["model_hash"] for each in choice["weights"]] == [model_hash(before), model_hash(path)]
    first = choice["weights"][1]["first_token"]
    assert 0 < first < ALIKE_TOKENS and choice["token_ids"] == output
    old, new = Reference(before), Reference(after)
    assert new.goes_on(old, prompt, output, first)
    assert not new.goes_on(old, prompt, output, first + ALIKE_TOKENS), "the old ones would have gone on alike"


def test_a_trainer_that_writes_before_the_call_has_returned_is_found_and_nothing_is_lost(
    cluster: LocalCluster, trainer: Trainer
) -> None:
    serving = trainer.checkpoint()
    change(cluster, serving)
    trainer.ask("share")
    path = trainer.publish(4)
    trainer.ask("train", 5)
    assert re.search(
        r"(P0|D0): .* is not what .*chitu_tensors.json says: it was written to since", refused(cluster, path)
    )
    prompts = prompts_of(3, 8)
    check_logprobs(serving, prompts, complete(cluster, prompts))
    change(cluster, trainer.publish(6))


def test_a_trainer_that_is_killed_while_its_tensors_are_read_costs_nothing(
    cluster: LocalCluster, base: Path, tmp_path: Path
) -> None:
    trainer = Trainer(base, tmp_path / "policy")
    path = trainer.publish(7)
    folder, prompts = trainer.checkpoint(), prompts_of(4, 8)
    changing = threading.Thread(target=change, args=(cluster, path))
    changing.start()
    trainer.kill()
    changing.join()
    check_logprobs(folder, prompts, complete(cluster, prompts))
    cluster.kill("D0")
    cluster.wait_exit("D0")
    cluster.restart("D0")
    wait_until(lambda: not operator(cluster, "/admin/resume").json()["missing"], 60, "what the trainer left")
    cluster.wait_ready()
    check_logprobs(folder, prompts, complete(cluster, prompts))


def test_an_instance_that_starts_again_says_that_the_memory_has_other_tensors_and_follows_with_the_next(
    cluster: LocalCluster, trainer: Trainer
) -> None:
    trainer.ask("share")
    change(cluster, trainer.publish(8))
    trainer.ask("train", 9)
    cluster.kill("D0")
    cluster.wait_exit("D0")
    cluster.restart("D0")

    def missing() -> list[str]:
        found: list[str] = operator(cluster, "/admin/resume").json()["missing"]
        return found

    wait_until(lambda: any("it was written to since" in each for each in missing()), 60, "the reason")
    assert [each.split()[0] for each in missing()] == ["D0"]
    path, prompts = trainer.publish(10), prompts_of(5, 8)
    change(cluster, path)
    cluster.wait_ready()
    check_logprobs(trainer.checkpoint(), prompts, complete(cluster, prompts))


def test_a_cluster_that_wakes_and_finds_other_tensors_says_so_and_follows_with_the_next(
    cluster: LocalCluster, trainer: Trainer
) -> None:
    trainer.ask("share")
    change(cluster, trainer.publish(20))
    asleep = operator(cluster, "/admin/sleep", level=2)
    assert asleep.status_code == 200, asleep.text
    trainer.ask("train", 21)
    missing: list[str] = operator(cluster, "/admin/wake").json()["missing"]
    assert {each.split()[0] for each in missing} == {"P0", "D0"}
    assert all("it was written to since it was published" in each for each in missing)
    path, prompts = trainer.publish(22), prompts_of(8, 8)
    change(cluster, path)
    check_logprobs(trainer.checkpoint(), prompts, complete(cluster, prompts))


def test_a_manifest_that_does_not_fit_is_refused_by_name(cluster: LocalCluster, trainer: Trainer) -> None:
    path, prompts = trainer.publish(11), prompts_of(6, 8)
    before = complete(cluster, prompts)
    manifest = json.loads((path / "chitu_tensors.json").read_text())
    norm = manifest["tensors"]["model.norm.weight"]
    cuda = {"kind": "cuda", "device": "ab" * 16, "handle": "00" * 64, "nbytes": 1 << 40}
    for edited, says in (
        (manifest | {"tensors": {"a": norm}}, "has no tensor 'model."),
        (manifest | {"tensors": manifest["tensors"] | {"model.a.weight": norm}}, "does not use: model.a.weight"),
        (
            manifest | {"places": [{"kind": "file", "name": "nothing"}]},
            "the memory of a trainer is reachable on its own",
        ),
        (manifest | {"places": [{"kind": "file", "name": "../x"}]}, "which is no name of a file in its folder"),
        (manifest | {"places": [cuda]}, "the memory of GPU abababababababababababababababab cannot be read"),
    ):
        (path / "chitu_tensors.json").write_text(json.dumps(edited))
        assert says in refused(cluster, path)
    assert [each["logprobs"] for each in complete(cluster, prompts)] == [each["logprobs"] for each in before]


def test_the_example_does_what_its_page_promises(cluster: LocalCluster, base: Path, tmp_path: Path) -> None:
    secrets = derive(cluster_key_of(cluster.topology))
    assert secrets is not None
    program = Path(__file__).parents[2] / "examples" / "trainer.py"
    command = [sys.executable, program, base, "--url", cluster.url, "--folder", tmp_path / "policy", "--rounds", "2"]
    env = {**os.environ, "CHITU_TOKEN": secrets.token, "NO_PROXY": "*"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    rounds = re.findall(r"round \d: published in [\d.]+ s, serves [\d.]+ s later: (\w{32})", done.stdout)
    assert done.returncode == 0 and len(set(rounds)) == 2, done.stdout + done.stderr
    assert operator(cluster, "/admin/resume").json()["model_hash"] == rounds[-1] == model_hash(tmp_path / "policy")
