"""P, D and unified instances without a model: they join, send heartbeats, take requests and emit tokens. One process,
one thread.

Used by the router benchmark and by tests. Everything on the wire is real except the tokens, which are a function of the
request alone: token i is the prompt's token i modulo its length (so the text of the answer is the prompt, over and
over). With `--step-s 0` every running request gets a token in every turn of the loop.

    python -m support.fake_worker --instances P0,D0 --host 127.0.0.1 --coordination-port ... --stats-port ...
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_type_hints

import msgspec
import zmq

from chitu.config.load import cluster_key
from chitu.fake.executor import fake_logprobs
from chitu.instance.token_manager import TokenManager
from chitu.net.curve import derive, make_context
from chitu.net.link import LinkReceivers
from chitu.net.process_deaths import pid_namespace, start_ticks
from chitu.net.sockets import bind, connect
from chitu.net.view_feed import ViewReceiver, ask_for_whole
from chitu.protocol import (
    PROTOCOL_VERSION,
    CancelRequest,
    Drain,
    Finish,
    Heartbeat,
    InstanceInfo,
    Join,
    JoinReply,
    KVLayout,
    Leave,
    LinkAck,
    LoadReport,
    PrefillRequest,
    RequestFailed,
    SampledRequest,
    SamplingParams,
    coordination_reply_codec,
    encode,
    scheduler_codec,
    unpack_i32,
    view_codec,
)
from chitu.types import Incarnation, Role, new_incarnation, room_text

STARTED = "sockets bound at"
"""Line on standard error, followed by the seconds of the monotonic clock."""
ROLE_OF_LETTER = {role.letter: role for role in Role}


INSTANT_S = 0.00025
"""Time between two consecutive token ids of `--instants`."""
INSTANTS = range(2000, 6000)
"""Token ids of `--instants`; they start again after a second."""


def token_at(moment_s: float) -> int:
    """Return the token that is emitted at this time with `--instants`."""
    return INSTANTS[int(moment_s / INSTANT_S) % len(INSTANTS)]


@dataclass(slots=True)
class FakeOptions:
    host: str
    coordination_port: int
    metadata_sync_port: int
    stats_port: int
    token_port: int
    more_routers: str = ""
    """The same four ports of each further router on this host, as `29802,29803,29602,29702;...`."""
    step_s: float = 0.0
    """Seconds between two tokens of a request; 0: as fast as the loop turns."""
    heartbeat_interval_s: float = 0.5
    max_model_len: int = 4096
    vocab_size: int = 512
    model_hash: str = "fake"
    protocol_version: int = PROTOCOL_VERSION
    fail_prefill: str = ""
    """Code with which P fails every request; empty: none."""
    fail_decode: str = ""
    """Code with which D ends every request after its first token; empty: none."""
    suspended: bool = False
    """Whether a P does not write to D0."""
    stop_token: int = -1
    """Token that ends a request with reason `stop` when emitted; -1: none."""
    instants: bool = False
    """Whether tokens encode their emission time (`token_at`) instead of repeating the prompt."""
    trace: str = ""
    """File that gets a line of JSON for every message received; empty: none."""


@dataclass(slots=True)
class _Running:
    room: bytes
    prompt: Sequence[int]
    sampling: SamplingParams
    router: int
    emitted: int = 0
    token_group: int = 1
    held: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Instance:
    info: InstanceInfo
    requests: zmq.Socket[bytes]
    coordination: list[zmq.Socket[bytes]]
    """To each router."""
    stream: TokenManager
    running: dict[bytes, _Running] = field(default_factory=dict)
    received: LinkReceivers = field(default_factory=LinkReceivers)
    reads: int = 0
    joined: set[int] = field(default_factory=set)
    """Indices of the routers that list it."""
    draining: bool = False
    steps: int = 0
    tokens: int = 0

    @property
    def name(self) -> str:
        return self.info.name


class _Router:
    """A router as the fakes see it, which share its sockets."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, ports: Sequence[int]) -> None:
        self.coordination_port, metadata_sync_port, stats_port, token_port = ports
        tokens = _FakeTokenSocket(connect(context, zmq.PUSH, host, token_port)) if token_port else None
        self.send_tokens = tokens.send if tokens is not None else (lambda frame: False)
        self.stats = connect(context, zmq.PUSH, host, stats_port)
        self.feed = ViewReceiver(time.monotonic())
        self.view = connect(context, zmq.SUB, host, metadata_sync_port)
        for topic in self.feed.topics:
            self.view.setsockopt(zmq.SUBSCRIBE, topic)


@dataclass(slots=True, frozen=True)
class _FakeTokenSocket:
    """A `PushPort` that blocks if the router does not read."""

    socket: zmq.Socket[bytes]

    def send(self, frame: bytes) -> bool:
        self.socket.send(frame)
        return True

    def close(self) -> None:
        self.socket.close(0)


class FakeWorker:
    def __init__(self, names: Sequence[str], options: FakeOptions) -> None:
        """Make the instances `names`, such as P0, D0, U1."""
        self._options = options
        self._context = make_context(derive(cluster_key()))
        self._incarnation: Incarnation = new_incarnation()
        ports = [(options.coordination_port, options.metadata_sync_port, options.stats_port, options.token_port)]
        ports += [tuple(map(int, each.split(","))) for each in options.more_routers.split(";") if each]  # type: ignore[misc]
        self._routers = [_Router(self._context, options.host, each) for each in ports]
        self._instances = [self._make(name) for name in names]
        print(f"{STARTED} {time.monotonic()}", file=sys.stderr, flush=True)
        self._poller = zmq.Poller()
        self._by_socket: dict[object, _Instance] = {}
        for instance in self._instances:
            for socket in (instance.requests, *instance.coordination):
                self._poller.register(socket, zmq.POLLIN)
                self._by_socket[socket] = instance
        for router in self._routers:
            self._poller.register(router.view, zmq.POLLIN)
        self._trace = Path(options.trace) if options.trace else None
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True

    def run(self) -> None:
        """Run until `stop`, then leave the cluster."""
        next_beat_s = next_step_s = 0.0
        while not self._stopping:
            now_s = time.monotonic()
            if now_s >= next_beat_s:
                next_beat_s = now_s + self._options.heartbeat_interval_s
                self._beat(now_s)
            busy = any(instance.running for instance in self._instances)
            wait_s = next_beat_s - now_s
            if busy:
                wait_s = max(0.0, min(wait_s, next_step_s - now_s)) if self._options.step_s else 0.0
            for socket, _ in self._poller.poll(math.ceil(wait_s * 1000)):
                self._take(socket)
            now_s = time.monotonic()
            if now_s >= next_step_s or not self._options.step_s:
                next_step_s = now_s + self._options.step_s
                for instance in self._instances:
                    if instance.running:
                        self._step(instance)
        for instance in self._instances:
            self._leave(instance, "told to end")
        self._context.destroy(linger=200)

    def _leave(self, instance: _Instance, reason: str) -> None:
        info = instance.info
        for coordination in instance.coordination:
            coordination.send(encode(Leave(info.role, info.engine_rank, info.incarnation, reason)))

    def _make(self, name: str) -> _Instance:
        role, rank = ROLE_OF_LETTER[name[0].upper()], int(name[1:])
        options = self._options
        requests, port = bind(self._context, zmq.PULL, options.host, 0)
        layout = KVLayout.uniform(options.model_hash, 2, 2, 16, 16, "float32", options.vocab_size)
        control_port = 0 if role is Role.UNIFIED else port
        info = InstanceInfo(
            *(role, rank, self._incarnation, options.host, port, control_port, layout),
            max_model_len=options.max_model_len,
            sees_images=True,
            pid=os.getpid(),
            pid_namespace=pid_namespace(),
            start_ticks=start_ticks(os.getpid()),
        )
        coordination = [connect(self._context, zmq.DEALER, options.host, r.coordination_port) for r in self._routers]
        stream = TokenManager(self._incarnation, *(router.send_tokens for router in self._routers))
        return _Instance(info, requests, coordination, stream)

    def _beat(self, now_s: float) -> None:
        for instance in [i for i in self._instances if i.draining and not i.running]:
            self._instances.remove(instance)
            self._leave(instance, "drained")
        for instance in self._instances:
            info = instance.info
            for index in {*range(len(self._routers))} - instance.joined:
                join = Join(self._options.protocol_version, info)
                instance.coordination[index].send(encode(join), zmq.NOBLOCK)
            suspended = (0,) if self._options.suspended and info.role is Role.PREFILL else ()
            load = LoadReport(
                running=len(instance.running), steps=instance.steps, tokens=instance.tokens, suspended=suspended
            )
            self._drain_requests(instance)
            instance.stream.flush(now_s)
            beat = Heartbeat(
                *(info.role, info.engine_rank, info.incarnation, load, instance.received.acks(), instance.reads),
                routers=tuple(sorted(instance.joined)),
            )
            frame = encode(beat)
            for router in self._routers:
                router.stats.send(frame, zmq.NOBLOCK)

    def _take(self, socket: object) -> None:
        for index, router in enumerate(self._routers):
            if socket is router.view:
                self._drain_views(index, router)
                return
        instance = self._by_socket[socket]
        if socket is instance.requests:
            self._drain_requests(instance)
            return
        (asked,) = [each for each in instance.coordination if each is socket]
        reply = coordination_reply_codec.decode(asked.recv())
        self._note(instance, reply)
        if isinstance(reply, JoinReply) and reply.code:
            print(f"{instance.name} refused: {reply.code}: {reply.message}", file=sys.stderr, flush=True)
        elif isinstance(reply, Drain):
            instance.draining = True
            asked.send(encode(reply))

    def _drain_views(self, index: int, router: _Router) -> None:
        before = router.feed.view
        try:
            while True:
                router.feed.take(view_codec.decode(router.view.recv_multipart(zmq.NOBLOCK)[-1]))
        except zmq.Again:
            pass
        if router.feed.should_ask(time.monotonic()):
            ask_for_whole(router.view, router.feed.topic)
        view = router.feed.view
        if view is before:
            return
        members = {(i.role, i.engine_rank, i.incarnation) for i in view.instances}
        for instance in self._instances:
            info = instance.info
            is_member = (info.role, info.engine_rank, info.incarnation) in members
            (instance.joined.add if is_member else instance.joined.discard)(index)

    def _drain_requests(self, instance: _Instance) -> None:
        try:
            while True:
                message = scheduler_codec.decode(instance.requests.recv(zmq.NOBLOCK))
                if isinstance(message, LinkAck):
                    instance.stream.take_ack(message)
                    continue
                if not instance.received.take(message.stamp):
                    continue
                self._note(instance, message)
                if isinstance(message, CancelRequest):
                    instance.running.pop(message.room, None)
                elif isinstance(message, SampledRequest):
                    head = message.head
                    token_ids, emitted = unpack_i32(head.token_ids), head.num_emitted
                    prompt = token_ids[: len(token_ids) - emitted]  # the rest is output of a lost D
                    asks = head.router
                    instance.stream.expect(asks, message.stamp.link)
                    instance.running[head.room] = _Running(
                        *(head.room, prompt, message.sampling, asks, emitted, message.token_group)
                    )
                elif isinstance(message, PrefillRequest) and self._options.fail_prefill:
                    info = instance.info
                    failed = RequestFailed(
                        *(info.role, info.engine_rank, info.incarnation),
                        message.head.room,
                        self._options.fail_prefill,
                        "told to fail",
                    )
                    for router in self._routers:
                        router.stats.send(encode(failed))
        except zmq.Again:
            instance.reads += 1

    def _step(self, instance: _Instance) -> None:
        """Emit one token for every running request, in one batch."""
        finished: list[tuple[_Running, Finish]] = []
        push, stop_token, fail = instance.stream.push, self._options.stop_token, self._options.fail_decode
        instants, now = self._options.instants, token_at(time.monotonic())
        for running in instance.running.values():
            token = now if instants else running.prompt[running.emitted % len(running.prompt)]
            running.emitted += 1
            count = running.sampling.logprobs
            logprobs = None if count is None else fake_logprobs(token, count)
            if running.token_group == 1:
                push(running.room, token, running.router, logprobs)
            else:
                running.held.append(token)
            num_finished = len(finished)
            if fail:
                finished.append((running, Finish(running.room, "error", fail, "told to fail")))
            elif token == stop_token and not running.sampling.ignore_eos:
                finished.append((running, Finish(running.room, "stop")))
            elif running.emitted >= running.sampling.max_tokens:
                finished.append((running, Finish(running.room, "length")))
            most, is_last = running.token_group, len(finished) > num_finished
            if most > 1 and (running.emitted == 1 or is_last or not instance.steps % most or len(running.held) >= most):
                instance.stream.push_group(running.room, running.held, running.router)
                running.held = []
        instance.steps += 1
        instance.tokens += len(instance.running)
        for running, finish in finished:
            instance.stream.finish(finish, running.router)
            del instance.running[finish.room]
        instance.stream.flush(time.monotonic())

    def _note(self, instance: _Instance, message: msgspec.Struct) -> None:
        if self._trace is None:
            return
        line: dict[str, object] = {"instance": instance.name, "kind": type(message).__name__}
        for name in ("room", "request_id", "sampling", "code"):
            value = getattr(message, name, None) or getattr(getattr(message, "head", None), name, None)
            if value is not None:
                line[name] = room_text(value) if isinstance(value, bytes) else value
        with self._trace.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m support.fake_worker", description=__doc__.split("\n")[0])
    parser.add_argument("--instances", required=True, help="comma separated: P0,D0,U0")
    hints = get_type_hints(FakeOptions)
    for option in dataclasses.fields(FakeOptions):
        required = option.default is dataclasses.MISSING
        flag = "--" + option.name.replace("_", "-")
        default = None if required else option.default
        if hints[option.name] is bool:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=hints[option.name], required=required, default=default)
    args = vars(parser.parse_args(argv))
    names = args.pop("instances").split(",")
    worker = FakeWorker(names, FakeOptions(**args))
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    signal.signal(signal.SIGINT, lambda *_: worker.stop())
    worker.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
