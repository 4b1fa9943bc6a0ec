"""Stand-in scheduler for tests of the supervisor, with the flags and the progress file of the real one.

`model.served_name` selects its behaviour: `die_at_start` (exit 3 before it is ready), `stubborn` (ignores SIGTERM),
`talkative` (writes 100 kB at every SIGUSR2), `refused` (exit 1 as soon as it is ready), `slow` (never ready),
`hung_rank` (exit 1 after a drain), anything else: ready at once, ends on SIGTERM. SIGUSR1 drains it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile

from chitu.config.load import load_topology, router_host
from chitu.process.descendants import die_with_torchrun
from chitu.process.progress import DRAINED, ProgressWriter

die_with_torchrun()
parser = argparse.ArgumentParser()
parser.add_argument("--config")
parser.add_argument("--role")
parser.add_argument("--rank", type=int)
parser.add_argument("overrides", nargs="*")
arguments = parser.parse_args()
topology = load_topology(arguments.config, arguments.overrides)
behaviour = topology.model.served_name
router = topology.dp_config.router
print(f"{arguments.role} {arguments.rank} of router {router_host(topology)}:{router.port}", flush=True)
print(f"stats port {router.stats_port}", flush=True)
progress = ProgressWriter()
progress.loading(1 << 20, 4 << 20)
if behaviour == "die_at_start":
    print("the reason why it ends", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else lambda *_: sys.exit(0))


def drained(*_: object) -> None:
    progress.state(DRAINED)
    sys.exit(1 if behaviour == "hung_rank" else 0)


signal.signal(signal.SIGUSR1, drained)
# Bypass Python's own streams, as a native library does.
signal.signal(signal.SIGUSR2, lambda *_: os.write(2, b"x" * 100_000 + b"\n") if behaviour == "talkative" else None)
tempfile.mkdtemp(prefix="left-behind-")
progress.state("warmup")
if behaviour == "slow":
    signal.pause()
progress.ready(1, is_member=True)
if behaviour == "refused":
    print("the router refused me", flush=True)
    sys.exit(1)
while True:
    signal.pause()
