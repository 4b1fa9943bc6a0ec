"""A cluster of two hosts that reach each other over IPv6 alone: control, tokens, probes, API and KV."""

from __future__ import annotations

import contextlib
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
from network import Network
from nursery import chitu
from serve_process import ServeProcess
from support.router_process import wait_until

from chitu.assets import TINY_MODEL_DIR
from chitu.config.cluster_key import ENVIRONMENT_KEY

CHITU = [sys.executable, "-m", "chitu.cli"]
PROMPT = {"model": "m", "prompt": [5] * 70, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_hosts_with_ipv6_addresses_serve_and_move_kv(tmp_path: Path) -> None:
    with Network(["first", "second"]) as network, ExitStack() as stack:
        first, second = network.address_6("first"), network.address_6("second")
        words = ["pd_disagg_1p1d_multi_node", "--hosts", f"{first},{second}", "--model", str(TINY_MODEL_DIR)]
        settings = ["model.served_name=m", "cache.num_pages=64", "scheduler.threads=1", "dp_config.probe_port=9000"]
        settings += [f"dp_config.router.pd_disaggregation.{item}" for item in ("transport=mooncake", "verify_kv=all")]
        environment = {**os.environ, ENVIRONMENT_KEY: "of this cluster 0123456789", "CUDA_VISIBLE_DEVICES": ""}
        for index, host in enumerate(("first", "second")):
            argv = network.argv(host, [*CHITU, "node", *words, "--node-index", str(index), "--log-dir", "-", *settings])
            process = stack.enter_context(ServeProcess(argv, environment, tmp_path, chitu))
            lines = process.lines
        with network.inside("first"):
            url = f"http://[{first}]:21003"

            probes = [f"{url}/health", *(f"http://[{host}]:9000/readyz" for host in (first, second))]

            def is_ready() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return all(httpx.get(probe, timeout=5.0, trust_env=False).is_success for probe in probes)
                return False

            wait_until(is_ready, 120.0, lambda: lines)
            answer = httpx.post(f"{url}/v1/completions", json=PROMPT, timeout=60.0, trust_env=False)
            assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 8)
            path = 'chitu_path_bytes_total{decode="D0",prefill="P0",transport="mooncake_tcp"}'  # comes with a heartbeat
            wait_until(
                lambda: path in httpx.get(f"{url}/metrics", timeout=5.0, trust_env=False).text, 15.0, lambda: path
            )
