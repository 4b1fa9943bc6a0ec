"""`chitu doctor` as processes: planted faults of this machine, and nodes that find each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ports import free_ports

from chitu.config.load import load_topology
from chitu.launch.preflight import Bind
from chitu.tools.doctor import Lead, NotMet, follow, hold
from chitu.tools.make_model import make_model
from chitu.tools.node_facts import NodeFacts, gather

KEY = "dp_config.router.port"


def run_doctor(*words: str, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chitu.cli", "doctor", *words]
    return subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120)


def test_this_machine_is_judged_by_the_exit_code(tmp_path: Path) -> None:
    sound = run_doctor(f"{KEY}=0")
    assert sound.returncode == 0, sound.stdout
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        words = [f"{KEY}={taken}", "--model", str(tmp_path), "cache.num_pages=99999999999"]
        done = run_doctor(*words, path=str(tmp_path))
    assert done.returncode == 1
    for part in (f"cannot listen on 127.0.0.1:{taken}", "no C compiler", "has no config.json", "cure: "):
        assert part in done.stdout
    assert run_doctor("pd_disagg_1p1d_multi_node", "--hosts", "a,b").returncode == 2, "which of them is this?"


def test_a_tokenizer_that_the_router_refuses_is_an_error(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    (model / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    facts = gather(load_topology("unified_local", [f"model.path={model}"]), "127.0.0.1")
    assert facts.model.error.startswith(f"model.path: {model}/tokenizer.json is a Git LFS pointer")
    (model / "tokenizer.json").write_text('{"model": 3}')
    facts = gather(load_topology("unified_local", [f"model.path={model}"]), "127.0.0.1")
    assert facts.model.error.startswith(f"{model}/tokenizer.json cannot be read")


def test_nodes_meet_try_each_others_ports_and_end_with_one_code() -> None:
    open_port, closed_port = free_ports(2)
    codes: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        leader = listener.getsockname()
        facts = NodeFacts(host="b", binds=(Bind(KEY, "127.0.0.1", open_port), Bind(KEY, "127.0.0.1", closed_port)))
        held = hold(facts.binds[:1])
        thread = threading.Thread(target=lambda: codes.append(follow(leader, facts, 20.0)), daemon=True)
        thread.start()
        lead = Lead(listener, 20.0)
        # "localhost" and "b" both name this machine; only the first resolves.
        own = NodeFacts(host="localhost", binds=(Bind(KEY, "127.0.0.1", leader[1]),))
        nodes = {
            node.host: node for node in lead.gather(own, {"localhost": [leader[1]], "b": [open_port, closed_port]})
        }
        lead.dismiss(7)
        thread.join(20.0)
        for sock in held.values():
            sock.close()
    assert codes == [7]
    assert nodes["b"].unreachable == () and abs(nodes["b"].clock_ahead_s or 0.0) < 5.0
    assert len(nodes["localhost"].unreachable) == 2, "the name b leads nowhere"


def test_a_node_without_its_router_says_so_and_one_without_the_others_goes_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        alone = Lead(listener, 0.1).gather(NodeFacts(host="a"), {"a": [], "b": []})
        assert [node.host for node in alone] == ["a"]
    with pytest.raises(NotMet, match="does not reach the router's node"):
        follow(("127.0.0.1", *free_ports(1)), NodeFacts(host="b"), 0.0)


def test_strangers_at_the_meeting_are_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            alone = Lead(listener, 0.2).gather(NodeFacts(host="a"), {"a": [], "b": []})
        assert [node.host for node in alone] == ["a"]
