"""The command line: its arguments and its output."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.clock import FakeClock

from chitu.assets import TINY_MODEL_DIR
from chitu.cli import main
from chitu.cli.unknown_options import INSTANCES, KEYS
from chitu.config.key_paths import known_keys
from chitu.config.schema import ModelConfig, RouterConfig
from chitu.errors import Unauthorized
from chitu.http.wire.access import Access
from chitu.launch.display import SIGNALS, PlainDisplay, RichDisplay, greeting, make_display, stop_on_signals
from chitu.net.curve import derive
from chitu.process.run_dir import RunDir

ROOT = Path(__file__).parents[2]


def test_plan_prints_every_process_and_the_ports(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copytree(TINY_MODEL_DIR, tmp_path, dirs_exist_ok=True)
    words = ["plan", "pd_disagg_1p1d_local", "scheduler.chunk_size=64", "--model", str(tmp_path), "cache.page_size=8"]
    assert main(words) == 0
    out = capsys.readouterr().out
    for part in ("router on 127.0.0.1", "P0 on", "D0 on", "--role decode --rank 0", "21003  dp_config.router.port"):
        assert part in out
    # Overrides count before and after an option, and go to every process.
    assert out.count("scheduler.chunk_size=64 cache.page_size=8") == 3
    assert out.count(f"model.path={tmp_path}") == 3


def test_plan_of_a_topology_with_placeholders_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "pd_disagg_2p3d_multi_node"]) == 2
    printed = capsys.readouterr()
    assert "D2 on node-a.example" in printed.out
    assert printed.err.count("\n") == 1 and "node-a.example, node-b.example are still placeholders" in printed.err
    assert main(["plan", "pd_disagg_2p3d_multi_node", "--hosts", "10.0.0.1,10.0.0.2"]) == 0
    assert main(["plan", "pd_disagg_2p3d_multi_node", "--hosts", "10.0.0.1,b.invalid"]) == 2
    assert "the name b.invalid has no address here" in capsys.readouterr().err


def test_a_model_path_is_taken_as_text_whatever_yaml_makes_of_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    odd = tmp_path / "a: [b] #c"
    odd.mkdir()
    shutil.copytree(TINY_MODEL_DIR, odd, dirs_exist_ok=True)
    assert main(["plan", "--model", str(odd)]) == 0
    assert "#c" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["plan", "a.yaml", "b.yaml"], 2, "one topology at a time"),
        (["plan", "dp_config.router.prot=1"], 2, "did you mean 'dp_config.router.port'?"),
        (["serve", "--model", "/nowhere/at/all"], 2, "there is no such folder"),
        (["make-model", "/tmp/never-made", "--family", "nope"], 2, "nope"),
        (["make-model", "/proc/never"], 1, "No such file or directory"),
        (["plan", "--model", ""], 2, "--model is empty"),
        (["plan", "--model", "~nobody-has-this-name/m"], 2, "there is no such folder"),
        (["plan", "model.path=~nobody-has-this-name/m"], 2, "there is no such folder"),
        (["plan", "--model", "\udcff"], 2, "use UTF-8"),
        (["serve", "--port", "0", "--log-dir", "/proc/never"], 2, "give another with --log-dir"),
        (["join", "decode", "--url", "http://a..b:1"], 1, "http://a..b:1 broke"),
        (["join", "decode", "--url", "http://[::1"], 2, "is no URL"),
    ],
)
def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str], words: list[str], code: int, part: str) -> None:
    assert main(words) == code
    printed = [line for line in capsys.readouterr().err.strip().splitlines() if line.startswith("chitu")]
    assert len(printed) == 1
    assert part in printed[0]


TP = "dp_config.router.{}_schedulers.0.tp_size=2"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["serve", "--tensor-parallel-size", "2"], f"{TP.format('prefill')} {TP.format('decode')}"),
        (["node", "--node-index", "0", "-tp", "2"], f"{TP.format('prefill')} {TP.format('decode')}"),
        (["serve", "--max-model-len=4096", "--once"], "the topology has it: model.max_model_len=4096"),
        (["plan", "--chunksize", "64"], "the topology has it: scheduler.chunk_size=64"),
        (["join", "decode", "--disable-radix-cache"], "the topology has it: cache.prefix_cache=off"),
        (["doctor", "--served-model-name", "m"], "the topology has it: model.served_name=m"),
        (["serve", "--model-path", "/m"], "did you mean --model?"),
        (["serve", "--prot", "0"], "did you mean --port?"),
        (["chat", "--tmperature", "0"], "did you mean --temperature?"),
        (["drain", "D0", "--tensor-parallel-size", "2"], "unrecognized arguments: --tensor-parallel-size 2"),
        (["serve", "--pipeline-parallel-size", "2"], "a key of the topology is given as a.b=c"),
        (["serve", "--api-key", "secret"], "as CHITU_API_KEYS"),
        (["drain", "D0", "--api-key", "secret"], "as CHITU_API_KEY"),
        (["verify", "--url", "http://a:1", "http://b:1"], "not allowed with argument"),
    ],
)
def test_an_unknown_option_is_explained_under_the_usage_of_its_own_command(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and printed.startswith(f"usage: chitu {words[0]} ")
    assert printed.strip().endswith(says) or says in printed.splitlines()[-1]
    assert "secret" not in printed


def test_options_of_other_engines_lead_to_keys_that_exist() -> None:
    for named in KEYS.values():
        prefill = named.replace(INSTANCES, "dp_config.router.prefill_schedulers.0")
        assert prefill.partition("=")[0] in set(known_keys()), named


def test_the_token_that_operators_calls_need_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("CHITU_CLUSTER_KEY", "CHITU_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert main(["token"]) == 2
    assert "no launcher of this user" in capsys.readouterr().err
    key = "a key of this cluster"
    folder = RunDir()
    folder.keep_key(21003, key)  # as `chitu serve` does
    secrets = derive(key)
    assert secrets is not None
    for words in ([], ["--url", "http://localhost:21003"]):
        assert main(["token", *words]) == 0
        assert capsys.readouterr().out == secrets.token + "\n"
    assert main(["token", "--url", "http://localhost:21004"]) == 2
    monkeypatch.setenv("CHITU_CLUSTER_KEY", key)
    assert main(["token", "--url", "http://10.0.0.1:21003"]) == 0
    assert secrets.token in capsys.readouterr().out
    told = greeting(ModelConfig(path="m"), ["P0"], "http://localhost:21003", None, has_key=True)
    assert "token --url http://localhost:21003" in told
    assert "Operators" not in greeting(ModelConfig(path="m"), ["P0"], "http://localhost:21003", None)
    access = Access(RouterConfig(), secrets, FakeClock())
    with pytest.raises(Unauthorized, match=r"Authorization: Bearer TOKEN, which `chitu token` prints"):
        access.require({"path": "/admin/weights", "headers": [], "client": ("127.0.0.1", 1)})
    sent = [(b"authorization", b"Bearer " + secrets.token.encode())]
    access.require({"path": "/admin/weights", "headers": sent, "client": ("127.0.0.1", 1)})
    folder.remove()


@pytest.mark.parametrize("command", ["chat", "drain", "join", "snapshot", "token", "trace", "verify"])
def test_every_command_of_a_running_cluster_names_it_by_the_same_option(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = {"chat": ["hi"], "drain": ["D0"], "join": ["decode"], "trace": ["id"]}
    words["snapshot"] = ["id", str(tmp_path / "kept")]
    assert main([command, *words.get(command, []), "--url", "nonsense://x"]) == 2
    assert "nonsense://x" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [(KeyboardInterrupt(), 130, ""), (BrokenPipeError(), 141, ""), (OSError(28, "No space left"), 1, "No space left")],
)
def test_what_the_system_does_to_a_command_is_no_traceback(
    error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("chitu.cli.commands.read_topology", fail)
    assert main(["plan"]) == code
    assert capsys.readouterr().err.strip() == (f"chitu: {says}" if says else "")


def test_ctrl_c_during_the_imports_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")  # the moment of the Ctrl-C
    code = (  # a command in the background of a script ignores SIGINT
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "runpy.run_module('chitu.cli', run_name='__main__')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "plan"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_closed_standard_streams_are_no_error() -> None:
    command = ["bash", "-c", 'exec "$0" -m chitu.cli plan <&- >&- 2>&-', sys.executable]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ["node", "--node-index", "0", "--cpus-per-gpu", "0"],
        ["node", "--node-index", "0", "--ready-timeout", "nan"],
        ["join", "decode", "--ready-timeout", "-1"],
        ["chat", "hi", "--max-tokens", "0"],
    ],
)
def test_numbers_that_count_nothing_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2 and "is not a" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["plan", "--nope"], ["serve", "--port", "x"], ["bench", "nope"], []])
def test_unknown_options_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2


def test_a_terminal_without_utf_8_costs_no_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(TINY_MODEL_DIR, tmp_path, dirs_exist_ok=True)
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["plan", "--model", str(tmp_path), "model.served_name=fuchs-ü"]) == 0
    assert rb"fuchs-\xfc" in raw.getvalue()


# ----------------------------------------------------------------------------------------------------------------------
# The signals that end a launcher, sent to this process.


@pytest.fixture(autouse=True)
def _unharmed() -> Iterator[None]:
    """Ignore the signals before and after a test, so that a wrong handler does not end the tests."""
    previous = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_for_the_end_and_ctrl_c_then_ends_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, stop_on_signals() as stop:
        assert not stop.is_set()
        signal.raise_signal(number)
        assert stop.is_set()
        signal.raise_signal(signal.SIGINT)
    assert (ended.value.code, signal.getsignal(number)) == (128 + signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_slurm_or_a_terminal_sends_twice_lets_running_requests_finish(number: signal.Signals) -> None:
    with stop_on_signals() as stop:
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert stop.is_set()


def test_a_signal_that_the_launcher_ignores_stays_ignored() -> None:
    with stop_on_signals():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_nohup_outlives_the_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.is_set()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.timeout(20)
def test_a_signal_at_any_line_of_the_wait_ends_it() -> None:
    """An Event's `set` in the handler would hang where `wait` holds its lock."""

    def wait_with_a_signal_at(number: int) -> int:
        """Raise SIGTERM before this line of `wait` (0: none). Return how many lines ran."""
        count = 0

        def trace(_frame: FrameType, event: str, _argument: object) -> Any:
            nonlocal count
            count += event == "line"
            if event == "line" and count == number:
                signal.raise_signal(signal.SIGTERM)
            return trace

        with stop_on_signals() as stop:
            sys.settrace(trace)
            try:
                stop.wait(0.01)
            finally:
                sys.settrace(None)
            assert stop.is_set() == (number > 0)
        return count

    for number in range(1, wait_with_a_signal_at(0) + 1):
        wait_with_a_signal_at(number)


# ----------------------------------------------------------------------------------------------------------------------
# Which display a stream gets.


@pytest.mark.parametrize(("term", "kind"), [("xterm", RichDisplay), ("dumb", PlainDisplay)])
def test_only_a_terminal_that_can_redraw_is_redrawn(term: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    ours, theirs = os.openpty()
    with open(ours, "rb"), open(theirs, "w") as terminal:
        display = make_display(terminal)
        display.close()
    assert isinstance(display, kind)
    assert isinstance(make_display(io.StringIO()), PlainDisplay)


def test_the_first_request_to_copy_is_a_chat_if_the_model_has_a_template(tmp_path: Path) -> None:
    model = ModelConfig(path=str(tmp_path))
    assert "/v1/completions" in greeting(model, ["P0", "D0"], "http://a:1", None)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    told = greeting(model, ["P0", "D0"], "http://a:1", None)
    assert "/v1/chat/completions" in told and '"temperature": 0' in told and "capital of France" in told
