"""The commands of `chitu`: serve, node, chat, batch, trace, verify, snapshot, replay, join, drain, role, canary,
token, upgrade, plan, import, make-model, size, bench, doctor.

Called by `main` of the package. This module only calls; `arguments.py` parses. Each command imports what it needs in
its function, so that `chitu --help` is instant. A wrong configuration prints one sentence on stderr and exits with 2;
any other known failure, including an OS error, prints one sentence and exits with 1; Ctrl-C exits with 130.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import re
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from chitu.cli.arguments import DEFAULT_URL, make_parser
from chitu.cli.unknown_options import unrecognized
from chitu.config.load import DEFAULT_TOPOLOGY, api_key, load_topology, pd_master_addr, read_topology
from chitu.errors import ChituError, ConfigError

if TYPE_CHECKING:
    from chitu.launch.plan import Entries


def run(argv: Sequence[str] | None = None, entries: Entries | None = None) -> int:
    """Run a command line and return the exit code. `entries`: how launchers start their processes."""
    try:
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 costs no answer
        arguments = _parsed(argv)
        arguments.entries = entries
        result = RUNS[arguments.command](arguments)
        sys.stdout.flush()  # so that a write error raises here, not when the interpreter ends
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
    except UnicodeEncodeError as error:  # the locale has another encoding
        text = error.object[error.start : error.end]
        print(f"chitu: {text!a} cannot be written in {error.encoding}: use UTF-8 for names", file=sys.stderr)
        return 2
    except OSError as error:  # for example a folder that cannot be made, or a full disk
        _forget_output()
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"chitu: {where}{error.strerror or error}", file=sys.stderr)
        return 1


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser, parsers = make_parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes positional arguments after an option for unknown ones; here they are overrides like those before.
    takes_keys = hasattr(arguments, "topology")
    if rest and (not takes_keys or any(word.startswith("-") for word in rest)):
        command = parsers[arguments.command]
        options = [word for word in re.findall(r"--[a-z-]+", command.format_usage()) if word != "--help"]
        command.error(unrecognized(sys.argv[1:] if argv is None else argv, rest, options, takes_keys))
    if rest:
        arguments.topology += rest
    return arguments


def _forget_output() -> None:
    """Redirect stdout to /dev/null, so that the interpreter does not try to write it again at exit and fail."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _split(arguments: argparse.Namespace, may_download: bool = False) -> tuple[str | None, list[str]]:
    """Split the positional arguments into the topology's name, if one is given, and the overrides. `may_download`
    allows to download a model that is not here."""
    overrides = [word for word in arguments.topology if "=" in word]
    files = [word for word in arguments.topology if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"one topology at a time: {' and '.join(files)} were given (overrides look like a.b=c)")
    name = files[0] if files else None
    if arguments.model is not None:
        from chitu.launch.model_source import find_model

        source = find_model(arguments.model, may_download, functools.partial(print, file=sys.stderr, flush=True))
        if source.name is not None and load_topology(name, overrides).model.served_name is None:
            overrides.append(f"model.served_name={_as_yaml(source.name)}")
        overrides.append(f"model.path={_as_yaml(source.path)}")
    return name, overrides


def _as_yaml(text: str) -> str:
    """Return the text for YAML, quoted if YAML could read it as anything but a string."""
    return text if re.fullmatch(r"[A-Za-z/][\w./+-]*[/][\w./+-]*", text) else msgspec.json.encode(text).decode()


def _serve_fake(arguments: argparse.Namespace) -> int:
    """Join a running router with an instance that computes no model, until Ctrl-C."""
    from chitu.launch.join import JoinOptions, join
    from chitu.launch.plan import Entries
    from chitu.types import Role

    if arguments.port is not None or arguments.host or arguments.no_restart or arguments.first_completion:
        raise ConfigError("--fake starts one instance: it takes --url, --model, --log-dir and overrides alone")
    name, overrides = _split(arguments)
    if name is not None or arguments.once:
        raise ConfigError(f"--fake takes the topology of the router at {arguments.url}; {name or '--once'!r} is none")
    role = Role(arguments.fake)
    print(f"a FAKE {role} instance, which computes no model, joins {arguments.url}", file=sys.stderr, flush=True)
    entries = replace(arguments.entries or Entries(), scheduler="chitu.serve.fake_scheduler", torchrun=False)
    options = JoinOptions(arguments.url, role, devices=("cpu",), log_dir=arguments.log_dir, entries=entries)
    return join(options, overrides)


def _serve(arguments: argparse.Namespace) -> int:
    from chitu.launch.host import HostProcesses, ServeOptions, serve
    from chitu.launch.plan import Entries
    from chitu.tools.smoke import first_completion

    if arguments.fake is not None:
        return _serve_fake(arguments)
    if arguments.url != DEFAULT_URL:
        raise ConfigError("--url: only an instance of --fake joins a running router (`chitu join` adds a real one)")
    name, overrides = _split(arguments, may_download=True)
    if arguments.host is not None:
        overrides.append(f"dp_config.router.http_host={msgspec.json.encode(arguments.host).decode()}")
    entries = arguments.entries or Entries()
    options = ServeOptions(arguments.port, arguments.log_dir, restart=not arguments.no_restart, entries=entries)

    def on_ready(cluster: HostProcesses) -> bool:
        if arguments.first_completion or arguments.once:
            first_completion(cluster, must_be_right=arguments.once)
        return bool(arguments.once)

    return serve(name, overrides, options, on_ready)


def _chat(arguments: argparse.Namespace) -> int:
    from chitu.tools.chat import ChatOptions, chat

    question = " ".join(arguments.question) if arguments.question else None
    options = ChatOptions(arguments.model, arguments.system, arguments.max_tokens, arguments.temperature)
    return chat(arguments.url, api_key(), question, options, arguments.image)


def _batch(arguments: argparse.Namespace) -> int:
    from chitu.tools.batch import BatchOptions, batch

    options = BatchOptions(arguments.concurrency, arguments.timeout, arguments.patience)
    return batch(arguments.url, api_key(), Path(arguments.input), Path(arguments.output), options)


def _trace(arguments: argparse.Namespace) -> int:
    from chitu.launch.router_calls import credential
    from chitu.launch.router_client import RouterClient
    from chitu.tools.trace import show_trace

    source: RouterClient | Path
    if arguments.dir is None:
        source = RouterClient(arguments.url, credential(arguments.url))
    else:
        source = Path(arguments.dir)
    return show_trace(arguments.request_id, source, arguments.json, arguments.frames)


def _snapshot(arguments: argparse.Namespace) -> int:
    from chitu.launch.router_calls import credential
    from chitu.launch.router_client import RouterClient
    from chitu.protocol.kept_request import unpack

    client = RouterClient(arguments.url, credential(arguments.url))
    has = ""
    if arguments.pages:
        from chitu.tools.snapshot_pages import Source, with_pages

        source = Source.of(client)  # which reads the weights, while the request runs on
        data = client.snapshot(arguments.request_id)
        record = unpack(data)
        data, count = with_pages(data, source)
        has = f", {count} pages"
    else:
        data = client.snapshot(arguments.request_id)
        record = unpack(data)
    # The file gets its name when it is complete. Only its owner may read it: it contains the prompt.
    partial = f"{arguments.file}.partial"
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    os.replace(partial, arguments.file)
    print(f"{arguments.file}: {len(record.prompt_token_ids)} prompt tokens, {len(record.token_ids)} of the answer{has}")
    return 0


def _restore(arguments: argparse.Namespace) -> int:
    from chitu.launch.router_calls import credential
    from chitu.launch.router_client import RouterClient
    from chitu.protocol.kept_request import DamagedFile
    from chitu.tools.snapshot_pages import Source, read, restore

    data = Path(arguments.file).read_bytes()
    try:
        read(data)  # before the weights, which take longer
        target = Source.of(RouterClient(arguments.url, credential(arguments.url)))
        record, count = restore(data, target, Path(arguments.file).stem)
    except DamagedFile as error:
        raise ConfigError(f"{arguments.file}: {error}") from error
    print(f"{record.request_id} goes on with {count} pages: GET /v1/requests/{record.request_id}")
    return 0


def _join(arguments: argparse.Namespace) -> int:
    from chitu.launch.join import JoinOptions, join
    from chitu.launch.plan import Entries
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
        entries=arguments.entries or Entries(),
    )
    return join(options, overrides)


def _drain(arguments: argparse.Namespace) -> int:
    from chitu.launch.router_calls import credential, drain, drain_self
    from chitu.launch.router_client import RouterClient

    how = {"force": arguments.force, "wait": not arguments.no_wait, "say": functools.partial(print, flush=True)}
    if arguments.self:
        drain_self(arguments.url, **how)
    else:
        url = arguments.url or DEFAULT_URL
        drain(RouterClient(url, credential(url)), [arguments.instance], **how)
    return 0


def _role(arguments: argparse.Namespace) -> int:
    from chitu.launch.router_calls import change_role, credential
    from chitu.launch.router_client import RouterClient
    from chitu.types import Role

    client = RouterClient(arguments.url, credential(arguments.url))
    how = {"force": arguments.force, "wait": not arguments.no_wait, "say": functools.partial(print, flush=True)}
    change_role(client, arguments.instance, Role(arguments.role), **how)
    return 0


def _canary(arguments: argparse.Namespace) -> int:
    from chitu.launch.router_calls import credential
    from chitu.launch.router_client import RouterClient
    from chitu.protocol.admin import Canary

    client = RouterClient(arguments.url, credential(arguments.url))
    set_to = client.set_canary(Canary(arguments.revision, arguments.share))
    if set_to.revision:
        print(f"{set_to.share:.0%} of the requests go to revision {set_to.revision}, while others can serve")
    else:
        print("each revision gets requests by the number of its instances")
    return 0


def _upgrade(arguments: argparse.Namespace) -> int:
    from chitu.launch.router_calls import credential
    from chitu.launch.router_client import RouterClient
    from chitu.tools.upgrade import check_upgrade

    url = arguments.source or arguments.url
    return check_upgrade(RouterClient(url, credential(url)), print)


def _import(arguments: argparse.Namespace) -> int:
    from chitu.tools.recipes.importing import import_recipe

    hosts = [name.strip() for name in arguments.hosts.split(",")] if arguments.hosts else []
    output = Path(arguments.output) if arguments.output else None
    return import_recipe(Path(arguments.file), arguments.variant, arguments.card, hosts, output, print)


def _verify(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from chitu.launch.model_source import find_model
    from chitu.tools.verify.report import EXIT_CODES, show
    from chitu.tools.verify.run import VerifyOptions, verify

    say = functools.partial(print, file=sys.stderr, flush=True)
    try:
        options = VerifyOptions(
            url=arguments.source or arguments.url,
            model=find_model(arguments.model, False, say).path if arguments.model is not None else None,
            reference=arguments.reference,
            device=arguments.device,
            has_transformers=not arguments.no_transformers,
            max_rounds=arguments.rounds,
            concurrency=arguments.concurrency,
            max_tokens=arguments.max_tokens,
            timeout_s=arguments.timeout,
            entries=arguments.entries,
        )
        report = verify(options, say)
    except ChituError as error:  # exit code 1 would mean that answers are wrong
        print(f"chitu: {error.code}: {error.message}", file=sys.stderr)
        return EXIT_CODES["unjudged"]
    if arguments.json:
        print(msgspec.json.encode(report).decode())
    else:
        show(report, Console(width=None if sys.stdout.isatty() else 120))
    return EXIT_CODES[report.verdict]


def _replay(arguments: argparse.Namespace) -> int:
    from chitu.launch.model_source import find_model
    from chitu.tools.replay import EXIT_CODES, ReplayOptions, read_receipts, replay_receipts

    say = functools.partial(print, file=sys.stderr, flush=True)
    try:
        texts = [(name, sys.stdin.read() if name == "-" else _read_text(name)) for name in arguments.files]
        saved = [one for name, text in texts for one in read_receipts(name, text)]
        options = ReplayOptions(
            url=arguments.url if arguments.model is None else None,
            model=find_model(arguments.model, False, say).path if arguments.model is not None else None,
            adapters=tuple(arguments.adapter),
            images=tuple(arguments.images),
            device=arguments.device,
            concurrency=arguments.concurrency,
            timeout_s=arguments.timeout,
            entries=arguments.entries,
        )
        results = replay_receipts(options, saved, say)
    except ChituError as error:  # exit code 1 would mean that tokens differ
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
    """Read a text file; raise ConfigError if that fails."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{name} cannot be read: {reason}") from error


def _plan(arguments: argparse.Namespace) -> int:
    from chitu.config.topology_checks import missing_roles, problems
    from chitu.launch.addresses import address_problems
    from chitu.launch.plan import (
        host_overrides,
        launch_problems,
        node_command,
        plan,
        plan_text,
        split_hosts,
        with_hosts,
    )
    from chitu.launch.preflight import look_at_model
    from chitu.net.control_groups import usable_cores
    from chitu.process.placement import place_like_here

    name, overrides = _split(arguments)
    topology, given = read_topology(name, overrides)
    node_argv = node_command(name or DEFAULT_TOPOLOGY, overrides, arguments.hosts)
    if arguments.hosts is not None:
        hosts = split_hosts(arguments.hosts)
        overrides += host_overrides(topology, hosts)
        topology = with_hosts(topology, hosts)
    placement, placing, found = place_like_here(topology, given)
    topology, cores = placement.topology, usable_cores()
    specs = plan(topology, name or DEFAULT_TOPOLOGY, [*overrides, *placing], cores, node=placement.node)
    notes = [f"devices: {note}" for note in placement.notes]
    notes += [f"transfers: {placement.ways}"] if placement.ways else []
    if missing := missing_roles(topology):
        notes.append(f"requests are answered with 503 until these join: {', '.join(missing)} (`chitu join`)")
    print(plan_text(topology, specs, cores, node_argv, notes))
    found += problems(topology, pd_master_addr(), need_model=bool(topology.model.path))
    found += [*launch_problems(topology), *address_problems(topology)]
    if topology.model.path and not found and (error := look_at_model(topology)[1].error):
        found.append(error)
    for problem in found:
        print(f"chitu: {problem}", file=sys.stderr)
    return 2 if found else 0


def _node(arguments: argparse.Namespace) -> int:
    from chitu.launch.host import READY_TIMEOUT_S, NodeOptions, give_up, run_node
    from chitu.launch.plan import Entries, split_hosts

    try:
        name, overrides = _split(arguments, may_download=True)
    except (ConfigError, OSError) as error:  # such as a model that only this node cannot find
        return give_up(f"node {arguments.node_index}: {error}", arguments.on_failure)
    options = NodeOptions(
        hosts=tuple(split_hosts(arguments.hosts)) if arguments.hosts is not None else None,
        index=arguments.node_index,
        threads_per_rank=arguments.cpus_per_gpu,
        ready_timeout_s=READY_TIMEOUT_S if arguments.ready_timeout is None else arguments.ready_timeout,
        log_dir=arguments.log_dir,
        on_failure=arguments.on_failure,
        entries=arguments.entries or Entries(),
    )
    return run_node(name or DEFAULT_TOPOLOGY, overrides, options)


def _make_model(arguments: argparse.Namespace) -> int:
    from chitu.tools.make_model import ModelShape, make_model

    sizes = {name: value for name, value in vars(arguments).items() if value is not None}
    for name in ("directory", "family", "seed", "command"):
        del sizes[name]
    print(make_model(arguments.directory, arguments.family, ModelShape(**sizes), seed=arguments.seed))
    return 0


def _size(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from chitu.tools.size.command import SizeOptions, size

    options = SizeOptions(
        arguments.slo,
        arguments.devices,
        tuple(arguments.profile),
        trace=arguments.trace,
        lengths=arguments.lengths,
        requests=arguments.requests,
        share=arguments.share,
        is_poisson=arguments.poisson,
        seed=arguments.seed,
        plot=arguments.plot,
        is_json=arguments.json,
        draft_acceptance=arguments.draft_acceptance,
        images=arguments.images,
        encode_rate=arguments.encode_rate,
        encoders=arguments.encoders,
    )
    say = functools.partial(print, file=sys.stderr, flush=True)
    return size(options, Console(width=None if sys.stdout.isatty() else 120), say)


def _bench(arguments: argparse.Namespace) -> int:
    sys.argv = [f"chitu bench {arguments.name}", *arguments.arguments]
    runpy.run_module(f"chitu.tools.bench.{arguments.name}", run_name="__main__")
    return 0


def _token(arguments: argparse.Namespace) -> int:
    from chitu.launch.router_calls import credential
    from chitu.launch.router_client import RouterClient

    token = credential(arguments.url)
    url = RouterClient(arguments.url, token).url
    if token is None:
        raise ConfigError(
            f"no launcher of this user on this machine has a key for {url}, and neither CHITU_CLUSTER_KEY "
            "nor CHITU_API_KEY is set; a cluster without keys takes operators' calls from its own machine, without any"
        )
    print(token)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from chitu.launch.plan import split_hosts
    from chitu.tools.doctor import doctor

    name, overrides = _split(arguments)
    return doctor(name, overrides, split_hosts(arguments.hosts) if arguments.hosts else None, arguments.node_index)


RUNS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "serve": _serve,
    "chat": _chat,
    "batch": _batch,
    "trace": _trace,
    "join": _join,
    "drain": _drain,
    "role": _role,
    "token": _token,
    "verify": _verify,
    "snapshot": _snapshot,
    "restore": _restore,
    "canary": _canary,
    "upgrade": _upgrade,
    "replay": _replay,
    "plan": _plan,
    "import": _import,
    "node": _node,
    "make-model": _make_model,
    "size": _size,
    "bench": _bench,
    "doctor": _doctor,
}
