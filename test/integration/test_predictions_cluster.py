"""A real 1P1D whose clients predict answers: the text is the same, fewer steps make it, and usage, metrics and records
say what was right."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from nursery import FORKED
from support.router_process import wait_until
from test_metrics_cluster import D0, Scrape

from chitu.assets import TINY_MODEL_DIR
from chitu.assets.tiny_tasks import facts_for, recall
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster

CHAT = "/v1/chat/completions"
EXAMPLE = recall(random.Random(5), facts_for(300))
USER = {"role": "user", "content": EXAMPLE.prompt}
WRONG = "Nobody has ever heard of that, and it is no answer to anything at all."
BEGUN = "The honest raven opens "
"""Beginning of the answer."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    settings = [f"model.path={TINY_MODEL_DIR}", "model.served_name=m", "cache.num_pages=400"]
    with LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


def settled(cluster: LocalCluster) -> Scrape:
    """Return the metrics once D's counters have arrived with a heartbeat."""
    found = Scrape(cluster.url)

    def is_told() -> bool:
        nonlocal found
        found = Scrape(cluster.url)
        received = found("chitu_output_tokens_total") + found("chitu_stale_tokens_total")
        return found("chitu_instance_tokens_total", D0) == received and not found("chitu_instance_requests", D0)

    wait_until(is_told, 15.0, lambda: [s for s in found.samples if "tokens" in s.name])
    return found


class Asked(NamedTuple):
    answer: dict[str, Any]
    steps: float
    """Steps of D."""
    drafts: Counter[tuple[str, str]]
    """Draft tokens by source and result, as in the metrics."""

    @property
    def text(self) -> str:
        text: str = self.answer["choices"][0]["message"]["content"]
        return text

    @property
    def details(self) -> dict[str, int]:
        found: dict[str, int] = self.answer["usage"]["completion_tokens_details"]
        return found

    def expect_counts(self) -> None:
        """Check that usage and metrics count the same drafts."""
        told = {
            (source, result): counts["accepted"] if result == "accepted" else counts["drafted"] - counts["accepted"]
            for source, counts in self.answer["usage"].get("speculation", {}).items()
            for result in ("accepted", "rejected")
        }
        assert {key: count for key, count in told.items() if count} == dict(self.drafts)


def post(cluster: LocalCluster, path: str = CHAT, **fields: Any) -> httpx.Response:
    body = {"model": "m", "temperature": 0, "max_tokens": 60, **fields}
    if path == CHAT:
        body["messages"] = [USER]
    response = httpx.post(cluster.url + path, json=body, timeout=60.0, trust_env=False)
    assert response.status_code == 200, response.text
    return response


def ask(cluster: LocalCluster, prediction: str | None = None, **fields: Any) -> Asked:
    if prediction is not None:
        fields["prediction"] = {"type": "content", "content": prediction}
    before = settled(cluster)
    answer = post(cluster, **fields).json()
    after = settled(cluster)

    def drafts(scrape: Scrape) -> Counter[tuple[str, str]]:
        found = [sample for sample in scrape.samples if sample.name == "chitu_draft_tokens_total"]
        return Counter({(s.labels["source"], s.labels["result"]): int(s.value) for s in found})

    steps = "chitu_instance_steps_total"
    return Asked(answer, after(steps, D0) - before(steps, D0), drafts(after) - drafts(before))


@pytest.fixture(scope="module")
def without(cluster: LocalCluster) -> Asked:
    """Return the answer without drafts."""
    asked = ask(cluster, speculation="off")
    assert asked.text == EXAMPLE.answer and asked.text.startswith(BEGUN)
    assert "speculation" not in asked.answer["usage"] and asked.details == {"reasoning_tokens": 0}
    assert not asked.drafts
    return asked


def test_a_right_prediction_takes_fewer_steps_to_the_same_text(cluster: LocalCluster, without: Asked) -> None:
    found = ask(cluster, without.text)
    assert found.answer["choices"] == without.answer["choices"]
    assert found.answer["usage"]["completion_tokens"] == without.answer["usage"]["completion_tokens"]
    accepted = found.details["accepted_prediction_tokens"]
    assert accepted > 3 and found.details["rejected_prediction_tokens"] == 0
    assert found.steps <= without.steps - accepted
    assert found.answer["usage"]["speculation"]["prediction"] == {"drafted": accepted, "accepted": accepted}
    found.expect_counts()
    assert settled(cluster)("chitu_decode_tokens_per_row", D0) > 1


def test_of_a_prediction_that_goes_wrong_the_right_part_counts_and_the_text_is_the_same(
    cluster: LocalCluster, without: Asked
) -> None:
    found = ask(cluster, f"{BEGUN}every window there is, and nobody has heard of a door.")
    assert found.answer["choices"] == without.answer["choices"]
    assert found.details["accepted_prediction_tokens"] > 0 and found.details["rejected_prediction_tokens"] > 0
    assert found.answer["usage"]["completion_tokens"] == without.answer["usage"]["completion_tokens"]
    found.expect_counts()


def test_of_a_wrong_prediction_nothing_is_accepted_and_the_text_is_the_same(
    cluster: LocalCluster, without: Asked
) -> None:
    found = ask(cluster, WRONG)
    assert found.answer["choices"] == without.answer["choices"]
    assert found.details["accepted_prediction_tokens"] == 0
    found.expect_counts()


def test_a_request_without_drafts_has_none_whatever_it_predicts(cluster: LocalCluster, without: Asked) -> None:
    found = ask(cluster, without.text, speculation="off")
    assert found.answer["choices"] == without.answer["choices"] and found.steps == without.steps
    assert "speculation" not in found.answer["usage"] and not found.drafts
    assert found.details["accepted_prediction_tokens"] == found.details["rejected_prediction_tokens"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3, "temperature": 0.8, "seed": 7},
        {"logprobs": True, "top_logprobs": 2},
        {"response_format": {"type": "json_object"}},
        {"presence_penalty": 1.5, "frequency_penalty": 1.5},
    ],
    ids=["choices", "logprobs", "grammar", "penalties"],
)
def test_what_openai_refuses_beside_a_prediction_is_as_without_one(
    cluster: LocalCluster, without: Asked, fields: dict[str, Any]
) -> None:
    plain, found = ask(cluster, speculation="off", **fields), ask(cluster, without.text, **fields)
    assert [choice["message"] for choice in found.answer["choices"]] == [
        choice["message"] for choice in plain.answer["choices"]
    ]
    if "logprobs" in fields:
        lines = [asked.answer["choices"][0]["logprobs"]["content"] for asked in (found, plain)]
        for line, expected in zip(*lines, strict=True):
            assert line["token"] == expected["token"] and line["logprob"] == pytest.approx(
                expected["logprob"], abs=2e-3
            )
    found.expect_counts()


def test_a_stream_has_it_in_its_usage_and_the_record_of_the_request_too(cluster: LocalCluster, without: Asked) -> None:
    body = {"prediction": {"type": "content", "content": without.text}}
    response = post(cluster, **body, stream=True, stream_options={"include_usage": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert "".join([e["choices"][0]["delta"].get("content", "") for e in events if e["choices"]]) == without.text
    usage = events[-1]["usage"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    records = httpx.get(f"{cluster.url}/cluster", timeout=5.0, trust_env=False).json()["requests"]
    (record,) = [each for each in records if each["request_id"] == response.headers["x-request-id"]]
    assert {source: {"drafted": d, "accepted": a} for source, d, a in record["drafts"]} == usage["speculation"]


def test_other_routes_say_what_was_drafted(cluster: LocalCluster) -> None:
    fields: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": f"{EXAMPLE.answer}\n" * 6},
        "/v1/responses": {"input": EXAMPLE.prompt},
        "/v1/messages": {"messages": [USER]},
    }
    for path, asked in fields.items():
        for given in ("off", "auto"):
            body = {"speculation": given, **asked}
            if path == "/v1/responses":
                body |= {"max_tokens": None, "max_output_tokens": 60}
            # Whether drafts are worth their price in one answer depends on measured times.
            found = ["speculation" in post(cluster, path, **body).json()["usage"] for _ in range(5)]
            assert any(found) == (given == "auto"), path


def test_what_the_router_ends_has_no_counts_of_its_prediction(cluster: LocalCluster, without: Asked) -> None:
    longer = {"ignore_eos": True, "max_tokens": 1500}  # D is not done before the router finds the stop
    answer = post(cluster, prediction={"type": "content", "content": without.text}, stop="raven", **longer).json()
    assert answer["choices"][0]["message"]["content"] == BEGUN.partition("raven")[0]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
