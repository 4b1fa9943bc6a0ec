"""Costly and odd bodies at a real cluster while other streams run: no stream's tokens wait for them, and the router's
memory stays bounded.

The bound applies to the time in which the router's loop did not answer *because of its own work*. Time in which the
loop, the router's other threads or the prober were ready and got no core (the kernel counts it) is the machine's. An
occasional disturbance is absent from at least one of several tries; the cost of a body is in every try.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from completions import complete_all, instance_loads, is_whole
from draws import often
from loop_prober import Prober, peak_bytes
from nursery import forked
from raw_http import RawClient, http_request
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.fake.executor import expected_tokens
from chitu.launch.local import LocalCluster
from chitu.models.config import read_model_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MAX_STALL_S = 0.05
MAX_GROWTH_BYTES = 256 << 20
"""Bound on the growth of the router's peak resident size, by all bodies together."""
TRIES = 6
SIZE = (2 << 20) - 4096
"""Size of a body, just below the limit."""
NUM_RANDOM = often(15)
TRY = b"TRY"
"""Placeholder in a body, replaced by another number in each try."""
NUM_STREAMS = 4
MAX_LEN = 4096
GREEDY = {"model": "m", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    model = make_checksum_model(tmp_path_factory.mktemp("models") / "checksum", EngineConfig(step_s=0.004))
    overrides = [f"model.path={model}", "model.served_name=m", f"model.max_model_len={MAX_LEN}", "cache.num_pages=2000"]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", overrides), entries=forked(ENTRIES)) as cluster:
        cluster.wait_ready()
        yield cluster


def filled(form: str, piece: str, size: int = SIZE) -> bytes:
    """Return a body of about that size: `form` with its `@` replaced by as many pieces as fit."""
    head, tail = form.encode().split(b"@")
    one = piece.encode()
    return head + one * ((size - len(head) - len(tail)) // len(one)) + tail


def costly_grammars() -> Iterator[tuple[str, bytes]]:
    """Yield grammars within the size limit that are costly to parse, to compile, or for the first mask."""
    many = {f"property{i}": {"type": "string"} for i in range(1700)}
    halves = [{"anyOf": [{"pattern": f"a{i}"}, {"pattern": f"b{i}"}]} for i in range(20)]
    rules = "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(60))
    fields: dict[str, dict[str, object]] = {
        "optional properties": {"guided_json": {"title": "TRY", "type": "object", "properties": many}},
        "large numbers": {"guided_json": {"title": "TRY", "type": "integer", "multipleOf": 99991}},
        "many ways": {"guided_json": {"title": "TRY", "allOf": halves}},
        "deep": {"guided_json": '{"title":"TRY","properties":{"a":' * 1500},
        "brackets": {"guided_regex": "TRY" + "(" * 30_000 + ")" * 30_000},
        "repetitions": {"guided_regex": "TRY((a{1,1000}){1,1000}){1,1000}"},
        "doubling rules": {"guided_grammar": f"start: R0\n{rules}R60: /TRY/\n"},
        "lines": {"guided_grammar": "root ::= TRY" + "\n" * 2000},
        "choices": {"guided_choice": [f"TRY{i:055}" for i in range(1000)]},
    }
    for what, field in fields.items():
        yield what, json.dumps({"model": "m", "prompt": "a", "max_tokens": 1, **field}).encode()


def costly_bodies() -> list[tuple[str, str, bytes]]:
    """Return a description, path and body of each."""
    chat, plain, tokenize, detokenize = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
    stop = json.dumps("ab" * 60_000)
    fits = json.dumps("wörd à 你好 " * 300)
    text = '{"model":"m","max_tokens":1,"prompt":"@"}'
    bodies = [
        ("one long stop", plain, b'{"model":"m","prompt":"a","stop":%s}' % stop.encode()),
        ("long stops", plain, b'{"model":"m","prompt":"a","n":16,"stop":[%s]}' % b",".join([stop.encode()] * 16)),
        ("many stops", plain, filled('{"model":"m","prompt":"a","stop":[@"b"]}', '"ab",')),
        ("stop ids", plain, filled('{"model":"m","prompt":"a","n":128,"stop_token_ids":[@5]}', "5,")),
        ("biases", plain, filled('{"model":"m","prompt":"a","logit_bias":{@"5":1}}', '"5":1,')),
        ("objects", plain, filled('{"model":"m","prompt":"a","guided_json":[@{}]}', "{},")),
        ("unknown fields", plain, filled('{@"model":"m","prompt":"a","max_tokens":1}', '"a":0,')),
        ("digits", plain, filled(text, "1 ")),
        ("one word", plain, filled(text, "a")),
        ("one odd word", plain, filled(text, "\U0001f469\u200d")),
        ("escaped", plain, filled(text, "\\u4f60\\ud83d\\ude00")),
        ("spaces", plain, filled(text, " ")),
        (
            "prompts that fit, then one that does not",
            plain,
            filled('{"model":"m","max_tokens":1,"prompt":[@' + json.dumps("é " * 9000) + "]}", fits + ","),
        ),
        ("prompts", plain, filled('{"model":"m","max_tokens":1,"prompt":[@"a"]}', '"a",')),
        ("ids", plain, filled('{"model":"m","max_tokens":1,"prompt":[@20]}', "20,")),
        ("lists of ids", plain, filled('{"model":"m","max_tokens":1,"prompt":[@[20]]}', "[20],")),
        ("one list of ids among others", plain, filled('{"model":"m","max_tokens":1,"prompt":[[20],[@20]]}', "20,")),
        (
            "choices",
            plain,
            b'{"model":"m","max_tokens":1,"n":32,"echo":true,"prompt":[%s]}' % b",".join([b'"a b"'] * 8),
        ),
        (
            "empty messages",
            chat,
            filled('{"model":"m","messages":[@{"role":"user","content":""}]}', '{"role":"user","content":""},'),
        ),
        (
            "as many messages as are taken",
            chat,
            b'{"model":"m","max_tokens":1,"messages":[%s]}'
            % b",".join([b'{"role":"user","content":"%s"}' % (b"a b " * 240)] * 2000),
        ),
        (
            "parts",
            chat,
            filled(
                '{"model":"m","messages":[{"role":"user","content":[@{"type":"text","text":""}]}]}',
                '{"type":"text","text":"a"},',
            ),
        ),
        ("one message", chat, filled('{"model":"m","messages":[{"role":"user","content":"@"}]}', "x1 ")),
        ("digits to count", tokenize, filled('{"prompt":"@"}', "1 ")),
        ("odd words to count", tokenize, filled('{"prompt":"@"}', "\u00fc\u4f60 x")),
        (
            "messages to count",
            tokenize,
            filled('{"messages":[@{"role":"user","content":""}]}', '{"role":"user","content":""},'),
        ),
        ("tokens", detokenize, filled('{"tokens":[@20]}', "300,", 4 * 262_000)),
        ("too many tokens", detokenize, filled('{"tokens":[@20]}', "9,")),
    ]
    bodies += [(f"grammar: {what}", plain, body) for what, body in costly_grammars()]
    rng = random.Random(7)
    pieces = ["[],", '"",', "1,", "{},", '"a b",', "[1],", '{"role":"user","content":"a"},', "null,", "[[1],[2]],"]
    fields = ["prompt", "messages", "stop", "stop_token_ids", "logit_bias", "tools", "user", "xyz", "tokens"]
    for number in range(NUM_RANDOM):
        path, field, piece = rng.choice([chat, plain, tokenize, detokenize]), rng.choice(fields), rng.choice(pieces)
        beside = rng.choice(['"prompt":"a"', '"messages":[{"role":"user","content":"a"}]', '"tokens":[1]', '"n":128'])
        form = f'{{"model":"m","max_tokens":1,{beside},"{field}":[@{piece[:-1]}]}}'
        bodies.append(
            (
                f"random {number}: {field} of {piece} beside {beside}",
                path,
                filled(form, piece, rng.randint(20_000, SIZE)),
            )
        )
    return bodies


class Streams:
    """Streams that run all the time; each of their tokens must arrive and be right."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._port = cluster.ports["port"]
        self._vocab_size = read_model_spec(Path(cluster.topology.model.path)).vocab_size
        self._is_over = threading.Event()
        self.failures: list[str] = []
        self.gaps_s: list[float] = []
        self._threads = [threading.Thread(target=self._guarded, args=(i,)) for i in range(NUM_STREAMS)]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _guarded(self, index: int) -> None:
        try:
            while not self._is_over.is_set():
                self._stream([20 + index, 30, 40])
        except Exception as error:
            self.failures.append(f"stream {index}: {error!r}")

    def _stream(self, prompt: list[int]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        body = {**GREEDY, "prompt": prompt, "max_tokens": 1500, "stream": True, "return_token_ids": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        ids: list[int] = []
        last_s: float | None = None
        """Time of the last token; unset before the first token, which waits for other things."""
        while not self._is_over.is_set() and (line := response.readline()) != b"data: [DONE]\n":
            if line.startswith(b"data: "):
                ids += json.loads(line[6:])["choices"][0]["token_ids"]
                now_s = time.monotonic()
                if last_s is not None:
                    self.gaps_s.append(now_s - last_s)
                last_s = now_s
            assert line, "the stream ended early"
        connection.close()
        assert ids == expected_tokens(prompt, len(ids), self._vocab_size)


@pytest.mark.by_hand
def test_no_body_stops_the_tokens_of_others_or_takes_the_routers_memory(cluster: LocalCluster) -> None:
    pids = {name: cluster.pid(name) for name in ("router", "P0", "D0")}
    router = pids["router"]
    client = RawClient(cluster.ports["port"])
    bodies = costly_bodies()
    # Load everything that is loaded at its first use.
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        client.exchange(http_request("POST", path, b"{}", {}))
    before_bytes = peak_bytes(router)
    stalls: dict[str, float] = {}
    statuses: dict[int, int] = {}
    with Streams(cluster) as streams, Prober(cluster.ports["port"], router) as prober:
        for name, path, body in bodies:
            for number in range(TRIES):
                own = body.replace(TRY, b"%03d" % number)  # otherwise the next try finds what this one has compiled
                request = http_request("POST", path, own, {"content-type": b"application/json"})
                prober.take()
                reply = client.exchange(request)
                assert reply.status in (200, 400), (name, reply)
                if reply.status == 400:
                    assert b'"param":' in reply.body
                stalls[name] = min(stalls.get(name, 60.0), prober.take())
                if stalls[name] < MAX_STALL_S:
                    break
            statuses[reply.status] = statuses.get(reply.status, 0) + 1
        leave_early(cluster, bodies)
    client.close()
    grown_bytes = peak_bytes(router) - before_bytes
    gaps_s = sorted(streams.gaps_s)
    worst = sorted(stalls.items(), key=lambda item: -item[1])[:5]
    print(f"statuses {statuses}; largest stalls of the loop: {[(name, f'{s * 1e3:.0f} ms') for name, s in worst]}")
    p99_s = gaps_s[len(gaps_s) * 99 // 100]
    print(f"{len(gaps_s)} tokens, age p99 {p99_s * 1e3:.0f} ms, largest {gaps_s[-1] * 1e3:.0f} ms")
    print(f"the router grew by {grown_bytes >> 20} MiB")
    assert not streams.failures, streams.failures
    assert {name: s for name, s in stalls.items() if s >= MAX_STALL_S} == {}
    assert grown_bytes <= MAX_GROWTH_BYTES
    assert {name: cluster.pid(name) for name in pids} == pids, "nobody died"

    def is_idle() -> bool:
        return all(is_whole(load) for load in instance_loads(cluster.url).values())

    wait_until(is_idle, 30.0, lambda: instance_loads(cluster.url))
    [answer] = complete_all(cluster.url, [[20, 30]], [{**GREEDY, "max_tokens": 8}])
    assert len(answer.token_ids) == 8


def leave_early(cluster: LocalCluster, bodies: list[tuple[str, str, bytes]]) -> None:
    """Send bodies from clients that leave at once: the router drops what waits for them."""
    for name, path, body in bodies:
        if name.startswith(("prompts that fit", "as many messages", "digits to count")):
            for _ in range(5):
                client = RawClient(cluster.ports["port"])
                client.send(http_request("POST", path, body, {"content-type": b"application/json"}))
                client.close()
    client = RawClient(cluster.ports["port"])
    _, path, body = bodies[-1]
    assert client.exchange(http_request("POST", path, body, {})).status in (200, 400)
    client.close()
