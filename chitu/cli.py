"""The `chitu` command: serve, node, chat, explain, trace, verify, snapshot, replay, join, drain, plan, make-model,
bench, doctor.

Only parses and calls; imports of what a command needs happen inside it, so that `chitu --help` is instant. A wrong
configuration is one sentence on stderr and exit code 2; any other known failure, and what the system refuses, is one
sentence and exit code 1; Ctrl-C is 130.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import re
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from chitu import __version__
from chitu.config.key_paths import is_number
from chitu.config.load import DEFAULT_TOPOLOGY, api_key, load_topology, packaged_topologies, pd_master_addr
from chitu.config.topology import MAX_PORT
from chitu.errors import ChituError, ConfigError

DEFAULT_URL = "http://127.0.0.1:21003"
BENCHMARKS = {
    "transfer": "transports against memcpy",
    "ttft": "time to first token, 1P1D over unified",
    "gpu": "kernels, steps, transfers and 1P1D on a GPU, against what it does at best",
    "soak": "a long load with accidents: is everything right and flat?",
    "recall": "answers through 1P1D and 2P3D against transformers, and with a broken KV page",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes the words behind an option for unknown ones: here they are overrides as much as those before it.
    if rest and (not hasattr(arguments, "topology") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.topology += rest
    try:
        result: int = arguments.run(arguments)
        sys.stdout.flush()  # what cannot be written is known now, not when the interpreter ends
        return result
    except ConfigError as error:
        print(f"chitu: {error.message}", file=sys.stderr)
        return 2
    except ChituError as error:
        print(f"chitu: {error.code}: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `chitu plan | head`
        _forget_output()
        return 128 + signal.SIGPIPE
    except UnicodeEncodeError as error:  # of a terminal with another encoding
        text = error.object[error.start : error.end]
        print(f"chitu: {text!a} cannot be written in {error.encoding}: use UTF-8 for names and output", file=sys.stderr)
        return 2
    except OSError as error:  # a folder that cannot be made, a full disk
        _forget_output()
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"chitu: {where}{error.strerror or error}", file=sys.stderr)
        return 1


def _forget_output() -> None:
    """Else the interpreter tries once more to write it, and complains."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="chitu", description="Prefill/decode disaggregated LLM serving.")
    parser.add_argument("--version", action="version", version=f"chitu {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("serve", help="a whole topology on this machine, until Ctrl-C")
    _add_topology(command)
    command.add_argument("--port", type=_port, help="HTTP port, over dp_config.router.port (0: any free one)")
    command.add_argument("--host", metavar="ADDRESS", help="address of the HTTP API (0.0.0.0: all of the machine's)")
    command.add_argument("--log-dir", help="folder of the logs (default: a new one under the temporary folder)")
    command.add_argument("--no-restart", action="store_true", help="do not start a process again that died")
    command.add_argument("--first-completion", action="store_true", help="print one completion once it serves")
    command.add_argument("--once", action="store_true", help="print one completion, then end (a smoke test)")
    command.set_defaults(run=_serve)

    command = commands.add_parser("chat", help="talk to a running router, here or with one question in a pipe")
    command.add_argument("question", nargs="*", help="one question (default: stdin, which may be a terminal)")
    command.add_argument("--url", default=DEFAULT_URL, help=f"the router (default: {DEFAULT_URL})")
    command.add_argument("--api-key", type=_refuse_key, help=argparse.SUPPRESS)
    command.add_argument("--model", metavar="NAME", help="served name (default: the one that the router serves)")
    command.add_argument("--system", metavar="TEXT", help="the system message")
    command.add_argument(
        "--max-tokens", type=_positive(int), metavar="N", help="of an answer (default: the rest of the context)"
    )
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, always the likeliest")
    command.set_defaults(run=_chat)

    command = commands.add_parser("explain", help="where the time of a running cluster's requests goes")
    command.add_argument(
        "source", nargs="?", default=DEFAULT_URL, metavar="URL | FILE", help=f"(default: {DEFAULT_URL})"
    )
    command.add_argument("--api-key", type=_refuse_key, help=argparse.SUPPRESS)
    command.add_argument(
        "--seconds", type=_positive(float), default=10.0, metavar="S", help="to watch for (default: 10)"
    )
    command.add_argument("--save", metavar="FILE", help="what was seen, to be explained again")
    command.add_argument("--json", action="store_true", help="the explanation as one JSON object")
    command.set_defaults(run=_explain)

    command = commands.add_parser("trace", help="the life of a traced request (X-Chitu-Trace: 1) as a time line")
    command.add_argument("request_id", metavar="ID", help="X-Request-Id of its answer")
    command.add_argument("--url", default=DEFAULT_URL, help=f"the router (default: {DEFAULT_URL})")
    command.add_argument("--api-key", type=_refuse_key, help=argparse.SUPPRESS)
    command.add_argument("--dir", metavar="DIR", help="folder of the records (trace.dir), in place of a router")
    command.add_argument("--frames", action="store_true", help="also its messages (X-Chitu-Trace: frames), by msgpack")
    command.add_argument("--json", action="store_true", help="time line and records as one JSON object")
    command.set_defaults(run=_trace)

    command = commands.add_parser("join", help="add an instance to a running cluster, from this machine, until Ctrl-C")
    command.add_argument("role", choices=["prefill", "decode", "unified"])
    command.add_argument("topology", nargs="*", metavar="a.b=c", help="dotted overrides of the cluster's topology")
    command.add_argument("--url", default=DEFAULT_URL, help=f"the router (default: {DEFAULT_URL})")
    command.add_argument("--api-key", type=_refuse_key, help=argparse.SUPPRESS)
    command.add_argument("--model", metavar="PATH", help="checkpoint folder, where it is another one on this machine")
    command.add_argument(
        "--devices", metavar="A,B", help="one a TP rank (default: as the role's first instance; free GPUs)"
    )
    command.add_argument("--rank", type=int, metavar="K", help="as which (default: the lowest that nobody has)")
    command.add_argument(
        "--ready-timeout", type=_positive(float), default=600.0, metavar="S", help="seconds (default: 600)"
    )
    command.add_argument("--log-dir", help="folder of the log (default: a new one under the temporary folder)")
    command.set_defaults(run=_join)

    command = commands.add_parser("drain", help="have an instance finish what it runs, leave the cluster and end")
    command.add_argument("instance", metavar="NAME", help="P0, D1, U0")
    command.add_argument("--url", default=DEFAULT_URL, help=f"the router (default: {DEFAULT_URL})")
    command.add_argument("--api-key", type=_refuse_key, help=argparse.SUPPRESS)
    command.add_argument("--force", action="store_true", help="also where nothing can be served without it")
    command.add_argument("--no-wait", action="store_true", help="return at once, not when it has left")
    command.set_defaults(run=_drain)

    command = commands.add_parser("verify", help="whether a running cluster answers as one undivided engine does")
    command.add_argument("url", nargs="?", default=DEFAULT_URL, help=f"the router (default: {DEFAULT_URL})")
    command.add_argument("--api-key", type=_refuse_key, help=argparse.SUPPRESS)
    command.add_argument("--model", metavar="DIR", help="checkpoint folder of the reference (default: the cluster's)")
    command.add_argument("--reference", metavar="URL", help="an undivided engine that runs already, in place of one")
    command.add_argument("--device", default="cpu", help="of the reference that is started (default: cpu)")
    command.add_argument("--no-transformers", action="store_true", help="leave transformers out as second reference")
    command.add_argument(
        "--rounds", type=_positive(int), default=8, metavar="N", help="prompts at most, until every pair was hit"
    )
    command.add_argument(
        "--concurrency", type=_positive(int), default=2, metavar="N", help="requests at once (default: 2)"
    )
    command.add_argument(
        "--max-tokens", type=_positive(int), default=40, metavar="N", help="of an answer (default: 40)"
    )
    command.add_argument(
        "--timeout", type=_positive(float), default=120.0, metavar="S", help="seconds for one answer (default: 120)"
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    command.set_defaults(run=_verify)

    command = commands.add_parser("snapshot", help="a running request as a file, from which another router goes on")
    command.add_argument("request_id", metavar="ID", help="X-Request-Id of its answer")
    command.add_argument(
        "file", metavar="FILE", help="to be written; a folder of kept requests wants the suffix .request"
    )
    command.add_argument("--url", default=DEFAULT_URL, help=f"the router (default: {DEFAULT_URL})")
    command.add_argument("--api-key", type=_refuse_key, help=argparse.SUPPRESS)
    command.set_defaults(run=_snapshot)

    command = commands.add_parser("replay", help="whether an engine gives the tokens of saved answers again")
    command.add_argument(
        "files", nargs="+", metavar="FILE", help="answers with return_receipt, receipts, snapshots (-: stdin)"
    )
    source = command.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help="checkpoint folder of an undivided engine that is started")
    source.add_argument("--url", default=DEFAULT_URL, help=f"a cluster that runs (default: {DEFAULT_URL})")
    command.add_argument("--api-key", type=_refuse_key, help=argparse.SUPPRESS)
    command.add_argument("--device", default="cpu", help="of the engine that is started (default: cpu)")
    command.add_argument(
        "--concurrency", type=_positive(int), default=2, metavar="N", help="requests at once (default: 2)"
    )
    command.add_argument(
        "--timeout", type=_positive(float), default=600.0, metavar="S", help="seconds for one answer (default: 600)"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object a receipt")
    command.set_defaults(run=_replay)

    command = commands.add_parser("plan", help="the processes, ports and commands of a topology; starts nothing")
    _add_topology(command)
    command.add_argument("--hosts", metavar="A,B", help="machines in place of the topology's hosts, the router's first")
    command.set_defaults(run=_plan)

    command = commands.add_parser("node", help="the processes of one host of a topology: run it on each of its hosts")
    _add_topology(command)
    command.add_argument("--hosts", metavar="A,B", help="machines in place of the topology's hosts, the router's first")
    command.add_argument("--node-index", type=int, required=True, metavar="K", help="which of the hosts this one is")
    command.add_argument(
        "--cpus-per-gpu", type=_positive(int), metavar="N", help="CPU threads of each rank of an instance"
    )
    command.add_argument(
        "--ready-timeout", type=_positive(float), metavar="S", help="seconds to be ready in (default: 600)"
    )
    command.add_argument("--log-dir", help="folder of the logs (default: a new one under the temporary folder)")
    command.add_argument("--on-failure", metavar="COMMAND", help="run once when a process of this node died")
    command.set_defaults(run=_node)

    command = commands.add_parser("make-model", help="write a small random model with its tokenizer")
    command.add_argument("directory", metavar="DIR")
    families = "llama, mistral, qwen2, qwen3, qwen3_moe, deepseek_v2 or deepseek_v3"
    command.add_argument("--family", default="qwen3", help=families)
    for flag in ("hidden-size", "layers", "heads", "kv-heads", "head-dim", "intermediate-size", "experts"):
        command.add_argument(f"--{flag}", type=int)
    for flag in ("vocab-size", "max-position-embeddings", "shards"):
        command.add_argument(f"--{flag}", type=int)
    command.add_argument("--dtype", help="float32, bfloat16 or float16")
    command.add_argument("--tie", action="store_true", default=None, help="tied embeddings")
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(run=_make_model)

    command = commands.add_parser("bench", help="run a benchmark: " + ", ".join(BENCHMARKS))
    command.add_argument("name", choices=BENCHMARKS, metavar="NAME", help="; ".join(map(": ".join, BENCHMARKS.items())))
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments (NAME --help)")
    command.set_defaults(run=_bench)

    command = commands.add_parser("doctor", help="what keeps this machine, or all nodes at once, from serving")
    _add_topology(command)
    command.add_argument("--hosts", metavar="A,B", help="machines in place of the topology's hosts, the router's first")
    command.add_argument("--node-index", type=int, metavar="K", help="which of them this is: run it on all at once")
    command.set_defaults(run=_doctor)
    return parser


def _port(text: str) -> int:
    if not is_number(text) or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: give a number from 0 (any free one) to {MAX_PORT}")
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


def _refuse_key(_key: str) -> str:
    raise argparse.ArgumentTypeError(
        "`ps` shows command lines to everybody: put the key into the environment as CHITU_API_KEY"
    )


def _add_topology(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "topology",
        nargs="*",
        metavar="TOPOLOGY.yaml | a.b=c",
        help=f"a file or one of {', '.join(packaged_topologies())} (default: {DEFAULT_TOPOLOGY}), and dotted overrides",
    )
    command.add_argument("--model", metavar="PATH", help="checkpoint folder or Hugging Face id, over model.path")


def _split(arguments: argparse.Namespace, may_download: bool = False) -> tuple[str | None, list[str]]:
    """The topology's name, if one is given, and the overrides, among the positional arguments. `may_download`: a model
    that is not here."""
    overrides = [word for word in arguments.topology if "=" in word]
    files = [word for word in arguments.topology if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"one topology at a time: {' and '.join(files)} were given (overrides look like a.b=c)")
    name = files[0] if files else None
    if arguments.model is not None:
        from chitu.launch.model_source import find_model

        source = find_model(arguments.model, may_download, functools.partial(print, file=sys.stderr, flush=True))
        if source.repository is not None and load_topology(name, overrides).model.served_name is None:
            overrides.append(f"model.served_name={_as_yaml(source.repository)}")
        overrides.append(f"model.path={_as_yaml(source.path)}")
    return name, overrides


def _as_yaml(text: str) -> str:
    """Quoted where YAML could read it as anything but the text that it is."""
    return text if re.fullmatch(r"[A-Za-z/][\w./+-]*[/][\w./+-]*", text) else msgspec.json.encode(text).decode()


def _serve(arguments: argparse.Namespace) -> int:
    from chitu.config.topology import instances, on_one_host
    from chitu.launch.local import LocalCluster
    from chitu.launch.placement import on_cpus, place
    from chitu.launch.serve import ServeOptions, serve
    from chitu.launch.smoke import first_completion

    name, overrides = _split(arguments, may_download=True)
    if arguments.host is not None:
        overrides.append(f"dp_config.router.http_host={msgspec.json.encode(arguments.host).decode()}")
    topology = load_topology(name, overrides)
    if not topology.model.path:
        overrides += on_cpus(topology)  # the embedded model gains nothing by a GPU
    placement = place(name, overrides, lambda topology: instances(on_one_host(topology)))
    options = ServeOptions(
        port=arguments.port,
        log_dir=arguments.log_dir,
        restart=not arguments.no_restart,
        node=placement.node,
        notes=placement.notes,
        ways=placement.ways,
    )

    def on_ready(cluster: LocalCluster) -> bool:
        if arguments.first_completion or arguments.once:
            first_completion(cluster, must_be_right=arguments.once)
        return bool(arguments.once)

    return serve(placement.topology, options, on_ready)


def _chat(arguments: argparse.Namespace) -> int:
    from chitu.client.terminal import ChatArguments, chat

    return chat(
        ChatArguments(
            url=arguments.url,
            api_key=api_key(),
            model=arguments.model,
            system=arguments.system,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            question=" ".join(arguments.question) if arguments.question else None,
        )
    )


def _explain(arguments: argparse.Namespace) -> int:
    from chitu.client.explain import ExplainArguments, explain_cluster

    return explain_cluster(
        ExplainArguments(arguments.source, api_key(), arguments.seconds, arguments.save, arguments.json)
    )


def _trace(arguments: argparse.Namespace) -> int:
    from chitu.client.client import RouterClient
    from chitu.client.show_trace import TraceArguments, show_trace
    from chitu.launch.drain import credential

    client = RouterClient(arguments.url, credential(arguments.url)) if arguments.dir is None else None
    return show_trace(TraceArguments(arguments.request_id, arguments.dir, arguments.json, arguments.frames), client)


def _snapshot(arguments: argparse.Namespace) -> int:
    from chitu.client.client import RouterClient
    from chitu.launch.drain import credential
    from chitu.protocol.kept_request import unpack

    data = RouterClient(arguments.url, credential(arguments.url)).snapshot(arguments.request_id)
    record = unpack(data)
    # Not seen under its name before it is whole, and by nobody else: it has the prompt.
    partial = f"{arguments.file}.partial"
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    os.replace(partial, arguments.file)
    print(f"{arguments.file}: {len(record.prompt_token_ids)} prompt tokens, {len(record.token_ids)} of the answer")
    return 0


def _join(arguments: argparse.Namespace) -> int:
    from chitu.launch.join import JoinOptions, join
    from chitu.types import Role

    name, overrides = _split(arguments)
    if name is not None:
        raise ConfigError(f"{name!r} is no override (a.b=c); the topology is that of the cluster at {arguments.url}")
    options = JoinOptions(
        arguments.url,
        Role(arguments.role),
        rank=arguments.rank,
        devices=tuple(arguments.devices.split(",")) if arguments.devices else (),
        log_dir=arguments.log_dir,
        ready_timeout_s=arguments.ready_timeout,
    )
    return join(options, overrides)


def _drain(arguments: argparse.Namespace) -> int:
    from chitu.client.client import RouterClient
    from chitu.launch.drain import credential, drain

    client = RouterClient(arguments.url, credential(arguments.url))
    say = functools.partial(print, flush=True)
    drain(client, arguments.instance, force=arguments.force, wait=not arguments.no_wait, say=say)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from chitu.client.verify.report import EXIT_CODES, show
    from chitu.launch.model_source import find_model
    from chitu.launch.verify import VerifyOptions, verify

    say = functools.partial(print, file=sys.stderr, flush=True)
    try:
        options = VerifyOptions(
            url=arguments.url,
            model=find_model(arguments.model, False, say).path if arguments.model is not None else None,
            reference=arguments.reference,
            device=arguments.device,
            has_transformers=not arguments.no_transformers,
            max_rounds=arguments.rounds,
            concurrency=arguments.concurrency,
            max_tokens=arguments.max_tokens,
            timeout_s=arguments.timeout,
        )
        report = verify(options, say)
    except ChituError as error:  # 1 would say that answers are wrong
        print(f"chitu: {error.code}: {error.message}", file=sys.stderr)
        return EXIT_CODES["unjudged"]
    if arguments.json:
        print(msgspec.json.encode(report).decode())
    else:
        show(report, Console(width=None if sys.stdout.isatty() else 120))
    return EXIT_CODES[report.verdict]


def _replay(arguments: argparse.Namespace) -> int:
    from chitu.client.verify.receipts import EXIT_CODES, read_receipts
    from chitu.launch.model_source import find_model
    from chitu.launch.replay import ReplayOptions, replay_receipts

    say = functools.partial(print, file=sys.stderr, flush=True)
    try:
        texts = [(name, sys.stdin.read() if name == "-" else _read_text(name)) for name in arguments.files]
        receipts = [receipt for name, text in texts for receipt in read_receipts(name, text)]
        options = ReplayOptions(
            url=arguments.url if arguments.model is None else None,
            model=find_model(arguments.model, False, say).path if arguments.model is not None else None,
            device=arguments.device,
            concurrency=arguments.concurrency,
            timeout_s=arguments.timeout,
        )
        results = replay_receipts(options, receipts, say)
    except ChituError as error:  # 1 would say that tokens differ
        print(f"chitu: {error.code}: {error.message}", file=sys.stderr)
        return EXIT_CODES["unjudged"]
    for one in results:
        if arguments.json:
            print(msgspec.json.encode(one).decode())
        elif one.verdict != "same" or one.says:
            print(f"{one.request_id}: {one.verdict}: {one.says}")
    counts = {verdict: sum(one.verdict == verdict for one in results) for verdict in EXIT_CODES}
    if not arguments.json:
        print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    return EXIT_CODES["different" if counts["different"] else "unjudged" if counts["unjudged"] else "same"]


def _read_text(name: str) -> str:
    """ConfigError where it is none that can be read."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{name} cannot be read: {reason}") from error


def _plan(arguments: argparse.Namespace) -> int:
    from chitu.config.topology import problems
    from chitu.launch.node import node_command
    from chitu.launch.nodes import host_overrides, launch_problems, split_hosts
    from chitu.launch.placement import place_like_here
    from chitu.launch.plan import plan
    from chitu.launch.plan_text import plan_text

    name, overrides = _split(arguments)
    topology = load_topology(name, overrides)
    node_argv = node_command(name or DEFAULT_TOPOLOGY, overrides, arguments.hosts)
    if arguments.hosts is not None:
        overrides += host_overrides(topology, split_hosts(arguments.hosts))
    placement, found = place_like_here(name, overrides)
    topology, cores = placement.topology, os.cpu_count() or 1
    specs = plan(topology, name or DEFAULT_TOPOLOGY, placement.overrides, cores, node=placement.node)
    notes = [f"devices: {note}" for note in placement.notes]
    notes += [f"transfers: {placement.ways}"] if placement.ways else []
    print(plan_text(topology, specs, cores, node_argv, notes))
    found += problems(topology, pd_master_addr(), need_model=bool(topology.model.path))
    found += launch_problems(topology)
    for problem in found:
        print(f"chitu: {problem}", file=sys.stderr)
    return 2 if found else 0


def _node(arguments: argparse.Namespace) -> int:
    from chitu.launch.node import READY_TIMEOUT_S, NodeOptions, run_node
    from chitu.launch.nodes import split_hosts

    name, overrides = _split(arguments, may_download=True)
    options = NodeOptions(
        hosts=tuple(split_hosts(arguments.hosts)) if arguments.hosts is not None else None,
        index=arguments.node_index,
        threads_per_rank=arguments.cpus_per_gpu,
        ready_timeout_s=READY_TIMEOUT_S if arguments.ready_timeout is None else arguments.ready_timeout,
        log_dir=arguments.log_dir,
        on_failure=arguments.on_failure,
    )
    return run_node(name or DEFAULT_TOPOLOGY, overrides, options)


def _make_model(arguments: argparse.Namespace) -> int:
    from chitu.launch.make_model import ModelShape, make_model

    sizes = {name: value for name, value in vars(arguments).items() if value is not None}
    for name in ("directory", "family", "seed", "run"):
        del sizes[name]
    print(make_model(arguments.directory, arguments.family, ModelShape(**sizes), seed=arguments.seed))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    sys.argv = [f"chitu bench {arguments.name}", *arguments.arguments]
    runpy.run_module(f"chitu.bench.{arguments.name}", run_name="__main__")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from chitu.launch.doctor import doctor
    from chitu.launch.nodes import split_hosts

    name, overrides = _split(arguments)
    return doctor(name, overrides, split_hosts(arguments.hosts) if arguments.hosts else None, arguments.node_index)


if __name__ == "__main__":
    sys.exit(main())
