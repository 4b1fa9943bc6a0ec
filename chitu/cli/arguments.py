"""The arguments of the `chitu` commands: names, help texts and valid values. `commands.py` runs them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from chitu import __version__
from chitu.config.cluster_key import API_KEYS
from chitu.config.key_paths import is_number
from chitu.config.load import DEFAULT_TOPOLOGY, packaged_topologies
from chitu.config.topology import MAX_PORT
from chitu.types import Role

DEFAULT_URL = "http://127.0.0.1:21003"
BENCHMARKS = {
    "transfer": "transports against memcpy",
    "ttft": "time to first token, 1P1D over unified",
    "images": "time to first token of text beside images, with and without E",
    "lanes": "time between tokens beside prompts, one lane and two",
    "profile": "how fast an engine is, for chitu size",
    "gpu": "kernels, steps, transfers and 1P1D on a GPU, against its best rates",
}


class _Command(argparse.ArgumentParser):
    """Parser of one command. It takes no beginning of an option for the option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)


def make_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of all commands, which sets `command` to the name of one, and the parser of each by name."""
    parser = argparse.ArgumentParser(prog="chitu", description="Prefill/decode disaggregated LLM serving.")
    parser.add_argument("--version", action="version", version=f"chitu {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Command)

    for name, (text, add_arguments) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=text))
    return parser, commands.choices


def _add_serve(command: argparse.ArgumentParser) -> None:
    _add_topology(command)
    command.add_argument("--port", type=_port, help="HTTP port, overrides dp_config.router.port (0: any free)")
    command.add_argument("--host", metavar="ADDRESS", help="address of the HTTP API (0.0.0.0: all addresses)")
    command.add_argument("--log-dir", help="folder of the logs (default: a new temporary one); -: stdout, in JSON")
    command.add_argument("--no-restart", action="store_true", help="do not restart a process that died")
    command.add_argument("--first-completion", action="store_true", help="print one completion once it serves")
    command.add_argument("--once", action="store_true", help="print one completion, then end (a smoke test)")
    command.add_argument(
        "--fake",
        choices=["prefill", "decode", "unified"],
        help="in place of a topology: an instance that computes no model joins the running router at --url",
    )
    command.add_argument("--url", default=DEFAULT_URL, help=f"the router of --fake (default: {DEFAULT_URL})")


def _add_chat(command: argparse.ArgumentParser) -> None:
    command.add_argument("question", nargs="*", help="one question (default: stdin, which may be a terminal)")
    _add_router(command)
    command.add_argument("--model", metavar="NAME", help="served name (default: the one that the router serves)")
    command.add_argument("--system", metavar="TEXT", help="the system message")
    command.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="an image of the first question; repeatable"
    )
    command.add_argument(
        "--max-tokens", type=_positive(int), metavar="N", help="length of an answer (default: the rest of the context)"
    )
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0 (greedy)")


def _add_batch(command: argparse.ArgumentParser) -> None:
    command.add_argument("input", metavar="IN.jsonl", help="lines with custom_id, method, url and body, as OpenAI's")
    command.add_argument("output", metavar="OUT.jsonl", help="file of the answers, in the order of their arrival")
    _add_router(command)
    command.add_argument(
        "--concurrency", type=_positive(int), default=32, metavar="N", help="requests at once (default: 32)"
    )
    command.add_argument(
        "--timeout", type=_positive(float), default=660.0, metavar="S", help="seconds for one answer (default: 660)"
    )
    command.add_argument(
        "--patience", type=_positive(float), default=600.0, metavar="S", help="seconds without any answer until it ends"
    )


def _add_trace(command: argparse.ArgumentParser) -> None:
    command.add_argument("request_id", metavar="ID", help="X-Request-Id of its answer")
    _add_router(command)
    command.add_argument("--dir", metavar="DIR", help="folder of the records (trace.dir), in place of a router")
    command.add_argument("--frames", action="store_true", help="also its messages (X-Chitu-Trace: frames), decoded")
    command.add_argument("--json", action="store_true", help="print time line and records as one JSON object")


def _add_join(command: argparse.ArgumentParser) -> None:
    command.add_argument("role", choices=[role.value for role in Role])
    command.add_argument("topology", nargs="*", metavar="a.b=c", help="dotted overrides of the cluster's topology")
    _add_router(command)
    command.add_argument("--model", metavar="PATH", help="checkpoint folder or GGUF file, if another on this machine")
    command.add_argument(
        "--devices", metavar="A,B", help="one per TP rank (default: as the role's first instance; free GPUs)"
    )
    command.add_argument("--rank", type=int, metavar="K", help="rank of the instance (default: the lowest free one)")
    command.add_argument(
        "--ready-timeout", type=_positive(float), default=600.0, metavar="S", help="seconds (default: 600)"
    )
    command.add_argument("--log-dir", help="folder of the log (default: a new temporary one); -: stdout, in JSON")


def _add_drain(command: argparse.ArgumentParser) -> None:
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("instance", nargs="?", metavar="NAME", help="P0, D1, U0, E0")
    which.add_argument(
        "--self", action="store_true", help="all instances of the launcher on this machine or in this container"
    )
    _add_router(command)
    command.set_defaults(url=None)
    command.add_argument("--force", action="store_true", help="even if nothing can be served without it")
    command.add_argument("--no-wait", action="store_true", help="return at once; do not wait until it has left")


def _add_role(command: argparse.ArgumentParser) -> None:
    command.add_argument("instance", metavar="NAME", help="P0, D1, U0")
    command.add_argument("role", choices=["prefill", "decode", "unified"], help="the role that it gets")
    _add_router(command)
    command.add_argument("--force", action="store_true", help="even if nothing can be served meanwhile")
    command.add_argument("--no-wait", action="store_true", help="return at once; do not wait until it serves")


def _add_canary(command: argparse.ArgumentParser) -> None:
    command.add_argument("revision", nargs="?", default="", metavar="REV", help="its label; none: end the choice")
    command.add_argument("share", nargs="?", type=_share, default=0.0, metavar="SHARE", help="such as 10%%; 0: nothing")
    _add_router(command)


def _add_token(command: argparse.ArgumentParser) -> None:
    _add_router(command)


def _add_verify(command: argparse.ArgumentParser) -> None:
    either = command.add_mutually_exclusive_group()
    either.add_argument("source", nargs="?", metavar="URL", help="the same as --url URL")
    _add_router(command, either)
    command.add_argument("--model", metavar="DIR", help="folder or GGUF file of the reference (default: the cluster's)")
    command.add_argument("--reference", metavar="URL", help="a running undivided engine, instead of starting one")
    command.add_argument("--device", default="cpu", help="device of the reference that is started (default: cpu)")
    command.add_argument("--no-transformers", action="store_true", help="do not use transformers as second reference")
    command.add_argument(
        "--rounds", type=_positive(int), default=8, metavar="N", help="maximum number of prompts to reach every pair"
    )
    command.add_argument(
        "--concurrency", type=_positive(int), default=2, metavar="N", help="requests at once (default: 2)"
    )
    command.add_argument(
        "--max-tokens", type=_positive(int), default=40, metavar="N", help="length of an answer (default: 40)"
    )
    command.add_argument(
        "--timeout", type=_positive(float), default=120.0, metavar="S", help="seconds for one answer (default: 120)"
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_upgrade(command: argparse.ArgumentParser) -> None:
    command.add_argument("--check", action="store_true", required=True, help="only say it; nothing is changed")
    either = command.add_mutually_exclusive_group()
    either.add_argument("source", nargs="?", metavar="URL", help="the same as --url URL")
    _add_router(command, either)


def _add_snapshot(command: argparse.ArgumentParser) -> None:
    command.add_argument("request_id", metavar="ID", help="X-Request-Id of its answer")
    command.add_argument(
        "file", metavar="FILE", help="file to write; in a folder of kept requests its suffix must be .request"
    )
    _add_router(command)
    command.add_argument(
        "--pages", action="store_true", help="with its pages of KV on disk (cache.disk.path), for `chitu restore`"
    )


def _add_restore(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE", help="written by `chitu snapshot --pages`")
    _add_router(command)


def _add_replay(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "files", nargs="+", metavar="FILE", help="answers with return_receipt, receipts, snapshots (-: stdin)"
    )
    source = command.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help="folder or GGUF file of an undivided engine that is started")
    command.add_argument(
        "--adapter", metavar="DIR", action="append", default=[], help="LoRA adapter of that engine (repeatable)"
    )
    _add_router(command, source)
    command.add_argument(
        "--images", metavar="DIR", action="append", default=[], help="folder with files of their images (repeatable)"
    )
    command.add_argument("--device", default="cpu", help="device of the engine that is started (default: cpu)")
    command.add_argument(
        "--concurrency", type=_positive(int), default=2, metavar="N", help="requests at once (default: 2)"
    )
    command.add_argument(
        "--timeout", type=_positive(float), default=600.0, metavar="S", help="seconds for one answer (default: 600)"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object per receipt")


def _add_plan(command: argparse.ArgumentParser) -> None:
    _add_topology(command)
    command.add_argument("--hosts", metavar="A,B", help="machines in place of the topology's hosts, the router's first")


def _add_import(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE", help="YAML of srt-slurm, or a manifest of Dynamo or llm-d")
    command.add_argument("--variant", default="", metavar="NAME", help="variant of a file with several")
    command.add_argument("--card", default="", metavar="NAME", help="card where the recipe names none, such as h200")
    command.add_argument("--hosts", metavar="A,B", help="machines to write into the topology, the router's first")
    command.add_argument("--output", metavar="FILE", help="file to write (default: stdout)")


def _add_node(command: argparse.ArgumentParser) -> None:
    _add_topology(command)
    command.add_argument("--hosts", metavar="A,B", help="machines in place of the topology's hosts, the router's first")
    command.add_argument("--node-index", type=int, required=True, metavar="K", help="index of this host")
    command.add_argument(
        "--cpus-per-gpu", type=_positive(int), metavar="N", help="CPU threads of each rank of an instance"
    )
    command.add_argument(
        "--ready-timeout", type=_positive(float), metavar="S", help="seconds until all must be ready (default: 600)"
    )
    command.add_argument("--log-dir", help="folder of the logs (default: a new temporary one); -: stdout, in JSON")
    command.add_argument("--on-failure", metavar="COMMAND", help="command to run once if a process of this node dies")


def _add_make_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("directory", metavar="DIR")
    families = "llama, mistral, qwen2, qwen3, qwen3_moe, deepseek_v2, deepseek_v3, or qwen3_vl, which sees images"
    command.add_argument("--family", default="qwen3", help=families)
    for flag in ("hidden-size", "layers", "heads", "kv-heads", "head-dim", "intermediate-size", "experts"):
        command.add_argument(f"--{flag}", type=int)
    for flag in ("vocab-size", "max-position-embeddings", "shards"):
        command.add_argument(f"--{flag}", type=int)
    for flag in ("tower-size", "tower-depth", "max-pixels"):
        command.add_argument(f"--{flag}", type=int, help="of the part that sees (qwen3_vl)")
    command.add_argument("--dtype", help="float32, bfloat16 or float16")
    command.add_argument("--tie", action="store_true", default=None, help="tied embeddings")
    command.add_argument("--seed", type=int, default=0)


def _add_size(command: argparse.ArgumentParser) -> None:
    command.add_argument("--slo", required=True, metavar="ttft=S,tpot=S", help="seconds to token 1 and between tokens")
    command.add_argument("--devices", type=int, required=True, metavar="N", help="how many there are")
    command.add_argument(
        "--profile",
        action="append",
        default=[],
        metavar="FILE",
        help="of `chitu bench profile`; one of each tp_size and dp_size",
    )
    command.add_argument("--trace", metavar="FILE", help="requests: Mooncake's JSONL, or the router's trace records")
    command.add_argument("--lengths", metavar="PROMPT:OUTPUT", help="tokens of all requests, in place of a trace")
    command.add_argument(
        "--requests", type=_positive(int), default=2000, metavar="N", help="the first N of them (default: 2000)"
    )
    command.add_argument(
        "--share", type=float, default=0.9, metavar="X", help="of the requests that keep the SLO (default: 0.9)"
    )
    command.add_argument(
        "--draft-acceptance",
        type=float,
        default=0.0,
        metavar="X",
        help="share of drafted tokens that are right (default: 0, nothing is drafted)",
    )
    command.add_argument(
        "--images", metavar="COUNT:ROWS", help="images in a request and tokens of each, on top of its prompt: 0.5:2040"
    )
    command.add_argument(
        "--encode-rate", type=float, metavar="X", help="rows a second of an E or a P, in place of the profile's"
    )
    command.add_argument("--encoders", type=int, metavar="N", help="number of E (default: the best one)")
    command.add_argument("--poisson", action="store_true", help="Poisson arrivals in place of the trace's own gaps")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of Poisson arrivals (default: 0)")
    command.add_argument("--plot", metavar="FILE.png", help="file for a plot of goodput over rate")
    command.add_argument("--json", action="store_true", help="print the result as one JSON object")


def _add_bench(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", choices=BENCHMARKS, metavar="NAME", help="; ".join(map(": ".join, BENCHMARKS.items())))
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments (NAME --help)")


def _add_doctor(command: argparse.ArgumentParser) -> None:
    _add_topology(command)
    command.add_argument("--hosts", metavar="A,B", help="machines in place of the topology's hosts, the router's first")
    command.add_argument("--node-index", type=int, metavar="K", help="index of this host; run it on all at once")


def _port(text: str) -> int:
    if not is_number(text) or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 0 (any free one) to {MAX_PORT}")
    return int(text)


def _positive(kind: type[int] | type[float]) -> Callable[[str], int | float]:
    def read(text: str) -> int | float:
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not 0 < number < math.inf:
            what = "a whole number of at least 1" if kind is int else "a number above 0"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return number

    return read


def _refuse_key(command: argparse.ArgumentParser, variable: str) -> None:
    """Have `--api-key` refused, with the environment variable that takes it."""

    def refuse(_key: str) -> str:
        raise argparse.ArgumentTypeError(
            f"`ps` shows command lines to all users: put the key into the environment as {variable}"
        )

    command.add_argument("--api-key", type=refuse, help=argparse.SUPPRESS)


class _Adding(Protocol):
    """A parser or a group of its options."""

    def add_argument(self, *names: str, default: str, help: str) -> argparse.Action: ...


def _add_router(command: argparse.ArgumentParser, group: _Adding | None = None) -> None:
    """Add the options of a command that uses a running cluster; `--url` to `group` if its place may be taken by
    another."""
    (group or command).add_argument(
        "--url", default=DEFAULT_URL, help=f"the router, http(s)://HOST[:PORT][/PATH] (default: {DEFAULT_URL})"
    )
    _refuse_key(command, "CHITU_API_KEY")


def _add_topology(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "topology",
        nargs="*",
        metavar="TOPOLOGY.yaml | a.b=c",
        help=f"a file or one of {', '.join(packaged_topologies())} (default: {DEFAULT_TOPOLOGY}), and dotted overrides",
    )
    command.add_argument("--model", metavar="PATH", help="checkpoint folder, GGUF file or Hugging Face id")
    _refuse_key(command, API_KEYS)


def _share(text: str) -> float:
    """Parse `10%` or `0.1`."""
    number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not within 0 and 100%")
    return number


COMMANDS: Mapping[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "serve": ("run a whole topology on this machine, until Ctrl-C", _add_serve),
    "chat": ("talk to a running router, in a terminal or by a question in a pipe", _add_chat),
    "batch": ("answer a file of requests, one a line; the same command resumes it", _add_batch),
    "trace": ("show a traced request (X-Chitu-Trace: 1) as a time line", _add_trace),
    "join": ("add an instance on this machine to a running cluster, until Ctrl-C", _add_join),
    "drain": ("let an instance finish its requests, leave the cluster and end", _add_drain),
    "role": ("change the role of an instance: its process, weights and cache stay", _add_role),
    "canary": ("send a share of the requests to one revision of the instances", _add_canary),
    "token": ('print what an operator\'s calls need: curl -H "Authorization: Bearer $(chitu token)"', _add_token),
    "verify": ("compare a running cluster with one engine and name the faulty instance", _add_verify),
    "upgrade": ("say which processes of a running cluster work beside this release", _add_upgrade),
    "snapshot": ("save a running request to a file for another router to continue", _add_snapshot),
    "restore": ("continue a snapshot with pages in another cluster, without computing these", _add_restore),
    "replay": ("recompute saved answers on one engine and compare the tokens", _add_replay),
    "plan": ("show processes, ports and commands of a topology; starts nothing", _add_plan),
    "import": ("write the topology of a published recipe, or say what it lacks here", _add_import),
    "node": ("run the processes of one host of a topology; use it on every host", _add_node),
    "make-model": ("write a small random model with its tokenizer", _add_make_model),
    "size": ("say how many P, D and E a load needs, by simulation of the real scheduler", _add_size),
    "bench": ("run a benchmark: " + ", ".join(BENCHMARKS), _add_bench),
    "doctor": ("check this machine, or all nodes together, and suggest fixes", _add_doctor),
}
"""Text and arguments of each command, in the order of `chitu --help`."""
