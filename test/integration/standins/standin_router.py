"""Stand-in router for tests of the supervisor: ports, `/health` (all instances are up); routes nothing.

If its folder has a file `full`, none of its files can grow, as on a full disk.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import resource
import signal
import sys

from chitu.config.load import load_topology, progress_file
from chitu.process.progress import ProgressWriter


def say(*words: object) -> None:
    with contextlib.suppress(OSError):
        print(*words, flush=True)


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        names = [f"P{k}" for k in range(len(router.prefill_schedulers))]
        names += [f"D{k}" for k in range(len(router.decode_schedulers))]
        members = [{"name": name, "incarnation": 1, "draining": False, "home": ""} for name in names]
        body = json.dumps({"instances": members}).encode()
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        say("asked for", self.path)


parser = argparse.ArgumentParser()
parser.add_argument("--config")
parser.add_argument("overrides", nargs="*")
arguments = parser.parse_args()
topology = load_topology(arguments.config, arguments.overrides)
router = topology.dp_config.router
server = http.server.ThreadingHTTPServer(("127.0.0.1", router.port), Health)
server.daemon_threads = True
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if (report := progress_file()) is not None and (report.parent / "full").exists():
    resource.setrlimit(resource.RLIMIT_FSIZE, (report.stat().st_size, resource.RLIM_INFINITY))
ProgressWriter().ready(ports={"port": server.server_port, "stats_port": 1, "bootstrap_port": 2})
say("router listens")
server.serve_forever()
