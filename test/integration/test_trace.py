"""Trace records of real clusters: every field is present and right, over both sides of a transfer, a killed D and a
wrong byte; and the output of `chitu trace`."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from nursery import forked, forked_router
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from support.faults import ENVIRONMENT
from support.router_process import wait_until

from chitu.assets import TINY_MODEL_DIR
from chitu.config.load import load_topology
from chitu.errors import UnknownTrace
from chitu.fake.checksum import NUM_LAYERS, checksum_layout
from chitu.fake.executor import RECORD_BYTES
from chitu.kv_cache.aux_row import aux_row_bytes
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.protocol.trace import (
    TraceArrival,
    TracedSums,
    TraceEnd,
    TraceFrame,
    TraceRequest,
    TraceRestored,
    TraceSend,
    TraceSent,
    TraceStep,
    TraceWrite,
)
from chitu.tools.trace import is_whole
from chitu.tracing.timeline import TraceAnswer

ROUTER = "dp_config.router"
PAGE_SIZE, PROMPT, TOKENS = 16, list(range(20, 60)), 12
NUM_PAGES = 3
"""Full pages of that prompt. Its tokens fill another page, which begins within the 9th of them."""
VOCAB_SIZE = 1280


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace")


def started(folder: Path, *settings: str, step_s: float = 0.0, faults: dict[str, int] | None = None) -> LocalCluster:
    holds = folder / "holds"
    holds.mkdir(parents=True, exist_ok=True)
    model = make_checksum_model(folder / "model", EngineConfig(step_s, holds=str(holds)))
    topology = load_topology(
        "pd_disagg_1p1d_local.yaml",
        [
            *(f"model.path={model}", "model.served_name=m", "model.max_model_len=1024", "cache.num_pages=400"),
            *(f"{ROUTER}.decode_schedulers=[{{}}, {{}}]", f"{ROUTER}.pd_disaggregation.transport=shm"),
            f"trace.dir={folder / 'records'}",
            *settings,
        ],
    )
    env = {ENVIRONMENT: json.dumps(faults or {})}
    return LocalCluster(topology, entries=forked(ENTRIES), log_dir=str(folder / "logs"), restart=False, env=env)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[LocalCluster]:
    with started(folder, step_s=0.002) as running:
        running.wait_ready(60)
        yield running


def ask(cluster: LocalCluster, name: str, trace: str | None = "1", **fields: Any) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    if trace is not None:
        headers["X-Chitu-Trace"] = trace
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    data = json.dumps({**body, "return_proof": True, **fields}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{cluster.url}/v1/completions", data, headers)) as reply:
        return dict(json.loads(reply.read()))


def traced(cluster: LocalCluster, name: str) -> TraceAnswer:
    """Return the trace once both sides have reported its end."""
    client, found = RouterClient(cluster.url), list[TraceAnswer]()

    def is_there() -> bool:
        try:
            found[:] = [client.trace(name)]
        except UnknownTrace:
            return False
        return is_whole(found[0].records)

    wait_until(is_there, 20, lambda: f"{found}")
    return found[0]


def of(answer: TraceAnswer, kind: type[Any], instance: str = "") -> list[Any]:
    return [each for each in answer.records if isinstance(each, kind) and each.instance.startswith(instance)]


def one(answer: TraceAnswer, kind: type[Any], instance: str = "") -> Any:
    (found,) = of(answer, kind, instance)
    return found


def test_every_field_is_there_and_right(cluster: LocalCluster) -> None:
    answer = ask(cluster, "fields", prompt=[7, *PROMPT[1:]])
    proof, ids = answer["chitu"], answer["choices"][0]["token_ids"]
    found = traced(cluster, "fields")
    (attempt,) = one(found, TraceRequest).choices[0]
    assert (attempt.state, attempt.decode, attempt.output_tokens) == ("finished", proof["decode"][0], TOKENS)
    layout, row_bytes = checksum_layout(PAGE_SIZE, VOCAB_SIZE), aux_row_bytes(VOCAB_SIZE)
    page_bytes = 2 * PAGE_SIZE * RECORD_BYTES

    send, sent, restored = one(found, TraceSend, "P"), one(found, TraceSent, "P"), one(found, TraceRestored, "D")
    for record in (send, restored):
        assert record.prompt_tokens == len(PROMPT) and record.cached_tokens == 0 and record.slot >= 0
        assert (record.pages.count, record.pages.dtype) == (NUM_PAGES, "int32")
        assert (record.pages.lowest, record.pages.highest) == (min(record.pages.numbers), max(record.pages.numbers))
        assert record.layout.dtype == layout.dtype and record.layout.num_layers == NUM_LAYERS
        assert (record.layout.page_size, record.layout.tp_size) == (PAGE_SIZE, 1)
        assert record.bytes_by_layer == (NUM_PAGES * page_bytes,) * NUM_LAYERS
        assert record.total_bytes == NUM_PAGES * page_bytes * NUM_LAYERS + row_bytes == proof["kv_bytes"]
    assert send.token_range == (0, len(PROMPT)) and restored.aux_slot >= 0
    assert send.peer_pages == restored.pages, "P names the pages that D has reserved"
    assert sent.total_bytes == send.total_bytes and sent.hashes == restored.hashes
    assert sent.hashes.positions == tuple(range(NUM_PAGES)) and len(set(sent.hashes.sums)) == NUM_PAGES

    writes = of(found, TraceWrite, "P")
    assert sum(write.total_bytes for write in writes) == send.total_bytes
    assert {write.what for write in writes} == {"kv", "logits"}
    for write in writes:
        assert (write.transport, write.device, write.error) == ("shm", "cpu", "") and 0 < write.latency_s < 10
        assert (
            write.num_buffers * write.buffer_bytes[1] >= write.total_bytes >= write.num_buffers * write.buffer_bytes[0]
        )
    assert sum(w.layers[1] - w.layers[0] for w in writes) >= NUM_LAYERS

    steps = of(found, TraceStep, "D")
    assert [step.next_token for step in steps] == ids and [step.index for step in steps] == list(range(TOKENS))
    assert [step.last_token for step in steps] == [PROMPT[-1], *ids[:-1]]
    new_pages = [page for step in steps for page in step.new_pages]
    assert len(new_pages) == 1 and new_pages[0] not in restored.pages.numbers
    assert [step.ended for step in steps] == [""] * (TOKENS - 1) + ["length"]
    assert {(end.instance[0], end.reason) for end in of(found, TraceEnd)} == {("P", "sent"), ("D", "length")}
    assert {arrival.prompt_head for arrival in of(found, TraceArrival)} == {(7, *PROMPT[1:16])}

    line = found.timeline
    assert proof["total_s"] - 0.001 <= line.total_s <= proof["total_s"] + 1 and not line.notes
    assert [check.is_same for check in line.pages] == [True] * NUM_PAGES
    assert [check.decode_page for check in line.pages] == list(restored.pages.numbers)
    whole = {(span.where[0], span.what) for span in line.spans}
    assert {("P", "queue"), ("P", "compute"), ("P", "writes to D"), ("D", "KV comes"), ("D", "tokens")} <= whole
    assert all(-0.001 <= span.start_s <= span.end_s <= line.total_s + 0.05 for span in line.spans), line.spans


def test_pages_that_are_here_already_and_choices_of_one_prompt(cluster: LocalCluster) -> None:
    """The second time D has the full pages: by record and formula only the last one moves."""
    for name in ("first", "second"):
        ask(cluster, name, prompt=[8, *PROMPT[1:]], n=3)
    found = traced(cluster, "first")
    assert len(one(found, TraceRequest).choices) == 3
    by_choice = {step.request_id for step in of(found, TraceStep)}
    assert by_choice == {"first-0", "first-1", "first-2"}, "each choice is told apart"
    assert len(of(found, TraceStep)) == 3 * TOKENS and len(of(found, TraceSend)) == 1
    again = one(traced(cluster, "second"), TraceSend)
    assert again.cached_tokens == 32
    names = {record.request_id for record in found.records}
    assert names <= {"first", "first-0", "first-1", "first-2"}, "no other request's"


def test_frames_are_read_by_another_implementation(cluster: LocalCluster, folder: Path) -> None:
    ask(cluster, "framed", trace="frames")
    found = traced(cluster, "framed")
    seen = {(f.instance[0], f.direction, f.port, _kind(f)) for f in of(found, TraceFrame)}
    assert {
        ("r", "sent", "request", "prefill_request"),
        ("r", "sent", "request", "decode_request"),
        ("P", "received", "request", "prefill_request"),
        ("D", "received", "request", "decode_request"),
        ("D", "sent", "control", "transfer_info"),
        ("P", "sent", "control", "aux_ready"),
        ("P", "sent", "control", "transfer_status"),
        ("D", "received", "control", "transfer_status"),
        ("r", "received", "token", "token_batch"),
    } <= seen
    info = next(f for f in of(found, TraceFrame, "D") if _kind(f) == "transfer_info")
    pages = msgpack.unpackb(info.data)["dst_kv_indices"]
    numbers = tuple(int.from_bytes(pages[i : i + 4], "little") for i in range(0, len(pages), 4))
    assert numbers == one(found, TraceRestored).pages.numbers
    for source in (["--url", cluster.url], ["--dir", str(folder / "records")]):
        text = command("framed", "--frames", *source)
        assert "the same on both sides" in text and "type: 'transfer_info'" in text and "writes to D" in text
    listed = json.loads(command("framed", "--url", cluster.url, "--json"))
    assert base64.b64decode(next(r["data"] for r in listed["records"] if r["kind"] == "frame"))


def _kind(frame: TraceFrame) -> str:
    value = msgpack.unpackb(frame.data, strict_map_key=False)
    return str(value["type"] if isinstance(value, dict) else value[0])


def command(*arguments: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "chitu.cli", "trace", *arguments], capture_output=True, text=True)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout + done.stderr


def test_what_is_not_traced_and_what_cannot_be_asked(cluster: LocalCluster, folder: Path) -> None:
    ask(cluster, "untraced", trace=None)
    ask(cluster, "refused", trace="0")
    ask(cluster, "traced")
    traced(cluster, "traced")
    for name in ("untraced", "refused", "trace", "traced-1"):
        with pytest.raises(UnknownTrace, match=name):
            RouterClient(cluster.url).trace(name)
    with pytest.raises(urllib.error.HTTPError) as refusal:
        ask(cluster, "bad", trace="yes")
    assert refusal.value.code == 400 and json.loads(refusal.value.read())["error"]["param"] == "X-Chitu-Trace"
    assert "unknown_trace" in command("nobody", "--dir", str(folder / "records"), code=1)
    for path in (folder / "records", *(folder / "records").iterdir()):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, f"others may look into {path}"


def test_a_web_page_gets_no_records(cluster: LocalCluster) -> None:
    ask(cluster, "private")
    request = urllib.request.Request(f"{cluster.url}/trace/private", headers={"Origin": "http://evil.example"})
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request)
    assert refusal.value.code == 403


def test_a_wrong_byte_and_a_killed_decode_instance_are_in_the_time_line(tmp_path: Path) -> None:
    with started(tmp_path, "trace.sample=1.0", step_s=0.05, faults={"flip_byte_every": 1}) as cluster:
        cluster.wait_ready(60)
        ask(cluster, "flipped", max_tokens=2)
        found = traced(cluster, "flipped")
        wrong = [check.position for check in found.timeline.pages if not check.is_same]
        theirs, mine = one(found, TraceSent).hashes, one(found, TraceRestored).hashes
        assert isinstance(theirs, TracedSums) and isinstance(mine, TracedSums)
        assert wrong and wrong == [p for p, (a, b) in enumerate(zip(theirs.sums, mine.sums, strict=True)) if a != b]
        assert "differ" in command("flipped", "--url", cluster.url, code=1)

        answers: list[dict[str, Any]] = []
        asking = threading.Thread(target=lambda: answers.append(ask(cluster, "killed", None, max_tokens=40)))
        asking.start()
        client = RouterClient(cluster.url)

        def decoding() -> str | None:
            """Return the D that decodes, once its records with tokens have reached the router."""
            try:
                steps = of(client.trace("killed"), TraceStep)
            except UnknownTrace:
                return None
            return steps[0].instance if len(steps) >= 3 else None

        wait_until(lambda: decoding() is not None, 20, lambda: f"{answers}")
        victim = decoding()
        assert victim is not None
        assert "it still runs" in client.trace("killed").timeline.title
        cluster.kill(victim, signal.SIGKILL)
        asking.join(60)
        found = traced(cluster, "killed")
        first, second = one(found, TraceRequest).choices[0]
        assert (first.state, first.decode, second.state) == ("retried", victim, "finished")
        assert second.decode != victim
        tokens = answers[0]["choices"][0]["token_ids"]
        of_victim = [s.next_token for s in of(found, TraceStep, victim)]
        of_other = [s.next_token for s in of(found, TraceStep, second.decode)]
        assert tokens[: len(of_victim)][:3] == of_victim[:3] and tokens[-len(of_other) :] == of_other
        assert one(found, TraceArrival, second.decode).continued_tokens == second.continued_tokens == 40 - len(of_other)
        spans = found.timeline.spans
        assert [s.what for s in spans if s.where == victim][-1] == "no record of its end"
        starts = {s.where: s.start_s for s in reversed(spans)}
        assert starts[victim] < starts[second.decode], "in the order in which they ran"
        text = command("killed", "--dir", str(tmp_path / "records"), code=1)  # because of the flips
        assert "attempt 1" in text and "attempt 2" in text and first.error in text


@contextlib.contextmanager
def hanging_file_system(folder: Path) -> Iterator[None]:
    """Mount a FUSE file system that answers no call, as NFS without its server."""
    libc, name = ctypes.CDLL(None, use_errno=True), os.fsencode(folder)
    try:
        connection = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"no FUSE here: {error}")
    try:
        options = f"fd={connection},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
        if libc.mount(b"test", name, b"fuse", 0, options):
            pytest.skip(f"this process may not mount: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            libc.umount2(name, 2)  # MNT_DETACH
    finally:
        os.close(connection)  # ends all calls with ENOTCONN


def test_a_router_ends_while_the_file_system_of_its_traces_hangs(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    with (
        forked_router(tmp_path, TINY_MODEL_DIR, (f"trace.dir={traces}",)) as router,
        hanging_file_system(traces),
        socket.create_connection(("127.0.0.1", router.ports["port"])) as client,
    ):
        client.sendall(b"GET /trace/some HTTP/1.1\r\nHost: router\r\n\r\n")
        threads = Path(f"/proc/{router.process.pid}/task")
        wait_until(lambda: any("fuse" in text_of(each / "wchan") for each in threads.iterdir()), 30, "a hanging thread")
        assert router.stop() == 0


def text_of(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # of a thread that has ended
        return ""
