"""`chitu serve --fake`: a real router and fake instances in three terminals, and who says that they are fake."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from nursery import FORKED
from nursery import chitu as forked_chitu
from serve_process import ServeProcess
from support.router_process import wait_until

from chitu.assets import TINY_MODEL_DIR
from chitu.config.load import load_topology
from chitu.fake.executor import expected_tokens
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient

pytestmark = pytest.mark.timeout(300)
CHITU = [sys.executable, "-m", "chitu.cli"]
VERIFY_TOPOLOGY = Path(__file__).parents[1] / "verify_xpyd_topology.py"
ROUTER_ALONE = ("dp_config.router.prefill_schedulers=[]", "dp_config.router.decode_schedulers=[]")
PROMPT = [*range(300, 340)]


def ask(url: str, num_tokens: int) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "return_token_ids": True, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_fake_p_and_d_join_a_real_router_and_everyone_says_what_they_are(tmp_path: Path) -> None:
    """The tokens depend on every byte of KV that P sends."""
    serve = [*CHITU, "serve", *ROUTER_ALONE, "--port", "0", "--log-dir", str(tmp_path)]
    with ServeProcess(serve, popen=forked_chitu) as router:
        url = router.wait_line(r"(http://127\.0\.0\.1:\d+)")[1]
        assert httpx.get(f"{url}/health", trust_env=False, timeout=60.0).status_code == 503
        words = ["--url", url, "--log-dir", str(tmp_path)]
        fakes = [
            ServeProcess([*CHITU, "serve", "--fake", role, *words], popen=forked_chitu)
            for role in ("prefill", "decode")
        ]
        with fakes[0], fakes[1]:
            for process, role in zip(fakes, ("prefill", "decode"), strict=True):
                process.wait_line(f"a FAKE {role} instance, which computes no model, joins {url}")
            client = RouterClient(url)
            wait_until(lambda: {i.name for i in client.cluster().instances if i.status == "up"} == {"P0", "D0"}, 60, "")
            reply = ask(url, 40)
            assert reply.status_code == 200 and "fake" in reply.headers["x-chitu-fake"]
            found = reply.json()["choices"][0]["token_ids"]
            vocab_size = next(i.layout.vocab_size for i in client.cluster().instances if i.layout)
            assert found == expected_tokens(PROMPT, 40, vocab_size), "KV arrived whole"

            checked = run(*CHITU, "verify", url)
            assert checked.returncode == 2 and "P0, D0 of" in checked.stderr and "fake" in checked.stderr
            judged = run(sys.executable, str(VERIFY_TOPOLOGY), "--router", url, "--max_tokens", "8", "--json")
            assert judged.returncode == 1
            assert json.loads(judged.stdout)["reasons"] == [f"{n} is fake: it computes no model" for n in ("P0", "D0")]
            assert [process.signal_and_wait(signal.SIGTERM) for process in fakes] == [0, 0]
        logs = {path.stem: path.read_text() for path in tmp_path.rglob("*.log")}
        assert all(f"{name} is FAKE" in logs[name] and f"{name} is FAKE" in logs["router"] for name in ("P0", "D0"))


def test_a_fake_joins_no_real_cluster_and_a_real_answer_says_nothing() -> None:
    settings = [f"model.path={TINY_MODEL_DIR}", "cache.num_pages=64"]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        words = [*CHITU, "serve", "--fake", "decode", "--url", cluster.url, "--log-dir", "-"]
        with ServeProcess(words, popen=forked_chitu) as fake:
            fake.wait_line("incompatible_layout")
            assert fake.process.wait(60) == 1
        reply = ask(cluster.url, 4)
        assert reply.status_code == 200 and "x-chitu-fake" not in reply.headers


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--fake", "prefill", "--once"), "--fake"),
        (("--fake", "prefill", "--port", "0"), "--fake"),
        (("--fake", "decode", "pd_disagg_1p1d_local"), "--fake"),
        (("--url", "http://127.0.0.1:1"), "--url"),
    ],
)
def test_options_that_mean_nothing_are_refused(words: tuple[str, ...], says: str) -> None:
    result = run(*CHITU, "serve", *words)
    assert result.returncode == 2 and says in result.stderr
