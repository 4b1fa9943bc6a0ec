"""`chitu chat` against a real 1P1D that requires a key: in pipes, on a pseudo-terminal, and with a D that dies."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import httpx
import pytest
from nursery import FORKED, run_chitu
from support.router_process import wait_until

from chitu.config.cluster_key import with_api_keys
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.protocol.account import RequestSnapshot
from chitu.tools.make_model import make_model
from chitu.tools.trace import byte_text

pytestmark = pytest.mark.timeout(300)
KEY = "a-secret"
PAGE_SIZE = 16
CHITU = [sys.executable, "-m", "chitu.cli"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model with a long context: an answer takes long enough to be stopped."""
    return make_model(tmp_path_factory.mktemp("models") / "m", layers=2, max_position_embeddings=16384)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[LocalCluster]:
    settings = [f"model.path={model}", "model.served_name=m", "cache.num_pages=2000"]
    topology = with_api_keys(load_topology("pd_disagg_1p1d_local.yaml", settings), (KEY,))
    with LocalCluster(topology, entries=FORKED) as cluster:
        cluster.wait_ready()
        client = RouterClient(cluster.url, KEY)
        wait_until(lambda: all(i.load and i.load.pages_total for i in client.cluster().instances), 10, client.cluster)
        yield cluster


def environment(key: str) -> dict[str, str]:
    return {**os.environ, "CHITU_API_KEY": key, "TERM": "xterm", "COLUMNS": "200", "NO_COLOR": "1"}


def run_chat(url: str, *words: str, stdin: str = "", key: str = KEY) -> subprocess.CompletedProcess[str]:
    argv = [*CHITU, "chat", "--url", url, *words]
    return subprocess.run(
        argv, input=stdin, capture_output=True, text=True, timeout=60, check=False, env=environment(key)
    )


def answer_of(cluster: LocalCluster, question: str, max_tokens: int) -> str:
    """Return the API's own answer, without a stream."""
    body = {"model": "m", "max_tokens": max_tokens, "temperature": 0}
    body["messages"] = [{"role": "user", "content": question}]
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def newest_request(cluster: LocalCluster) -> RequestSnapshot | None:
    requests = RouterClient(cluster.url, KEY).cluster().requests
    return max(requests, key=lambda request: request.created_at_s, default=None)


def is_idle(cluster: LocalCluster) -> bool:
    """Return whether all instances report no work. Heartbeats lag the end of an answer by a second."""
    loads = [instance.load for instance in RouterClient(cluster.url, KEY).cluster().instances]
    return all(load and load.waiting + load.transferring + load.running == 0 for load in loads)


def take_ctrl_c() -> None:
    """Enable SIGINT in the child: a shell that runs tests in the background makes its children ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def take_terminal() -> None:
    """Attach the child to its terminal, so that Ctrl-C there becomes SIGINT."""
    take_ctrl_c()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Tty:
    """A process on its own terminal; its output is searched forward."""

    def __init__(self, argv: list[str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(KEY),
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(slave)
        self._unread = ""
        self.shown = ""

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt_prompt(self) -> None:
        """Send Ctrl-C once the process sleeps in its read: readline notices a signal only there, or at the next key."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", 20, stat.read_text)
        self.send("\x03")

    def wait(self, pattern: str, timeout_s: float = 30.0) -> re.Match[str]:
        end_s = time.monotonic() + timeout_s
        while (match := re.search(pattern, self._unread)) is None:
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"no {pattern!r} in {self.shown!r}"
            if select.select([self._master], [], [], left_s)[0]:
                text = os.read(self._master, 1 << 16).decode("utf-8", "replace")
                self._unread += text
                self.shown += text
        self._unread = self._unread[match.end() :]
        return match

    def __enter__(self) -> Tty:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


# --------------------------------------------------------------------------------------------------------------- pipes


@pytest.mark.parametrize("is_piped", [False, True])
def test_one_question_prints_the_answer_and_says_beside_it_what_became_of_it(
    cluster: LocalCluster, is_piped: bool
) -> None:
    question = "What is a page?" if is_piped else "What is a room?"
    options = ["--max-tokens", "12"]
    done = run_chat(cluster.url, *options, stdin=question) if is_piped else run_chat(cluster.url, question, *options)
    assert done.returncode == 0
    assert done.stdout == answer_of(cluster, question, 12) + "\n"

    served = next(r for r in RouterClient(cluster.url, KEY).cluster().requests if r.output_tokens == 12)
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"P0 -> D0 · {served.prompt_tokens} prompt + 12 output tokens · ")
    assert f" · {byte_text(served.kv_bytes)} KV moved · " in lines[0]
    assert re.fullmatch(
        r"admission .+ · queue .+ · compute .+ · transfer .+ · (confirm|first step) .+ · first token .+ · total .+",
        lines[1],
    )
    assert re.fullmatch(r"P0 up .+/2000 pages · D0 up .+/2000 pages", lines[2])
    assert len(lines) == 3


def test_what_the_router_refuses_is_one_sentence_and_exit_code_1(cluster: LocalCluster) -> None:
    for words, key, part in (
        (["x"], "wrong", "invalid_api_key: the API key is not one of this server's (CHITU_API_KEY"),
        (["x"], "", "an API key is required"),
        (["x", "--model", "nope"], KEY, "model_not_found"),
        (["x", "--max-tokens", "99999"], KEY, "context_length_exceeded"),
        (["x", "--temperature", "9"], KEY, "temperature: must be at most 2"),
        ([" "], KEY, "the question is empty"),
    ):
        done = run_chat(cluster.url, *words, key=key)
        assert (done.returncode, done.stdout) == (1, "")
        (complaint,) = [line for line in done.stderr.splitlines() if not line.startswith("P0 ")]
        assert complaint.startswith("chitu: ")
        assert part in complaint


def test_without_a_router_it_says_how_to_start_one() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but not listening
        done = run_chat(f"http://127.0.0.1:{unused.getsockname()[1]}", "x")
    assert done.returncode == 1
    assert "start one with `chitu serve`" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_leaves_ends_the_chat_and_its_request(cluster: LocalCluster) -> None:
    argv = [*CHITU, "chat", "--url", cluster.url, "Tell me"]
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(KEY)
    )
    assert process.stdout is not None and process.stderr is not None
    assert os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.wait(30) == 1
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    wait_until(
        lambda: (r := newest_request(cluster)) is not None and r.state == "cancelled",
        10,
        lambda: newest_request(cluster),
    )


def test_ctrl_c_on_one_question_keeps_what_came(cluster: LocalCluster) -> None:
    process = subprocess.Popen(
        [*CHITU, "chat", "--url", cluster.url, "Tell me"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(KEY),
        preexec_fn=take_ctrl_c,
    )
    assert process.stdout is not None
    begin = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (begin + out).endswith(b"\n")
    assert re.match(r"stopped\nP0 -> D0 · \d+ prompt \+ \d+ output tokens", err.decode())


# ------------------------------------------------------------------------------------------------------------ terminal


def test_ctrl_c_stops_the_answer_and_its_request_and_two_leave(cluster: LocalCluster) -> None:
    wait_until(lambda: is_idle(cluster), 10, RouterClient(cluster.url, KEY).cluster)
    with Tty([*CHITU, "chat", "--url", cluster.url]) as tty:
        tty.wait(r"m at http://127\.0\.0\.1:\d+; /help shows")
        tty.wait(r"P0 up idle")
        tty.wait("> ")
        tty.send("Tell me\n")
        # The terminal itself echoes the question; once the router sees output, the answer is on its way here.
        wait_until(
            lambda: (r := newest_request(cluster)) is not None and r.state == "decode",
            20,
            lambda: newest_request(cluster),
        )
        tty.send("\x03")
        tty.wait("stopped")
        tty.wait(r"P0 -> D0 · \d+ prompt \+ \d+ output tokens")
        tty.wait("> ")
        wait_until(
            lambda: (r := newest_request(cluster)) is not None and r.state == "cancelled",
            10,
            lambda: newest_request(cluster),
        )
        tty.interrupt_prompt()
        assert tty.process.wait(30) == 0, "the Ctrl-C at the prompt was the second one"

    with Tty([*CHITU, "chat", "--url", cluster.url]) as tty:
        tty.wait("> ")
        tty.send("half a quest")
        tty.wait("half a quest")
        tty.interrupt_prompt()
        tty.wait("Ctrl-C once more leaves")
        tty.wait("> ")
        tty.send("\x04")
        assert tty.process.wait(30) == 0


def test_a_conversation_goes_on_until_it_is_cleared(cluster: LocalCluster) -> None:
    def prompt_tokens(tty: Tty, cached: str = r"(\d+ cached · )?") -> int:
        line = rf"P0 -> D0 · (\d+) prompt \+ 6 output tokens · {cached}[\d.]+ [KM]iB KV moved"
        return int(tty.wait(line)[1])

    with Tty([*CHITU, "chat", "--url", cluster.url, "--max-tokens", "6"]) as tty:
        tty.wait("> ")
        tty.send("one two three\n")
        first = prompt_tokens(tty, cached="")
        tty.send("one two three\n")
        pages = first // PAGE_SIZE * PAGE_SIZE
        assert pages and prompt_tokens(tty, cached=f"{pages} cached · ") > 2 * first - 10
        tty.send("/clear\n")
        tty.wait("a new conversation")
        tty.send("one two three\n")
        assert prompt_tokens(tty) == first

        client = RouterClient(cluster.url, KEY)  # reports come twice per second
        wait_until(lambda: all(i.load and i.load.bytes_moved for i in client.cluster().instances), 10.0, client.cluster)
        tty.send("/cluster\n")
        tty.wait("up to 16384 tokens; pages of 16 tokens; transport shm; 0 requests running")
        tty.wait(r"P0 +up +127\.0\.0\.1 +(\d+) +0 +\d+ +0 +\d+/2000 +\d+ +[\d.]+ [KM]iB")
        tty.send("/nonsense\n")
        tty.wait("there is no command /nonsense")

        tty.send("/example 300\n")
        tty.wait(r"The [\w -]+ \w+ \w+ \d+\. .* \d+ more sentences .*\?")
        tty.wait(r"✗ expected: The .* \d+\.")  # the answer of a random model is wrong
        assert prompt_tokens(tty) > 300
        tty.send("/quit\n")
        assert tty.process.wait(30) == 0


# ------------------------------------------------------------------------------------------------------------ failures


def test_an_error_in_the_middle_keeps_what_came_of_the_answer(cluster: LocalCluster) -> None:
    argv = [*CHITU, "chat", "--url", cluster.url, "Tell me"]
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(KEY)
    )
    assert process.stdout is not None
    try:
        begin = os.read(process.stdout.fileno(), 64)
        assert begin
        cluster.kill("D0", signal.SIGKILL)
        out, err = process.communicate(timeout=30)
        text = (begin + out).decode()
        assert process.returncode == 1
        assert text.endswith("\n")
        assert "chitu: decode_lost: D0 is gone" in err.decode()
        assert re.search(r"D0 (down|up)", err.decode()), "the view has the loss up to 20 ms later"
    finally:
        process.kill()
        cluster.wait_exit("D0")
        cluster.restart("D0")
        cluster.wait_ready()
    whole = answer_of(cluster, "Tell me", 200)
    assert text.startswith(whole) or whole.startswith(text[:-1])


def test_the_first_completion_must_be_right_where_the_embedded_model_is_asked(model: Path) -> None:
    """A random model runs under the embedded model's name: the question is asked, the answer shown, and the smoke test
    fails."""
    argv = [*CHITU, "serve", "--model", str(model), "--port", "0", "--once", "model.served_name=chitu-tiny"]
    done = run_chitu([*argv, "cache.num_pages=2000"], environment(""), 240)
    assert done.returncode == 1
    assert re.search(r"^question: +The .* \d+ more sentences .*\?$", done.stdout, re.MULTILINE)
    assert re.search(r"^answer: +.", done.stdout, re.MULTILINE)
    assert re.search(r"^ +✗ expected: The .* \d+\.$", done.stdout, re.MULTILINE)
    assert re.search(r"^served by: +P0 -> D0 · \d+ prompt \+ 32 output tokens · .* KV moved", done.stdout, re.MULTILINE)
    assert re.search(
        r"^ +admission .+ · queue .+ · compute .+ · transfer .+ · (confirm|first step) .+ · first token .+ · total",
        done.stdout,
        re.MULTILINE,
    )
    (complaint,) = [line for line in done.stderr.splitlines() if line.startswith("chitu: ")]
    assert re.search(r"chitu-tiny answered .* where \d{4} is right", complaint)
