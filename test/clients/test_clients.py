"""Third-party clients, unmodified and with their defaults, against one P and one D with real pages.

Each runs in its own process with its own interpreter: the clients' dependencies conflict with those of the tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from chitu.launch.local import LocalCluster

NUM_REQUESTS, OUTPUT_TOKENS = 6, 8

RunClient = Callable[..., str]

pytestmark = pytest.mark.timeout(600)


# langchain and instructor send by the official client what that one's own script sends: chats, streams, tools, schemas.
BY_HAND = [pytest.param(name, marks=pytest.mark.by_hand) for name in ("agents", "litellm", "langchain", "instructor")]


@pytest.mark.parametrize("client", ["openai", "anthropic", *BY_HAND])
def test_texts_streams_tools_and_schemas_are_served(run_client: RunClient, client: str) -> None:
    assert run_client(f"{client}_client.py").splitlines()[-1] == "served"


@pytest.mark.by_hand
def test_guidellm_counts_the_tokens_that_the_server_counted(
    run_client: RunClient, cluster: LocalCluster, model: Path, tmp_path: Path
) -> None:
    before = counted(cluster)
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,model=tiny,target={cluster.url}",
        "profile": "kind=concurrent,streams=2",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={model}",
        "data": f"kind=synthetic_text,prompt_tokens=40,output_tokens={OUTPUT_TOKENS}",
        "output": f"kind=json,path={report}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    run_client("-m", "guidellm", "run", *words, "--disable-console")
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    requests = {state: found or [] for state, found in benchmark["requests"].items()}
    assert {state: len(found) for state, found in requests.items() if found} == {"successful": NUM_REQUESTS}, requests
    assert [r["output_tokens"] for r in requests["successful"]] == [OUTPUT_TOKENS] * NUM_REQUESTS, requests
    own = [sum(request[f"{kind}_tokens"] for request in requests["successful"]) for kind in ("prompt", "output")]
    assert own == [after - at_first for after, at_first in zip(counted(cluster), before, strict=True)], requests


@pytest.mark.by_hand
@pytest.mark.slow
def test_lm_eval_finds_what_it_finds_with_transformers_in_float32(run_client: RunClient, model: Path) -> None:
    assert run_client("lm_eval_client.py", model).splitlines()[-1] == "equal"


def counted(cluster: LocalCluster) -> tuple[int, int]:
    """Return the prompt and output tokens that the router has counted so far."""
    lines = httpx.get(f"{cluster.url}/metrics", trust_env=False).text.splitlines()
    values = dict(line.split() for line in lines if line.startswith(("chitu_prompt_tok", "chitu_output_tok")))
    return int(float(values["chitu_prompt_tokens_total"])), int(float(values["chitu_output_tokens_total"]))
