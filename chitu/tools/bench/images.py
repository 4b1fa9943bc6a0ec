"""Time to first token (TTFT) of text beside images, with and without an E, in one interleaved run.

    chitu bench images [--rounds 3] [--seconds 20] [--share 0.5] [--plot FILE.png]

Clusters of the same model run at once, and take turns with the same requests: text at steady intervals, for a part of
the time alone, then beside prompts that have an image each, no two the same. Setups:

* 1P1D: P computes images and text on one core;
* 1P1D, P on two cores: what P makes of the core that an E would have;
* 1E1P1D: P has one core, E another one.

Router, D, the processes that make patches of images, and this client have the other cores, or, on two, that of E. So
images come at intervals by which P alone is busy with them for `--share` of the time: an image takes as long as the
first ones do at 1P1D. Columns: TTFT of text without images, and of text and of prompts with an image beside each other,
p50 and p99 of all rounds; tokens of all answers a second beside images; images that an E encoded and that P did.

With `--devices` P, D and E compute on these devices, in this order, and no process is bound to a core.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import importlib
import io
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from chitu.config.load import load_topology
from chitu.errors import ConfigError
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.net.client import Server, events_of
from chitu.process.supervisor import POLL_S
from chitu.tools.bench.model_argument import MODEL_HELP, model_folder
from chitu.tools.bench.report import DEFAULT_DIR, publish
from chitu.tools.make_model import make_model
from chitu.tools.size.report import require_matplotlib

ANSWER_TOKENS, PROMPT_TOKENS = 4, 64
FIRST_IMAGES = 3
"""Images by which the time of one is known; one more loads what is loaded with the first."""
ALONE = 0.4
"""Share of a turn without images."""
TIMEOUT_S = 300
SIDE = 512
"""Pixels of a side of an image: 256 tokens of the model that is made."""
PROCESSES = "/proc/{}/task"
LOCAL = "dp_config.router"
COLUMNS = (
    *("setup", "cores or devices", "text alone p50 ms", "alone p99", "beside images p50", "beside p99"),
    *("image p50", "image p99", "tokens/s", "encoded"),
)


# ---------------------------------------------------------------------------------------------------------- the setups


@dataclass(slots=True)
class SetupTimes:
    """TTFT (s) of one kind of request."""

    alone: list[float] = field(default_factory=list)
    text: list[float] = field(default_factory=list)
    image: list[float] = field(default_factory=list)


@dataclass(slots=True)
class PlacedSetup:
    name: str
    places: dict[str, str]
    """Where instances compute: cores such as `0,1`, or a device, by name. `rest`: cores of all else."""
    has_e: bool = False
    times: SetupTimes = field(default_factory=SetupTimes)
    rates: list[float] = field(default_factory=list)
    """Tokens of answers a second beside images, by round."""

    @property
    def place(self) -> str:
        return ", ".join(f"{name}: {place}" for name, place in self.places.items())

    def settings(self) -> list[str]:
        own = [f"{LOCAL}.encode_schedulers=[{{port: 0}}]"] if self.has_e else []
        for name, key in (("P0", "prefill"), ("D0", "decode"), ("E0", "encode")):
            place = self.places.get(name)
            if name == "E0" and not self.has_e:
                continue
            if place is not None and not place[0].isdigit():
                own.append(f"{LOCAL}.{key}_schedulers.0.devices=[{place}]")
            else:
                own += [f"{LOCAL}.{key}_schedulers.0.{at}" for at in (f"threads={_count(place)}", "devices=[cpu]")]
        return own


def _count(place: str | None) -> int:
    return 1 if place is None else len(place.split(","))


def setups_of(cores: Sequence[int], devices: Sequence[str]) -> list[PlacedSetup]:
    """Return the setups on these cores, of which the first is the cluster without E on one. ConfigError for fewer than
    two."""
    if devices:
        p, d, e = devices
        return [PlacedSetup("1P1D", {"P0": p, "D0": d}), PlacedSetup("1E1P1D", {"P0": p, "D0": d, "E0": e}, has_e=True)]
    if len(cores) < 2:
        raise ConfigError("with one core there is nothing to see: P needs one, and E another one")
    p, e = str(cores[0]), str(cores[1])
    rest = ",".join(map(str, cores[2:])) or e
    return [
        PlacedSetup("1P1D", {"P0": p, "rest": rest}),
        PlacedSetup("1P1D, P on two cores", {"P0": f"{p},{e}", "rest": rest}),
        PlacedSetup("1E1P1D", {"P0": p, "E0": e, "rest": rest}, has_e=True),
    ]


def bind(cluster: LocalCluster, setup: PlacedSetup) -> None:
    """Give each process of a cluster its cores. The processes that make patches have those of the rest."""
    if "rest" not in setup.places:
        return
    for name in ("router", *cluster.members):
        own = cluster.pid(name)
        _bind(own, setup.places.get(name, setup.places["rest"]))
        for child in _below(own):
            _bind(child, setup.places["rest"])


def _below(pid: int) -> list[int]:
    """Return the pids of all descendants of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(PROCESSES.format(pid)):
            children = Path(PROCESSES.format(pid), thread, "children").read_text(encoding="ascii")
            found += [each for child in children.split() for each in (int(child), *_below(int(child)))]
    return found


def _bind(pid: int, cores: str) -> None:
    """Bind all threads of a process; those that they start have the same cores."""
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for thread in os.listdir(PROCESSES.format(pid)):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread), {int(core) for core in cores.split(",")})


# --------------------------------------------------------------------------------------------------------- the requests


class TimedAnswer(NamedTuple):
    ttft_s: float
    num_tokens: int


def asked(url: str, path: str, **fields: Any) -> TimedAnswer:
    """Send a request and read its stream. RuntimeError unless all its tokens come."""
    options = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = json.dumps({"model": "m", "stream": True, **options, **fields}).encode()
    first_s, num_tokens, event = 0.0, 0, ""
    with Server.at(url).connect(TIMEOUT_S) as connection:
        began_s = time.perf_counter()
        response = connection.send("POST", path, body)
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read()[-500:]!r}")
        for event in events_of(response):
            if event.startswith("{"):
                count = sum(len(each.get("token_ids") or ()) for each in json.loads(event).get("choices", ()))
                if count and not num_tokens:
                    first_s = time.perf_counter() - began_s
                num_tokens += count
    if num_tokens != ANSWER_TOKENS:
        raise RuntimeError(f"{num_tokens} tokens: {event[-500:]!r}")
    return TimedAnswer(first_s, num_tokens)


class MixedRequests:
    """What is sent: no prompt and no image comes twice to a cluster, and all clusters get the same ones."""

    def __init__(self, side: int, seed: int) -> None:
        self._side = side
        self._rng = random.Random(seed)

    def text(self) -> dict[str, Any]:
        return {"path": "/v1/completions", "prompt": [self._rng.randrange(300, 500) for _ in range(PROMPT_TOKENS)]}

    def image(self) -> dict[str, Any]:
        """Return a chat with an image of random colours."""
        from PIL import Image

        file = io.BytesIO()
        small = Image.frombytes("RGB", (16, 16), self._rng.randbytes(3 * 16 * 16))
        small.resize((self._side, self._side), Image.Resampling.NEAREST).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        return {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": parts}]}


def send_all(url: str, due: Sequence[tuple[float, dict[str, Any], list[float]]]) -> float:
    """Send requests when they are due (seconds from now), whatever became of others. Each adds its TTFT to its list.
    Return the tokens a second, from the first request to the end of the last. Raise what one of them raised."""
    began_s, failed, answers = time.perf_counter(), list[Exception](), list[TimedAnswer]()

    def send(fields: dict[str, Any], times: list[float]) -> None:
        try:
            answers.append(answer := asked(url, **fields))
            times.append(answer.ttft_s)
        except Exception as error:
            failed.append(error)

    threads = []
    for due_s, fields, times in sorted(due, key=lambda each: each[0]):
        time.sleep(max(0.0, began_s + due_s - time.perf_counter()))
        threads.append(thread := threading.Thread(target=send, args=(fields, times)))
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return sum(each.num_tokens for each in answers) / (time.perf_counter() - began_s)


def every(interval_s: float, until_s: float, make: Callable[[], dict[str, Any]], times: list[float]) -> Iterator[Any]:
    """Yield requests at this interval, as `send_all` takes them."""
    return ((at * interval_s, make(), times) for at in range(max(1, int(until_s / interval_s))))


# ----------------------------------------------------------------------------------------------------------- the bench


class MixedLoad(NamedTuple):
    turn_s: float
    text_s: float
    """Interval of requests with text."""
    image_s: float
    """Interval of those with an image."""
    side: int


def image_takes_s(url: str, requests: MixedRequests) -> float:
    """Return the time to the first token of a prompt with an image, when nothing else runs."""
    return statistics.median([asked(url, **requests.image()).ttft_s for _ in range(FIRST_IMAGES + 1)][1:])


def measure(setup: PlacedSetup, url: str, load: MixedLoad, seed: int) -> None:
    """Have a cluster serve one turn."""
    requests, times = MixedRequests(load.side, seed), setup.times
    send_all(url, list(every(load.text_s, ALONE * load.turn_s, requests.text, times.alone)))
    rest_s = (1 - ALONE) * load.turn_s
    text = every(load.text_s, rest_s, requests.text, times.text)
    setup.rates.append(send_all(url, [*text, *every(load.image_s, rest_s, requests.image, times.image)]))


def encoded(url: str) -> str:
    """Return how many images each instance has encoded since its start."""
    found = {each.name: each.load.images for each in RouterClient(url).cluster().instances if each.load}
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items()) if count)


def row_of(setup: PlacedSetup, images: str) -> list[object]:
    times = setup.times
    figures = [1e3 * float(np.percentile(each, q)) for each in (times.alone, times.text, times.image) for q in (50, 99)]
    return [setup.name, setup.place, *figures, statistics.mean(setup.rates), images]


def plot(setups: Sequence[PlacedSetup], path: Path) -> None:
    """Draw for each setup which share of the text requests had their first token within which time."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for index, setup in enumerate(setups):
        for times, style, label in ((setup.times.text, "-", setup.name), (setup.times.alone, ":", None)):
            shares = np.arange(1, len(times) + 1) / len(times)
            axes.step(1e3 * np.sort(times), shares, style, where="post", color=f"C{index}", label=label)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.01)
    axes.grid(alpha=0.3)
    axes.set_xlabel("TTFT of text in ms; beside images, and without any (dotted)")
    axes.set_ylabel("share of requests")
    axes.legend(title="; ".join(sorted({setup.place.partition(", rest")[0] for setup in setups})), title_fontsize=7)
    figure.savefig(path, dpi=90)


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=model_folder, help=f"{MODEL_HELP} (default: a random Qwen3-VL)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a setup's turn in a round")
    parser.add_argument("--share", type=float, default=0.5, help="of the time in which P alone computes images")
    parser.add_argument("--text-rate", type=float, default=5.0, help="requests with text a second")
    parser.add_argument("--side", type=int, default=SIDE, help="pixels of a side of an image")
    parser.add_argument("--tower-size", type=int, default=256, help="width of the tower of the model that is made")
    parser.add_argument("--tower-depth", type=int, default=12, help="its layers")
    parser.add_argument("--devices", default="", metavar="P,D,E", help="such as cuda:0,cuda:1,cuda:2")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--plot", type=Path, help="file of a picture, which needs matplotlib")
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR)
    arguments = parser.parse_args(argv)
    arguments.devices = [each for each in arguments.devices.split(",") if each]
    if len(arguments.devices) not in (0, 3):
        parser.error(f"--devices names {len(arguments.devices)}, not three: of P, D and E")
    if min(arguments.seconds, arguments.rounds, arguments.text_rate) <= 0 or not 0 < arguments.share < 1:
        parser.error("--seconds, --rounds and --text-rate are above 0, and --share is below 1, too")
    if arguments.plot is not None:
        require_matplotlib()
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = arguments_of(argv)
    setups = setups_of(sorted(os.sched_getaffinity(0)), arguments.devices)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        tower = {"tower_size": arguments.tower_size, "tower_depth": arguments.tower_depth}
        folder = arguments.model or make_model(Path(scratch) / "model", "qwen3_vl", hidden_size=256, **tower)
        common = [
            f"model.path={folder}",
            "model.served_name=m",
            f"{LOCAL}.pd_disaggregation.transport={arguments.transport}",
            *("model.max_model_len=2048", "cache.num_pages=512", "scheduler.max_running_requests=32"),
            *(f"{LOCAL}.{port}=0" for port in ("port", "stats_port", "token_port")),
        ]
        started = [
            stack.enter_context(LocalCluster(load_topology("pd_disagg_1p1d_local", [*common, *setup.settings()])))
            for setup in setups
        ]
        end_s = time.monotonic() + TIMEOUT_S
        while not all([each.ready() for each in started]) and time.monotonic() < end_s:  # all start at once
            time.sleep(POLL_S)
        for cluster, setup in zip(started, setups, strict=True):
            cluster.wait_ready(10)
            bind(cluster, setup)
        if "rest" in setups[0].places:
            _bind(os.getpid(), setups[0].places["rest"])
        took_s = [image_takes_s(each.url, MixedRequests(arguments.side, -1)) for each in started]
        load = MixedLoad(arguments.seconds, 1 / arguments.text_rate, took_s[0] / arguments.share, arguments.side)
        print(
            f"an image takes {', '.join(f'{s:.2f}' for s in took_s)} s; one comes every {load.image_s:.2f} s",
            flush=True,
        )
        turns = list(zip(setups, started, strict=True))
        for number in range(arguments.rounds):
            for setup, cluster in turns if number % 2 == 0 else turns[::-1]:
                measure(setup, cluster.url, load, number)
        rows = [row_of(setup, encoded(cluster.url)) for setup, cluster in turns]
    publish("images", COLUMNS, rows, arguments.json_dir)
    if arguments.plot is not None:
        plot(setups, arguments.plot)


if __name__ == "__main__":
    main()
