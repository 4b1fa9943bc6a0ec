"""Bodies by schemathesis and broken ones on every route of a live router: no 5xx, and afterwards all is as before.

Schemathesis generates requests from the server's own OpenAPI document, half of them violating it, and checks every
answer against that document. Each is then sent again in many broken forms: cut, wrong values, wrong framing, no HTTP. A
request by schemathesis or hypothesis costs ten milliseconds and more, a broken form of it less than one.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from completions import complete_all, instance_loads, is_whole
from draws import IS_NIGHTLY, often
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from nursery import forked
from raw_http import RawClient, Reply, http_request
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from support.router_process import wait_until

from chitu.assets import TINY_MODEL_NAME
from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.fake.executor import expected_tokens
from chitu.http.ask.bodies import REFUSED, SERVED
from chitu.http.table import BODIES
from chitu.launch.local import LocalCluster
from chitu.models.config import read_model_spec
from chitu.net.curve import derive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_BODIES = often(1500)
"""Number of bodies over all routes."""
BROKEN_FORMS = 20
"""Number of broken forms per body that schemathesis generates."""
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
BODY_ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    *ANTHROPIC,
    "/tokenize",
    "/detokenize",
    "/abort_request",
)
ENDLESS = "/cluster/events"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
PROMPTS = [[20, 30, 40, 50, 60], list(range(100, 150))]

ODD_JSON = [
    *(
        "null",
        "true",
        "-1",
        "0",
        "1.5",
        "-0.0",
        "1e999",
        "NaN",
        "-Infinity",
        "1" + "0" * 30,
        "9" * 5000,
        "-" + "9" * 400,
    ),
    *('""', '"\\ud800"', '"\\udc00x"', '"\\u0000"', '"\x00"', '"' + "x" * 3000 + '"', '"tokens"', '"\U0010ffff"'),
    *("[]", "{}", "[[]]", "[null]", "[1,true]", '["a",1]', '{"":0}', '{"' + "1" * 5000 + '":1}', '{"\\ud800":1}'),
    *("[" * 3000 + "]" * 3000, '{"a":' * 500 + "1" + "}" * 500, "[" + "1," * 3000 + "1]", '[{"role":"\\udfff"}]'),
    *(
        '{"type":"text"}',
        '[{"role":"user","content":[{"type":"text"}]}]',
        '[{"role":"","content":""}]',
        "nul",
        "",
        "'a'",
    ),
]
ODD_HEADERS = [
    *(
        ("content-type", t)
        for t in ("text/plain", "", "application/json; charset=utf-16", "multipart/form-data", "\xff")
    ),
    *(("content-encoding", e) for e in ("gzip", "br", "nonsense")),
    *(("x-request-timeout", t) for t in ("0", "-1", "nan", "1e400", "soon", "9" * 400, "60")),
    *(("x-request-id", i) for i in ("", "a b", "\xff", "x" * 500)),
    *(("accept", a) for a in ("", "\xff", "a/b;q=x;;,", "application/openmetrics-text;version=")),
    *(("authorization", a) for a in ("", "Bearer", "Basic \xff", "Bearer " + "x" * 5000)),
    *(("expect", "100-continue"), ("te", "trailers"), ("range", "bytes=9-1"), ("cookie", "=;=;"), ("host", "")),
]
NO_HTTP = [
    b"POST %s HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST %s HTTP/1.1\r\nhost: h\r\ntransfer-encoding: gzip\r\n\r\n",
    b"POST %s HTTP/1.1\r\nhost: h\r\ncontent-length: -1\r\n\r\n",
    b"POST %s HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST %s\xff HTTP/1.1\r\nhost: h\r\n\r\n",
    b"POST http://[ HTTP/1.1\r\nhost: h\r\nx: %s\r\n\r\n",
    b"FOO %s HTTP/1.1\r\nhost: h\r\n\r\n",
    b"POST %s HTTP/7.7\r\nhost: h\r\n\r\n",
    b"%s\r\n\r\n",
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    model = make_checksum_model(tmp_path_factory.mktemp("models") / "checksum", EngineConfig())
    # In so small a context every request is cheap. With the embedded model's name every route exists.
    small = ["model.max_model_len=64", "cache.num_pages=400", f"model.served_name={TINY_MODEL_NAME}"]
    topology = load_topology("pd_disagg_1p1d_local", [f"model.path={model}", *small])
    with LocalCluster(topology, entries=forked(ENTRIES)) as cluster:
        cluster.wait_ready()
        yield cluster


def token_of(cluster: LocalCluster) -> str:
    """Return the cluster's token as an Authorization header."""
    secrets = derive(cluster_key_of(cluster.topology))
    assert secrets is not None
    return f"Bearer {secrets.token}"


@pytest.fixture
def unharmed(cluster: LocalCluster) -> Iterator[None]:
    """Check that a test leaves the same processes, nothing bad in their logs, every page free and right tokens."""
    pids = {name: cluster.pid(name) for name in ("router", "P0", "D0")}
    yield
    assert {name: cluster.pid(name) for name in pids} == pids, "nobody died"
    for name in pids:
        log = cluster.logs(name)
        for sign in ("Traceback", "died", "handler failed"):
            assert sign not in log, log[max(0, log.index(sign) - 500) : log.index(sign) + 2500]

    def is_idle() -> bool:
        loads = instance_loads(cluster.url)
        in_flight = httpx.get(f"{cluster.url}/health", trust_env=False, timeout=60.0).json()["in_flight"]
        return in_flight == 0 and all(name in loads and is_whole(loads[name]) for name in ("P0", "D0"))

    wait_until(is_idle, 30.0, lambda: instance_loads(cluster.url))
    greedy = {"model": TINY_MODEL_NAME, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answers = complete_all(cluster.url, PROMPTS, [greedy] * len(PROMPTS))
    vocab_size = read_model_spec(Path(cluster.topology.model.path)).vocab_size
    assert [one.token_ids for one in answers] == [expected_tokens(prompt, 8, vocab_size) for prompt in PROMPTS]


def meant_well(rng: random.Random, path: str, body: dict[str, Any]) -> None:
    """Change a body that follows the document so that it can be answered: of this model, within its context."""
    if path == "/abort_request":
        body["rid"] = rng.choice(["x", "cmpl-1", "\u00e9"])
        return
    body["model"] = TINY_MODEL_NAME
    narrow = ("suffix", "best_of", "logit_bias", "stop_token_ids", "min_tokens", "add_special_tokens")
    more = ("allowed_token_ids", "bad_words", "truncate_prompt_tokens", "return_receipt", "return_page_sums")
    for name in (*narrow, *more):
        body.pop(name, None)
    if rng.random() < 0.8:
        for name in [name for name in body if BODIES.fields[path][name].effect == REFUSED]:
            del body[name]
    if not body.get("stream"):
        body.pop("stream_options", None)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if body.get(name) is not None:
            body[name] = rng.randint(1, 8)
    if body.get("n") is not None:
        body["n"] = rng.randint(1, 4)
    if body.get("priority") is not None:
        body["priority"] = abs(body["priority"])  # the others are the operator's to allow
    if path == "/v1/responses":
        body["input"] = rng.choice(["", "a", [{"role": "user", "content": "b"}]])
        for name in ("tools", "tool_choice", "text", "reasoning", "chat_template_kwargs"):
            body.pop(name, None)
    elif path in ANTHROPIC:
        body["messages"] = [{"role": "user", "content": rng.choice(["", "a", [{"type": "text", "text": "b"}]])}]
        for name in ("tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs", "stop_sequences"):
            body.pop(name, None)
        if rng.random() < 0.9:
            body.pop("system", None)
    elif path == "/detokenize":
        body["tokens"] = [token % 1000 for token in body.get("tokens", [7])]
    elif path == "/v1/completions":
        body["prompt"] = rng.choice(["ab", ["a", "b c"], [1, 2, 3], [[4], [5, 6]]])
    elif path == "/v1/chat/completions" or rng.random() < 0.5:
        body["messages"] = [{"role": "user", "content": rng.choice(["", "a", [{"type": "text", "text": "b"}]])}]
        body.pop("prompt", None)
    else:
        body["prompt"] = rng.choice(["", "a", "x\u00e9 \U0001f600"])
        body.pop("messages", None)


def with_value(body: dict[str, Any], name: str, value: str) -> bytes:
    """Return the body as JSON, with the raw text `value` for one field."""
    entries = [(key, json.dumps(known)) for key, known in body.items() if key != name] + [(name, value)]
    return ("{" + ",".join(f"{json.dumps(key)}:{text}" for key, text in entries) + "}").encode()


def broken_json(rng: random.Random, body: Any) -> bytes:
    """Return the body as JSON or almost JSON."""
    raw = json.dumps(body).encode()
    kind = rng.randrange(4)
    if kind == 0:
        return raw[: rng.randrange(len(raw))]
    if kind == 1:
        spoilt = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            spoilt[rng.randrange(len(raw))] = rng.randrange(256)
        return bytes(spoilt)
    odd = rng.choice(ODD_JSON)
    if not isinstance(body, dict) or not body:
        return odd.encode()
    name = rng.choice(list(body))
    if kind == 2:
        return b'{"%s":0,' % name.encode("ascii", "replace") + with_value(body, name, odd)[1:]  # a key that comes twice
    return with_value(body, name, odd)


class Broken:
    """Sends what no client library would."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._client = RawClient(cluster.ports["port"])
        self.statuses: Counter[int] = Counter()

    def close(self) -> None:
        self._client.close()

    def send(self, rng: random.Random, method: str, path: str, body: Any) -> None:
        """Send one broken form of a request; raise AssertionError if the answer does not fit a bad request."""
        kind = rng.randrange(16)
        if kind == 0:
            self._send_no_http(rng, path)
            return
        headers = {"content-type": b"application/json"}
        raw = broken_json(rng, body) if kind < 10 else json.dumps(body).encode()
        if kind == 10:
            raw = rng.choice([gzip.compress(raw), raw.decode().encode("utf-16"), b"\xef\xbb\xbf" + raw, raw + raw, b""])
        if kind >= 8:
            name, value = rng.choice(ODD_HEADERS)
            headers[name] = value.encode("latin-1")
        self.request(method, path, raw, headers, in_chunks=kind == 15)

    def request(self, method: str, path: str, raw: bytes, headers: dict[str, bytes], in_chunks: bool = False) -> None:
        reply = self._client.exchange(http_request(method, path, raw, headers, in_chunks))
        self._judge(reply, (method, path, raw, headers), path in ANTHROPIC)

    def _send_no_http(self, rng: random.Random, path: str) -> None:
        request = rng.choice(NO_HTTP) % path.encode()
        self._client.close()  # so that no earlier request is pending, and none follows
        reply = self._client.exchange(request)
        self._client.close()
        self._judge(reply, request, path in ANTHROPIC)
        # A wrong head is reported before the client is authenticated, a wrong body after that.
        assert reply.status in ((400, 401) if path.startswith("/admin/") else (400,)), request

    def _judge(self, reply: Reply, request: object, is_anthropics: bool = False) -> None:
        status, content_type, answer = reply
        self.statuses[status] += 1
        assert status < 500 and status != 429, (status, answer[:500], request)
        if status >= 400:
            error = json.loads(answer)["error"]
            # What is wrong with the framing is told before the path is known.
            if is_anthropics and set(error) == {"type", "message"}:
                return
            assert set(error) == {"message", "type", "param", "code"} and error["message"], (answer, request)
        elif content_type == "text/event-stream":
            last = answer.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
            is_ended = last == b"data: [DONE]" or last.startswith(
                (b"event: response.completed", b"event: response.inc", b"event: message_stop")
            )
            assert is_ended, (answer[-500:], request)


def fuzz(num_examples: int, strategy: st.SearchStrategy[Case], check: Callable[[Case, random.Random], None]) -> None:
    """Run `check` on the same examples every time, unless they are many."""
    phases = (Phase.generate, Phase.shrink)
    run = settings(
        max_examples=num_examples,
        derandomize=not IS_NIGHTLY,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )

    @run
    @given(case=strategy, seed=st.integers(0, 1 << 32))
    def one(case: Case, seed: int) -> None:
        check(case, random.Random(seed))

    one()


def test_no_body_costs_more_than_a_4xx_and_answers_are_as_documented(cluster: LocalCluster, unharmed: None) -> None:
    schema = schemathesis.openapi.from_url(f"{cluster.url}/openapi.json")
    operations = {operation.ok().path: operation.ok() for operation in schema.get_all_operations()}
    assert {*BODY_ROUTES, "/v1/models/{name}", "/admin/drain", "/demo/example", ENDLESS} <= set(operations)
    broken, answered, sent = Broken(cluster), Counter[str](), Counter[str]()
    with_body = (*BODY_ROUTES, "/admin/drain")
    with_input = (*with_body, "/v1/models/{name}", "/demo/example")
    send_odd_values(cluster, broken)
    num_left = max(0, NUM_BODIES - broken.statuses.total())
    per_strategy = num_left // (1 + BROKEN_FORMS) // (len(with_input) + len(with_body)) + 1

    with requests.Session() as session:
        session.trust_env = False
        session.headers["authorization"] = token_of(cluster)  # for /admin/drain

        def check(case: Case, rng: random.Random) -> None:
            path, body = case.operation.path, case.body
            is_valid = case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE
            if is_valid and path in BODY_ROUTES and sent[path] % 10 < 7:
                meant_well(rng, path, body)
            if path == "/admin/drain" and isinstance(body, dict) and body.get("instance") in ("P0", "D0"):
                body["instance"] = "P7"
            response = case.call(session=session, timeout=60)
            case.validate_response(response, checks=CHECKS)
            if path == "/admin/pause":  # or nothing would be answered any more
                assert session.post(f"{cluster.url}/admin/resume").status_code == 200
            assert response.status_code not in (429, 503), response.text
            sent[path] += 1
            if response.status_code == 200:
                answered[path] += 1
            for _ in range(BROKEN_FORMS):
                broken.send(rng, case.method, requests.utils.quote(case.formatted_path), as_json(body))

        for path, operation in operations.items():
            if path == ENDLESS:
                continue
            for mode in MODES if path in with_body else MODES[:1]:
                fuzz(per_strategy if path in with_input else 2, operation.as_strategy(generation_mode=mode), check)
    broken.close()
    print(f"sent {dict(sent)}, of these answered {dict(answered)}; broken: {dict(broken.statuses)}")
    for path in BODY_ROUTES:
        assert answered[path] > sent[path] // 10, f"{path}: too few got what they asked for"
    assert sum(sent.values()) + sum(broken.statuses.values()) >= NUM_BODIES


def send_odd_values(cluster: LocalCluster, broken: Broken) -> None:
    """Send every odd value in every served field of a body without other faults, so that it gets as far as it can; and
    in one refused field and one without effect, since these are all treated alike. The same field of a further route
    gets a third of them, by night all."""
    seen = Counter[object]()
    for path in BODY_ROUTES:
        served = {field.name: field for field in BODIES.fields[path].values() if field.effect == SERVED}
        for field in (*(name for name in served if "." not in name), "response_format", "metadata"):
            number = seen[served.get(field, field)]
            seen[served.get(field, field)] += 1
            for odd in ODD_JSON[number % 3 :: 3] if number and not IS_NIGHTLY else ODD_JSON:
                body: dict[str, Any] = {}
                meant_well(random.Random(0), path, body)
                if path == "/v1/completions":
                    body |= {"prompt": "a", "max_tokens": 1}
                broken.request("POST", path, with_value(body, field, odd), {"content-type": b"application/json"})


def as_json(body: Any) -> Any:
    """Return a case's body if it can be written as JSON; otherwise None."""
    try:
        json.dumps(body)
    except (TypeError, ValueError):
        return None
    return body
