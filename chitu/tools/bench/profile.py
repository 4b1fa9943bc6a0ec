"""How fast an engine is, as one JSON file for `chitu size`: what running instances measure of their own steps.

    chitu bench profile OUT.json [TOPOLOGY.yaml] [a.b=c] [--model MODEL]     # starts 1P1D, or the topology given
    chitu bench profile OUT.json --url http://HOST:21003                    # of a running cluster, under its own load

Instances fit a line to the times of their steps (`instance/pace.py`) and report it with every heartbeat. So a cluster
that serves has its profile already. One that is started here gets a load that covers batches and lengths: groups of 1,
2, 4, ... requests with prompts from short to long. The time of messages is what a single request takes beyond that.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from chitu.config.devices import overlaps_steps
from chitu.config.load import load_topology
from chitu.config.schema import InstanceConfig, Topology
from chitu.errors import ConfigError
from chitu.launch.local import LocalCluster
from chitu.launch.router_calls import credential
from chitu.launch.router_client import RouterClient
from chitu.protocol import LoadReport
from chitu.protocol.snapshot import ClusterSnapshot, InstanceSnapshot
from chitu.simulation.cluster import SimulatedCluster
from chitu.simulation.profile import EngineProfile, ImageCost, LinkCost, StepCost, write_profile
from chitu.tools.bench.model_argument import MODEL_HELP, model_folder
from chitu.tools.bench.report import commit, machine
from chitu.tools.bench.token_times import token_times_s
from chitu.types import Role

ROUNDS = 3
GROUP_S = 8.0
"""About the longest time in which the prompts of a group are computed. A request may wait longer (`max_queue_s`)."""
SINGLES = 8
"""Single requests that measure the time of messages."""
FEW_STEPS = 32
"""A fit to fewer measured steps is none."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="chitu bench profile", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("topology", nargs="*", help="a file or a packaged topology, and dotted overrides")
    parser.add_argument("--model", type=model_folder, help=f"{MODEL_HELP}; overrides model.path")
    parser.add_argument("--url", help="a running cluster, in place of starting one")
    parser.add_argument("--name", default="", help="name of model and device in the file")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.url is not None:
        if arguments.topology or arguments.model:
            raise ConfigError("--url takes the model and the topology of the running cluster")
        client = RouterClient(arguments.url, credential(arguments.url))
        profile = profile_of(client.cluster(), client.topology(), arguments.name)
    else:
        names = [word for word in arguments.topology if "=" not in word]
        overrides = [word for word in arguments.topology if "=" in word]
        overrides += ["model.served_name=m", "dp_config.router.port=0", "cache.prefix_cache=false"]
        if arguments.model:
            overrides.append(f"model.path={arguments.model}")
        topology = load_topology(names[0] if names else None, overrides)
        with LocalCluster(topology) as cluster:
            cluster.wait_ready()
            profile = measure(cluster.url, topology, arguments.name)
    write_profile(profile, arguments.out)
    print(f"{arguments.out}: {describe(profile)}")


def measure(url: str, topology: Topology, name: str = "") -> EngineProfile:
    """Load a cluster that does nothing else, and return its profile."""
    client = RouterClient(url, credential(url))
    most = client.cluster().max_model_len or 2048
    run_load(url, topology.scheduler.max_running_requests, most)
    time.sleep(2 * topology.dp_config.router.pd_disaggregation.deadlines.heartbeat_interval_s)
    profile = profile_of(client.cluster(), topology, name)
    return with_messages(profile, url)


def run_load(url: str, most_running: int, most_tokens: int) -> None:
    """Send groups of requests, from one to as many as run at once, with prompts of all lengths; on slow machines a
    large group has short prompts alone, or is left out."""
    rng = random.Random(7)
    lengths = [length for length in (16, 64, 256, 512, 1024, 2048) if length + 80 <= most_tokens]
    groups = [count for count in (1, 2, 4, 8, 16, 32, 64, 128) if count <= most_running]
    tokens_per_s = 0.0
    with ThreadPoolExecutor(max(groups)) as clients:
        for _, count in itertools.product(range(ROUNDS), groups):
            some = [length for length in lengths if count * length <= tokens_per_s * GROUP_S]
            if count == 1:
                some = some or lengths[:1]
            elif not some:
                continue
            prompts = [[rng.randrange(10, 500) for _ in range(rng.choice(some))] for _ in range(count)]
            times_s = list(clients.map(lambda prompt: token_times_s(url, prompt, 48), prompts))
            tokens_per_s = max(tokens_per_s, sum(map(len, prompts)) / max(times[0] for times in times_s))


def profile_of(cluster: ClusterSnapshot, topology: Topology, name: str = "") -> EngineProfile:
    """Return what the instances report. Raises ConfigError if they have measured too little."""
    there = [(instance, instance.load) for instance in cluster.instances if instance.load is not None]
    up = [(instance, load) for instance, load in there if instance.role != Role.ENCODE]
    loads = [load for _, load in up]
    prompt = [load.rates for load in loads if load.rates.prompt_steps >= FEW_STEPS]
    decode = [load.rates for load in loads if load.rates.decode_steps >= FEW_STEPS]
    if not prompt or not decode:
        counts = ", ".join(f"{i.name} {load.rates.prompt_steps}+{load.rates.decode_steps}" for i, load in up) or "none"
        raise ConfigError(
            f"too few steps are measured yet (with prompts + without: {counts}; {FEW_STEPS} of each are needed): "
            "send some requests, or let `chitu bench profile` start a cluster"
        )
    instance, load = up[-1]
    layout, scheduler, router = instance.layout, topology.scheduler, topology.dp_config.router
    assert layout is not None, "an instance that is up has a layout"
    configs = (*router.decode_schedulers, *router.unified_schedulers, *router.prefill_schedulers)
    config = configs[0] if configs else InstanceConfig()
    members = config.dp_size if config.experts == "spread" else 1  # whose rows are counted together
    cost = StepCost(
        prefill_s=_median(rates.prompt_step_s for rates in prompt),
        prompt_token_s=_median(rates.prompt_token_s for rates in prompt),
        prompt_pair_s=_median(rates.prompt_pair_s for rates in prompt),
        decode_s=_median(rates.decode_step_s for rates in decode),
        sequence_s=members * _median(rates.row_s for rates in decode),
        context_s=_median(rates.context_token_s for rates in decode),
    )
    return EngineProfile(
        cost,
        link_of(loads),
        name=name or f"{cluster.model} on {machine()['cpu']}",
        tp_size=layout.tp_size,
        dp_size=config.dp_size,
        experts=config.experts,
        num_pages=load.pages_total,
        page_size=cluster.page_size,
        kv_bytes_per_token=max(1, sum(layout.bytes_by_layer) * layout.tp_size // layout.page_size),
        num_layers=layout.num_layers,
        vocab_size=layout.vocab_size,
        max_model_len=cluster.max_model_len or 1 << 20,
        max_running_requests=scheduler.max_running_requests,
        max_batched_tokens=scheduler.max_batched_tokens,
        chunk_size=scheduler.chunk_size,
        overlap=bool(configs) and overlaps_steps(scheduler, config),
        images=images_of(there),
        measured={
            "commit": commit(),
            "machine": machine(),
            "instances": [_source(instance, load) for instance, load in up],
        },
    )


def _source(instance: InstanceSnapshot, load: LoadReport) -> dict[str, object]:
    return {"name": instance.name, "host": instance.host, "rates": msgspec.structs.asdict(load.rates)}


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def images_of(up: Sequence[tuple[InstanceSnapshot, LoadReport]]) -> ImageCost:
    """Return what images took: on E, if there are any that encoded, else on whoever encoded them."""
    rates = [(instance, load) for instance, load in up if load.image_load.row_s]
    of_e = [(instance, load) for instance, load in rates if instance.role == Role.ENCODE]
    cost = ImageCost(region_rows=max([ImageCost().region_rows, *(load.image_rows for _, load in up)]))
    if rates:
        cost = msgspec.structs.replace(cost, row_s=_median(load.image_load.row_s for _, load in of_e or rates))
    for instance, _ in of_e:
        if instance.layout is not None:
            cost = msgspec.structs.replace(cost, row_bytes=float(sum(instance.layout.bytes_by_layer)))
    return cost


def link_of(loads: Sequence[LoadReport]) -> LinkCost:
    """Return what all writes took. Their times include waits for layers on GPUs, so it is a lower bound there."""
    paths = [path for load in loads for path in load.paths]
    busy_s, nbytes = sum(path.busy_s for path in paths), sum(path.bytes for path in paths)
    return LinkCost(bytes_per_s=nbytes / busy_s) if nbytes and busy_s else LinkCost()


def with_messages(profile: EngineProfile, url: str) -> EngineProfile:
    """Return the profile with the time of messages: what single requests take to token 1 beyond the simulation of it
    without any."""
    rng, length = random.Random(11), min(256, profile.max_model_len // 2)
    times_s = []
    for _ in range(SINGLES):
        times_s.append(token_times_s(url, [rng.randrange(10, 500) for _ in range(length)], 2)[0])
    bare = msgspec.structs.replace(profile, link=msgspec.structs.replace(profile.link, message_s=0.0))
    cluster = SimulatedCluster(bare, prefill=1, decode=1)
    alone = cluster.submit(0.0, length, 2)
    cluster.run()
    rest_s = max(0.0, statistics.median(times_s) - alone.ttft_s)
    return msgspec.structs.replace(profile, link=msgspec.structs.replace(profile.link, message_s=rest_s / 3))


def describe(profile: EngineProfile) -> str:
    """Return the profile in a sentence."""
    cost, link = profile.cost, profile.link
    return (
        f"{1e6 * cost.prompt_token_s:.3g} us a prompt token, {1e3 * cost.prefill_s:.3g} ms a step of prompts, "
        f"{1e3 * cost.decode_s:.3g} ms a step of decoding and {1e6 * cost.sequence_s:.3g} us a request in it, "
        f"{link.bytes_per_s / 1e9:.3g} GB/s, {1e3 * link.message_s:.3g} ms a message"
        + (f", {1e6 * profile.images.row_s:.3g} us a row of an image" if profile.images.row_s else "")
    )


if __name__ == "__main__":
    main()
