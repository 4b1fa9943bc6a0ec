"""A real 1P1D as what stands beside it sees it: its KV events, metrics under other names, headers of a gateway."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from completions import complete_all
from nursery import FORKED
from ports import free_ports
from prometheus_client.parser import text_string_to_metric_families
from support.kv_event_reader import DECODERS, EventReader, EventSubscriber
from support.router_process import wait_until

from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.net.curve import derive
from chitu.tools.make_model import make_model

ROUTER = "dp_config.router"
PAGE_SIZE, TOKENS = 16, 20
PROMPTS = [list(range(first, first + 40)) for first in (10, 10, 60)]
PROMPTS[1] = PROMPTS[0][:32] + [1] * 9


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, dict[str, EventSubscriber]]]:
    model = make_model(tmp_path_factory.mktemp("models") / "llama", family="llama")
    ports = free_ports(4)
    settings = [
        f"model.path={model}",
        "model.served_name=m",
        "cache.num_pages=200",
        f"{ROUTER}.prefill_schedulers.0.kv_events_port={ports[0]}",
        f"{ROUTER}.prefill_schedulers.0.kv_events_replay_port={ports[1]}",
        f"{ROUTER}.decode_schedulers.0.kv_events_port={ports[2]}",
        f"{ROUTER}.decode_schedulers.0.kv_events_replay_port={ports[3]}",
        f"{ROUTER}.metric_aliases=vllm",
        "cache.events.topic='kv@{name}@{model}'",
    ]
    with LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        readers = {"P0": EventSubscriber(*ports[:2]), "D0": EventSubscriber(*ports[2:])}
        yield cluster, readers
        for reader in readers.values():
            reader.close()


def index_of(reader: EventSubscriber) -> set[tuple[int, ...]]:
    """Return the tokens up to the end of every cached page, by all messages so far."""
    index = EventReader()
    for _, payload in reader.again(0):
        index.read(payload)
    return set(index.tokens.values())


def pages(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[:end]) for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)}


def test_a_reader_knows_what_each_instance_has(world: tuple[LocalCluster, dict[str, EventSubscriber]]) -> None:
    cluster, readers = world
    options = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    answers = complete_all(cluster.url, PROMPTS, [options] * len(PROMPTS))
    prompts = set[tuple[int, ...]]().union(*map(pages, PROMPTS))
    wait_until(lambda: index_of(readers["P0"]) >= prompts, 10.0, "P0's pages")
    assert index_of(readers["P0"]) == prompts
    # The last token of an answer is computed by nobody.
    whole = [prompt + answer.token_ids[:-1] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    wait_until(lambda: index_of(readers["D0"]) >= set().union(*map(pages, whole)), 10.0, "D0's pages")
    assert index_of(readers["D0"]) == set().union(*map(pages, whole))
    secrets = derive(cluster_key_of(cluster.topology))
    assert secrets is not None
    headers = {"authorization": f"Bearer {secrets.token}"}
    httpx.post(f"{cluster.url}/admin/cache/flush", headers=headers, timeout=10.0, trust_env=False).raise_for_status()
    for name in readers:
        wait_until(lambda name=name: not index_of(readers[name]), 10.0, f"{name} is flushed")  # type: ignore[misc]


def test_messages_name_the_instance_and_the_model(world: tuple[LocalCluster, dict[str, EventSubscriber]]) -> None:
    cluster, readers = world
    complete_all(cluster.url, [PROMPTS[2]], [{"max_tokens": 2, "ignore_eos": True}])
    for name, reader in readers.items():
        topic, _, payload = reader.next()
        assert topic == f"kv@{name}@m".encode()
        assert DECODERS["map"].decode(payload).data_parallel_rank == 0


def test_a_scraper_finds_the_names_that_it_expects(world: tuple[LocalCluster, dict[str, EventSubscriber]]) -> None:
    cluster, _ = world
    text = httpx.get(f"{cluster.url}/metrics", timeout=10.0, trust_env=False).text
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"} <= names
    assert {"vllm:request_success_total", "vllm:time_to_first_token_seconds_bucket", "chitu_requests_total"} <= names
    assert 'vllm:cache_config_info{block_size="16",model_name="m",num_gpu_blocks="200"} 1.0' in text


def test_headers_of_a_gateway_choose_nothing(world: tuple[LocalCluster, dict[str, EventSubscriber]]) -> None:
    """They name other models, hosts and instances, and times that cannot be kept."""
    cluster, _ = world
    body = {"model": "m", "prompt": PROMPTS[0], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}
    elsewhere = "192.0.2.1:1"
    headers = {f"x-gateway-destination-endpoint{end}": elsewhere for end in ("", "-subset", "-served")}
    headers |= {f"x-{name}": elsewhere for name in ("prefiller-host-port", "data-parallel-host-port")}
    headers |= {"x-encoder-hosts-ports": elsewhere, "x-slo-ttft-ms": "0", "x-slo-tpot-ms": "x"}
    for owner in ("gateway", "llm-d"):
        headers |= {f"x-{owner}-model-name-rewrite": "none", f"x-{owner}-inference-objective": "-5"}
        headers |= {f"x-{owner}-inference-fairness-id": "{}"}
    answers = [
        httpx.post(f"{cluster.url}/v1/completions", json=body, headers=given, timeout=60.0, trust_env=False)
        for given in ({}, {**headers, "x-request-id": "from-the-gateway"})
    ]
    tokens = [answer.json()["choices"][0]["token_ids"] for answer in answers]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 5
    assert answers[1].headers["x-request-id"] == "from-the-gateway"
