"""Helper processes for large bodies and grammars: they return what the loop would return, and a fault of theirs affects
one request only."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from nursery import forked_router
from support.router_process import RouterUnderTest, wait_until
from test_body_costs import costly_bodies

from chitu.assets import TINY_MODEL_DIR
from chitu.config.cluster_key import SECRETS
from chitu.config.schema import ModelConfig
from chitu.errors import ChituError, InvalidRequest
from chitu.http.ask.bodies import LARGE_BODY_BYTES
from chitu.http.ask.parsed import ClusterFacts, ParsedRequest
from chitu.http.ask.reader import GRAMMAR_S, BodyTask, BodyWork, JudgeGrammar, ReadBody
from chitu.http.ask.served_model import ModelLimits, ServedModel
from chitu.http.table import BODIES, READERS
from chitu.protocol import Grammar
from chitu.serve.body_pool import BodyProcesses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MODEL = ModelConfig(path=str(TINY_MODEL_DIR), served_name="m")
TERMS = ClusterFacts(ModelLimits(4096, 100_000), "", 100_000)
ROUTES: dict[str, str] = {
    "completion": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
LEAST: dict[str, dict[str, Any]] = {
    "completion": {"prompt": ["a b", "\u00fc \u4f60"], "echo": True, "seed": 1},
    "chat": {"messages": [{"role": "user", "content": "a"}], "seed": 1},
    "responses": {"input": "a", "instructions": "b"},
    "tokenize": {"prompt": "a b"},
    "detokenize": {"tokens": [20, 300]},
}
ODD: list[Any] = [None, True, 0, -1, 3, 0.5, "", "x", "\ud800", [], ["x"], [5], {}, {"type": "object"}, {"5": 1}]
HOSTILE = {
    "type": "object",
    "properties": {f"p{i}": {"type": "integer", "multipleOf": 99991 - 2 * i} for i in range(10)},
}
"""Schema that takes half a minute to compile for each ten of its properties."""


def corpus(share: int) -> Iterator[tuple[str, bytes]]:
    """Yield a body of every route with every field known there, of every type, or of one in `share` types, others in
    the next field; and costly bodies."""
    for route, path in ROUTES.items():
        yield route, b"{"
        for at, name in enumerate([*BODIES.fields[path], "xyz"]):
            for value in ODD[at % share :: share]:
                yield route, json.dumps({**LEAST[route], name: value}).encode()
    for _, path, body in costly_bodies():
        yield next(route for route in ROUTES if ROUTES[route] == path), body


def shown(found: object) -> str:
    """Return a full description of a result, except for drawn seeds."""
    if isinstance(found, InvalidRequest):
        return f"{type(found).__name__} {found.message!r} {found.param}"
    if isinstance(found, ParsedRequest):
        samplings = [msgspec.structs.replace(s, seed=s.seed & 1) for s in found.samplings]
        found = msgspec.structs.replace(found, samplings=samplings)
        found = re.sub(r"seed=\d+", "seed", repr(found))
    return repr(found)


def test_a_process_knows_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads what strangers send, images among that."""
    for name in (*SECRETS.values(), "CHITU_API_KEY"):
        monkeypatch.setenv(name, "a secret that is long enough")

    async def environment() -> bytes:
        processes = BodyProcesses(MODEL, False)
        try:
            await processes.do(ReadBody("tokenize", TERMS), b'{"prompt": "a"}')
            (pid,) = processes.pids
            return Path(f"/proc/{pid}/environ").read_bytes()
        finally:
            processes.close()

    assert b"a secret" not in asyncio.run(environment())


@pytest.mark.parametrize("share", [5, pytest.param(1, marks=pytest.mark.by_hand)])
def test_a_process_says_of_every_body_what_the_loop_says(share: int) -> None:
    """Both run the same code, so a fifth of the bodies shows what a process changes on the way."""
    work = BodyWork(ServedModel.load(MODEL, 0), False, READERS)
    grammars = [Grammar("regex", text) for text in ("a+", "((", "(" * 1000)]

    def here(task: BodyTask, raw: bytes) -> object:
        try:
            return work.judge(task) if isinstance(task, JudgeGrammar) else work.read(task, raw, lambda: None)
        except ChituError as error:
            return error

    async def scenario() -> int:
        processes = BodyProcesses(MODEL, False)
        tasks: list[tuple[BodyTask, bytes]] = [(ReadBody(route, TERMS), raw) for route, raw in corpus(share)]
        tasks += [
            (
                ReadBody("chat", ClusterFacts(None, "nobody is there", 5)),
                b'{"messages":[{"role":"user","content":"a"}]}',
            )
        ]
        tasks += [(JudgeGrammar(grammar, 100_000), b"") for grammar in grammars]
        kinds = set()
        for task, raw in tasks:
            found: object
            try:
                found = await processes.do(task, raw)
            except ChituError as error:
                found = error
            assert shown(found) == shown(here(task, raw)), (task, raw[:500])
            kinds.add(type(found).__name__)
        assert len(processes.pids) == 1, "none was lost, and one suffices one client"
        processes.close()
        assert {"ParsedRequest", "TokensAnswer", "InvalidRequest", "NoInstance", "NoneType"} <= kinds
        return len(tasks)

    assert asyncio.run(scenario()) > 2000 // share


class World:
    """A router and a fake P and D."""

    def __init__(self, router: RouterUnderTest) -> None:
        self.router = router
        self._threads = ThreadPoolExecutor(8)

    def helpers(self) -> list[psutil.Process]:
        return [child for child in psutil.Process(self.router.pid).children() if is_helper(child)]

    def ask(self, body: dict[str, Any] | bytes) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.router.ports["port"], timeout=170)
        connection.request("POST", "/v1/completions", body if isinstance(body, bytes) else json.dumps(body))
        response = connection.getresponse()
        answer = response.status, json.loads(response.read())
        connection.close()
        return answer

    def begin(self, body: dict[str, Any]) -> Future[tuple[int, dict[str, Any]]]:
        return self._threads.submit(self.ask, body)

    def helper(self) -> psutil.Process:
        """Return the only helper, started if there is none."""
        assert self.ask(large("a"))[0] == 200
        [helper] = self.helpers()
        return helper


def is_helper(process: psutil.Process) -> bool:
    try:
        return "chitu.serve.body_pool" in process.cmdline()
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return False


def large(word: str) -> dict[str, Any]:
    return {"prompt": f"{word} " * LARGE_BODY_BYTES, "max_tokens": 1}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    overrides = ("model.served_name=m",)
    with forked_router(tmp_path_factory.mktemp("router"), TINY_MODEL_DIR, overrides) as router:
        router.start_worker("P0,D0", "--max-model-len", "131072", "--vocab-size", "100000", "--step-s", "0.002")
        yield World(router)


def state(process: psutil.Process) -> str:
    return process.status() if process.is_running() else "gone"


def test_tokens_flow_while_a_body_is_stuck_and_its_process_may_be_killed_once(world: World) -> None:
    helper = world.helper()
    stream = http.client.HTTPConnection("127.0.0.1", world.router.ports["port"], timeout=60)
    stream.request("POST", "/v1/completions", json.dumps({"prompt": "b", "max_tokens": 100_000, "stream": True}))
    events = stream.getresponse()

    def next_events(count: int) -> None:
        for _ in range(count):
            while not events.readline().startswith(b"data: {"):
                pass

    next_events(1)
    helper.send_signal(signal.SIGSTOP)
    wait_until(lambda: state(helper) == psutil.STATUS_STOPPED, 30, "the process to stop")
    stuck = world.begin(large("c"))
    next_events(100)
    assert world.ask({"prompt": "small", "max_tokens": 1})[0] == 200
    assert not stuck.done()
    helper.kill()
    status, answer = stuck.result(60)
    assert status == 200 and answer["usage"]["prompt_tokens"] > LARGE_BODY_BYTES, answer
    assert [other.pid for other in world.helpers()] != [helper.pid]
    next_events(1)
    stream.close()


def test_a_body_under_which_two_processes_die_gets_an_error_and_the_next_one_an_answer(world: World) -> None:
    for _ in range(2):
        world.helper().send_signal(signal.SIGSTOP)
        poisonous = world.begin(large("d"))
        killed: set[int] = set()
        while not poisonous.done() and len(killed) < 2:
            for helper in world.helpers():
                if helper.pid not in killed:
                    os.kill(helper.pid, signal.SIGKILL)
                    killed.add(helper.pid)
        status, answer = poisonous.result(60)
        assert (status, answer["error"]["code"]) == (500, "poison_request"), answer
        assert "killed by SIGKILL" in answer["error"]["message"]
        assert world.ask(large("e"))[0] == 200


def test_a_client_that_leaves_takes_its_body_along_and_the_next_one_has_its_turn(world: World) -> None:
    helper = world.helper()
    helper.send_signal(signal.SIGSTOP)
    body = json.dumps(large("f")).encode()
    leaving = http.client.HTTPConnection("127.0.0.1", world.router.ports["port"], timeout=60)
    leaving.request("POST", "/v1/completions", body)
    staying = world.begin(large("g"))
    leaving.close()
    assert not staying.done()
    helper.send_signal(signal.SIGCONT)
    assert staying.result(60)[0] == 200
    assert [other.pid for other in world.helpers()] == [helper.pid]


def test_a_grammar_that_compiles_for_minutes_costs_its_client_an_error_and_nobody_else_anything(world: World) -> None:
    hostile = {"prompt": "a", "max_tokens": 1, "guided_json": HOSTILE}
    refused = [world.begin(hostile) for _ in range(3)]
    assert world.ask(large("h"))[0] == 200, "bodies do not wait for grammars"
    assert not any(future.done() for future in refused)
    for future in refused:
        status, answer = future.result(170)
        assert status == 400 and answer["error"]["param"] == "guided_json", answer
        assert f"more than {GRAMMAR_S:g} s of processor time" in answer["error"]["message"]
    assert world.ask(hostile)[0] == 400
    assert world.router.log.count("killed by SIGPROF") == 1, "the verdict is kept"
    assert world.ask({"prompt": "a", "max_tokens": 1, "guided_regex": "a+"})[0] == 200


def test_a_router_that_ends_refuses_a_body_that_it_has_not_read(tmp_path: Path) -> None:
    settings = ("model.served_name=m", "dp_config.router.pd_disaggregation.deadlines.drain_s=20")
    with forked_router(tmp_path, TINY_MODEL_DIR, settings) as router:
        router.start_worker("P0,D0", "--max-model-len", "131072", "--vocab-size", "100000", "--step-s", "0.02")
        world = World(router)
        helper = world.helper()
        helper.suspend()
        wait_until(lambda: state(helper) == psutil.STATUS_STOPPED, 30, "the process to stop")
        running = world.begin({"prompt": "b", "max_tokens": 100})
        stuck = world.begin(large("c"))
        assert world.ask({"prompt": "small", "max_tokens": 1})[0] == 200
        router.signal(signal.SIGTERM)
        wait_until(lambda: "draining: 1 requests run" in router.log, 30, "the router to end")
        helper.resume()
        status, answer = stuck.result(60)
        assert (status, answer["error"]["message"]) == (503, "the server is shutting down"), answer
        assert running.result(60)[0] == 200


def test_a_router_that_is_killed_leaves_no_process_not_even_one_that_is_stopped(tmp_path: Path) -> None:
    with forked_router(tmp_path, TINY_MODEL_DIR, ("model.served_name=m",)) as router:
        router.start_worker("P0,D0", "--max-model-len", "131072", "--vocab-size", "100000")
        helper = World(router).helper()
        helper.suspend()  # it no longer notices that its connection ends, and uses no processor time
        wait_until(lambda: state(helper) == psutil.STATUS_STOPPED, 30, "the process to stop")
        try:
            router.signal(signal.SIGKILL)
            psutil.wait_procs([helper], 20)
            assert not helper.is_running()
        finally:
            if helper.is_running():
                helper.kill()
