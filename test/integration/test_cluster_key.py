"""A whole cluster with a key: it serves, rejects peers without the key, and exposes the key nowhere."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from nursery import forked
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model

from chitu.assets import TINY_MODEL_DIR
from chitu.config.cluster_key import cluster_key_of, with_api_keys, with_cluster_key
from chitu.config.load import load_topology
from chitu.errors import ConfigError
from chitu.launch.local import LocalCluster
from chitu.launch.plan import Entries
from chitu.launch.router_calls import credential
from chitu.net.curve import ClusterSecrets, derive
from chitu.process.descendants import processes_marked
from chitu.process.run_dir import RunDir

KEY = "a-secret-that-must-stay-one-0123456789"
API_KEY, OTHER_API_KEY = "sk-of-a-user", "sk-of-another"
SECRETS = derive(KEY)
assert SECRETS is not None
ALL_SECRETS = [KEY, SECRETS.token, SECRETS.curve_secret.decode(), SECRETS.curve_public.decode()]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    overrides = [
        *(f"model.path={TINY_MODEL_DIR}", "model.served_name=m", "cache.num_pages=200", "log.level=DEBUG"),
        "dp_config.router.pd_disaggregation.transport=shm",
    ]
    topology = with_api_keys(load_topology(None, overrides), (API_KEY, OTHER_API_KEY))
    with LocalCluster(with_cluster_key(topology, KEY), entries=forked(Entries())) as cluster:
        cluster.wait_ready()
        yield cluster


def ask(cluster: LocalCluster, method: str, path: str, credential: str | None, **options: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {credential}"} if credential else {}
    with httpx.Client(trust_env=False, timeout=60) as client:
        return client.request(method, cluster.url + path, headers=headers, **options)  # type: ignore[arg-type]


def complete(cluster: LocalCluster) -> str:
    body = {"model": "m", "prompt": "1, 2, 3, 4,", "max_tokens": 8, "temperature": 0}
    answer = ask(cluster, "POST", "/v1/completions", API_KEY, json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_it_serves(cluster: LocalCluster) -> None:
    assert complete(cluster) == complete(cluster) != ""


def test_the_holders_of_two_api_keys_share_no_cached_pages(cluster: LocalCluster) -> None:
    body = {"model": "m", "prompt": list(range(100, 150)), "max_tokens": 1, "cache_salt": "a"}
    found = []
    for key in (API_KEY, API_KEY, OTHER_API_KEY, OTHER_API_KEY):
        answer = ask(cluster, "POST", "/v1/completions", key, json=body)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found == [0, 48, 0, 48]


def test_the_key_is_in_no_log_no_file_no_answer_and_no_command_line(cluster: LocalCluster) -> None:
    complete(cluster)
    seen = {path.name: path.read_bytes() for path in cluster.log_dir.iterdir() if path.is_file()}
    assert {"topology.yaml", "router.log", "P0.log", "D0.log", "router.progress"} <= seen.keys()
    for path in ("/cluster", "/health", "/metrics", "/openapi.json", "/v1/models", "/"):
        seen[path] = ask(cluster, "GET", path, API_KEY).content
    pids = [pid for member in cluster.members.values() if member.child for pid in processes_marked(member.child.mark)]
    assert len(pids) >= 5, "router, two torchruns, two schedulers"
    for pid in pids:
        seen[f"ps {pid}"] = " ".join(psutil.Process(pid).cmdline()).encode()
    for name, content in seen.items():
        for secret in ALL_SECRETS:
            assert secret.encode() not in content, name
    # It went where only this user can read.
    assert psutil.Process(cluster.pid("P0")).environ()["CHITU_CLUSTER_KEY"] == KEY
    assert (cluster.log_dir / "topology.yaml").stat().st_mode & 0o077 == 0


def test_every_zmq_port_speaks_curve_alone(cluster: LocalCluster) -> None:
    """The greeting of ZMTP 3 names the mechanism in clear text, at byte 12."""
    ports = {name: port for name, port in cluster.ports.items() if name not in ("port", "bootstrap_port")}
    for name in ("P0", "D0"):
        for connection in psutil.Process(cluster.pid(name)).net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                ports[f"{name}:{connection.laddr.port}"] = connection.laddr.port
    assert len(ports) == 4 + 2 * 2, "of the router, and a request and a control port of P and D each"
    hello = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    for name, port in ports.items():
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(hello)
            greeting = b""
            while len(greeting) < 64 and (data := connection.recv(64)):
                greeting += data
        assert greeting[12:32].rstrip(b"\0") == b"CURVE", name


def directory(port: int, secrets: ClusterSecrets | None) -> httpx.Response:
    headers = {"authorization": f"Bearer {secrets.token}"} if secrets is not None else {}
    return httpx.get(f"http://127.0.0.1:{port}/route", headers=headers, trust_env=False, timeout=60.0)


def test_the_bootstrap_directory_wants_the_token(cluster: LocalCluster) -> None:
    port = cluster.ports["bootstrap_port"]
    for secrets in (None, derive(KEY + "!")):
        assert directory(port, secrets).status_code == 401
    (entry,) = directory(port, SECRETS).json()
    assert entry["engine_rank"] == 0 and entry["rank_port"] > 0
    assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=60.0).status_code == 200


def test_an_operator_needs_the_token_and_has_it_from_the_environment(cluster: LocalCluster) -> None:
    for shown in (None, API_KEY, "wrong"):
        assert ask(cluster, "POST", "/admin/drain", shown, json={"instance": "P9"}).status_code == 401
    assert SECRETS is not None
    assert ask(cluster, "POST", "/admin/drain", SECRETS.token, json={"instance": "P9"}).status_code == 404
    for key, expected in (
        (KEY, "there is no instance 'P9'"),
        (KEY + "!", "the token is not that of this cluster's key"),
    ):
        environment = {**os.environ, "CHITU_CLUSTER_KEY": key}
        result = subprocess.run(
            [sys.executable, "-m", "chitu.cli", "drain", "P9", "--url", cluster.url],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 1
        assert expected in result.stderr


def test_only_loopback_is_listened_on(cluster: LocalCluster) -> None:
    """torchrun's own store, in the process above an instance, is the known exception (docs/security.md)."""
    for name in ("router", "P0", "D0"):
        process = psutil.Process(cluster.pid(name))
        for kind in ("tcp", "udp"):
            for connection in process.net_connections(kind=kind):
                if kind == "udp" or connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr.ip in ("127.0.0.1", "::1"), (name, connection)


@pytest.mark.parametrize(
    ("override", "cure"),
    [
        ("dp_config.router.pd_disaggregation.cluster_key=%s", "CHITU_CLUSTER_KEY"),
        (" dp_config.router.pd_disaggregation.cluster_key =%s", "CHITU_CLUSTER_KEY"),
        ("dp_config.router.pd_disaggregation={cluster_key: %s}", "CHITU_CLUSTER_KEY"),
        ("dp_config.router={pd_disaggregation: {cluster_key: %s}}", "CHITU_CLUSTER_KEY"),
        (r'dp_config={"router": {"pd_disaggregation": {"cluster\u005fkey": %s}}}', "CHITU_CLUSTER_KEY"),
        ("dp_config.router.api_keys=[%s]", "CHITU_API_KEYS"),
        ("dp_config.router.api_keys.0=%s", "CHITU_API_KEYS"),
        ("dp_config.router={api_keys: [%s]}", "CHITU_API_KEYS"),
    ],
)
def test_a_key_on_a_command_line_is_refused_and_not_repeated(override: str, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure) as refused:
        load_topology(None, [override % KEY])
    assert KEY not in refused.value.message


def test_a_key_of_the_file_is_no_reason_to_refuse_an_override(tmp_path: Path) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text(f"dp_config: {{router: {{api_keys: [{API_KEY}], pd_disaggregation: {{cluster_key: {KEY}}}}}}}")
    topology = load_topology(
        str(file), ["dp_config.router.max_in_flight=2", "dp_config.router.pd_disaggregation.deadlines={}"]
    )
    assert (cluster_key_of(topology), topology.dp_config.router.api_keys) == (KEY, (API_KEY,))


@pytest.mark.parametrize("command", [["chat"], ["drain", "P0"]])
def test_a_client_takes_no_key_from_its_command_line_either(command: list[str]) -> None:
    argv = [sys.executable, "-m", "chitu.cli", *command, "--api-key", API_KEY]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "CHITU_API_KEY" in result.stderr and API_KEY not in result.stderr


def test_a_cluster_of_one_launcher_makes_a_key_of_its_own(tmp_path: Path) -> None:
    """No key was given. Other users of the machine cannot use the ports; this user drains as before."""
    model = make_checksum_model(tmp_path / "m", EngineConfig())
    topology = load_topology(None, [f"model.path={model}", "model.served_name=m", "cache.num_pages=200"])
    with (
        LocalCluster(topology, entries=forked(ENTRIES)) as first,
        LocalCluster(topology, entries=forked(ENTRIES)) as other,
    ):
        key = cluster_key_of(first.topology)
        assert len(key) >= 32 and key != cluster_key_of(other.topology)
        first.wait_ready()
        assert directory(first.ports["bootstrap_port"], None).status_code == 401
        assert directory(first.ports["bootstrap_port"], derive(key)).json()
        body = {"model": "m", "prompt": "1, 2, 3, 4,", "max_tokens": 8, "temperature": 0}
        assert ask(first, "POST", "/v1/completions", None, json=body).status_code == 200
        assert ask(first, "POST", "/admin/drain", None, json={"instance": "D0"}).status_code == 401
        for path in first.log_dir.iterdir():
            assert key.encode() not in path.read_bytes(), path
        argv = [sys.executable, "-m", "chitu.cli", "drain", "D0", "--force", "--url", first.url]
        drained = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert drained.returncode == 0, drained.stderr
        first.wait_exit("D0", 60)
        assert first.members["D0"].has_left


@pytest.mark.parametrize("hosts", ["127.0.0.1", "localhost"])
def test_the_key_of_a_cluster_is_found_by_its_port_as_long_as_its_launcher_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("CHITU_CLUSTER_KEY", raising=False)
    monkeypatch.setenv("CHITU_API_KEY", "sk-user")
    folder = RunDir()
    folder.keep_key(21003, KEY)
    assert (folder.path.stat().st_mode & 0o777, (folder.path / "key-21003").stat().st_mode & 0o777) == (0o700, 0o600)
    assert SECRETS is not None
    assert credential(f"http://{hosts}:21003") == SECRETS.token
    assert credential(f"http://{hosts}:21004") == credential("http://10.0.0.1:21003") == "sk-user"
    second = RunDir()
    assert folder.path.exists() and credential(f"http://{hosts}:21003") == SECRETS.token
    os.close(folder._lock)  # as if its process had been killed
    assert credential(f"http://{hosts}:21003") == "sk-user"
    third = RunDir()
    assert not folder.path.exists() and second.path.exists()
    second.remove()
    third.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", ["environment", "file"])
def test_plan_does_not_show_the_key(tmp_path: Path, source: str) -> None:
    file = tmp_path / "topology.yaml"
    text = (
        "dp_config: {router: {pd_disaggregation: {cluster_key: %s}, prefill_schedulers: [{}], decode_schedulers: [{}]}}"
    )
    file.write_text(text % (KEY if source == "file" else "''"))
    environment = dict(os.environ)
    if source == "environment":
        environment["CHITU_CLUSTER_KEY"] = KEY
    argv = [sys.executable, "-m", "chitu.cli", "plan", str(file), f"model.path={TINY_MODEL_DIR}"]
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2 or "D0" in result.stdout
    assert "router on 127.0.0.1" in result.stdout
    assert KEY not in result.stdout + result.stderr


@pytest.mark.parametrize(("key", "reason"), [("fifteen letters", "16"), ("'123456'", "16"), ("123456789", "a text")])
def test_a_bad_key_in_a_file_is_refused_without_showing_it(tmp_path: Path, key: str, reason: str) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text(f"dp_config: {{router: {{pd_disaggregation: {{cluster_key: {key}}}}}}}")
    with pytest.raises(ConfigError, match="cluster_key") as refused:
        load_topology(str(file))
    assert reason in refused.value.message
    assert key.strip("'") not in refused.value.message
