"""Cost of a routing decision, and time until a new instance is used: `python -m benchmark.routing`.

Decisions: `Selector` in this process, with 5, 100 and 2000 simulated instances (two P to three D), under load: each
decision is counted as the router counts it, 256 requests are in flight, and load reports arrive in between. In the last
rows there is an SLO, and D that compute prompts, so that several ways are compared by cost. Prompts have 512 tokens
(token ids; one in two continues an earlier prompt). A decision is everything from the prompt to the way, in CPU time of
its thread, so other work of the machine does not count.

Joins: the real router process with a fake P0 and D0 and one request after the other; then D1 starts. Measured is the
time from its start (sockets bound, nothing sent yet) until the router sends it the first request.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast, get_args

from support.fake_worker import STARTED
from support.router_process import RouterUnderTest, wait_until

from chitu.config.schema import PolicyName, RouterConfig, SLOConfig
from chitu.launch.router_client import RouterClient
from chitu.net.aio import Outbox
from chitu.protocol import ClusterView, InstanceInfo, KVLayout, LoadReport, pack_i32
from chitu.router.candidates import Way, instance_key
from chitu.router.loads import InstanceLoad
from chitu.router.members import Members
from chitu.router.ways import Selector
from chitu.tools.bench.report import DEFAULT_DIR, publish
from chitu.tools.make_model import make_model
from chitu.types import Role

POLICIES = get_args(PolicyName)
SLO = SLOConfig(ttft_s=2.0, tpot_s=0.05)
SIZES = (5, 100, 2000)
PROMPT_TOKENS = 512
IN_FLIGHT = 256
JOIN_TIMEOUT_S = 30.0
NO_OUTBOX = cast(Outbox, SimpleNamespace(open=lambda instance: None))
"""Nothing is sent where only decisions are measured."""


def made_up_view(size: int, computes: bool = False) -> ClusterView:
    layout = KVLayout.uniform("hash", 32, 8, 128, 16, "bfloat16", 128_000)
    prefills = size * 2 // 5
    roles = [(Role.PREFILL, k) for k in range(prefills)] + [(Role.DECODE, k) for k in range(size - prefills)]
    infos = [InstanceInfo(r, k, 1, "10.0.0.1", 1, 2, layout, 32_768, computes=computes) for r, k in roles]
    return ClusterView(1, 1, tuple(infos))


def made_up_prompts(count: int) -> list[bytes]:
    """Return `count` prompts. Half of them share a prefix with an earlier one."""
    rng = random.Random(5)
    prompts: list[bytes] = []
    for n in range(count):
        known = rng.choice(prompts)[: 4 * 384] if n % 2 and prompts else b""
        fresh = pack_i32([rng.randrange(128_000) for _ in range(PROMPT_TOKENS - len(known) // 4)])
        prompts.append(known + fresh)
    return prompts


def decisions(policy: PolicyName, size: int, count: int, slo: SLOConfig = SLOConfig()) -> list[float]:
    """Return the CPU seconds of each decision."""
    view, prompts = made_up_view(size, computes=slo.tpot_s is not None), made_up_prompts(512)
    config = RouterConfig(policy=policy, slo=slo)
    members = Members(config, NO_OUTBOX)
    selector = Selector(config, members)
    for info in view.instances:
        members.add(info)
    members.on_view(view)
    report = LoadReport(waiting=1, running=2, waiting_tokens=900)
    running: deque[Way] = deque()
    spans_s = []
    for n in range(count + IN_FLIGHT):
        prompt = prompts[n % len(prompts)]
        start_s = time.thread_time()
        way = selector.select(prompt)
        spans_s.append(time.thread_time() - start_s)
        for load, new_tokens in _used(members, way):
            load.on_sent(new_tokens, time.monotonic())
        running.append(way)
        if len(running) > IN_FLIGHT:
            for load, new_tokens in _used(members, running.popleft()):
                load.on_ended(new_tokens, has_begun=False)
        members.on_report(members[instance_key(view.instances[n % size])], report, time.monotonic())
    return spans_s[IN_FLIGHT:]


def _used(members: Members, way: Way) -> Iterator[tuple[InstanceLoad, int]]:
    """Yield the loads that a request on this way counts in, with the tokens that it has computed there."""
    computes = way.prefill or way.decode
    for info in filter(None, (way.prefill, way.decode)):
        yield members[instance_key(info)].load, way.new_tokens if info is computes else 0


def join_s(router: RouterUnderTest) -> float:
    """Start a D1, return the seconds from the binding of its sockets to its first request, and end it again."""
    body = {"model": "bench", "prompt": [1, 2, 3], "max_tokens": 1}
    client = RouterClient(router.url)
    worker = router.start_worker("D1", wait=False)
    end_s = time.monotonic() + JOIN_TIMEOUT_S
    try:
        while time.monotonic() < end_s:
            client.post("/v1/completions", body, timeout_s=10)
            snapshot = client.cluster()
            for instance in snapshot.instances:
                if instance.name == "D1" and instance.status == "up":
                    # The router and D1 both use this machine's monotonic clock, so their times can be compared.
                    log = (router.folder / "worker.log").read_text(encoding="utf-8")
                    born_s = float(log.rpartition(STARTED)[2].split()[0])
                    served_s = [r.created_at_s for r in snapshot.requests if r.decode == "D1"]
                    if first_s := min((at_s for at_s in served_s if at_s > born_s), default=None):
                        return first_s - born_s
        raise TimeoutError(f"D1 got no request within {JOIN_TIMEOUT_S:g} s")
    finally:
        worker.terminate()
        worker.wait(10)
        wait_until(lambda: "D1" not in router.members(), 10, "D1 to leave")


def joins(count: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", family="qwen3")
        with RouterUnderTest(Path(folder), model, ("model.served_name=bench",)) as router:
            router.start_worker("P0,D0")
            return [join_s(router) for _ in range(count)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.routing", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--decisions", type=int, default=20_000, help="measured ones for each row")
    parser.add_argument("--joins", type=int, default=5, help="instances that join a running router, one by one")
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR)
    args = parser.parse_args(argv)
    rows = []
    kinds = [(policy, policy, SLOConfig()) for policy in POLICIES] + [("by cost", "prefix_affinity", SLO)]
    for name, policy, slo in kinds:
        for size in SIZES:
            spans_s = sorted(decisions(policy, size, args.decisions, slo))
            per_s = round(len(spans_s) / sum(spans_s))
            p50_us, p99_us = (1e6 * spans_s[len(spans_s) * part // 100] for part in (50, 99))
            rows.append((name, size, per_s, p50_us, p99_us))
    publish("routing", ("policy", "instances", "decisions/CPU-s", "p50 us", "p99 us"), rows, args.json_dir)
    if args.joins:
        spans_s = joins(args.joins)
        row = (len(spans_s), 1e3 * statistics.median(spans_s), 1e3 * max(spans_s))
        publish("join", ("joins", "to the first request, median ms", "longest ms"), [row], args.json_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
