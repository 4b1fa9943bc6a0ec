"""A launcher's terminal: start progress, a line for each process, and the signals that end the launcher.

On a terminal that can do it the lines are redrawn (rich), with a bar while weights load; elsewhere one plain line is
written per change of state. Everything goes to stderr, or with all logs to stdout. Used in the launcher's main thread.
If stderr is closed, output is lost and the cluster continues.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from chitu.config.schema import ModelConfig
from chitu.process.logs import StdoutLog
from chitu.process.progress import Progress
from chitu.protocol.first_prompt import first_prompt
from chitu.tokenizer.chat_template import has_chat_template
from chitu.types import Role

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class PlainDisplay:
    """A display with one line per change; it reports loading in steps of a quarter. With `stdout` its lines are among
    the logs there."""

    def __init__(self, stream: TextIO, stdout: StdoutLog | None = None) -> None:
        self._stream = stream
        self._stdout = stdout
        self._start_s = time.monotonic()
        self._shown: dict[str, str] = {}

    def update(self, states: Mapping[str, Progress]) -> None:
        for name, progress in states.items():
            text = progress.state
            if progress.total:
                text += f" {25 * (4 * progress.done // progress.total)}% of {progress.total / 2**20:.0f} MiB"
            if self._shown.get(name) != text:
                self._shown[name] = text
                self.say(f"{name}: {text}")

    def say(self, text: str) -> None:
        """Print a line about the start, with its time."""
        self.tell(text if self._stdout is not None else f"[{time.monotonic() - self._start_s:6.1f} s] {text}")

    def tell(self, text: str) -> None:
        """Print a line for the user."""
        if self._stdout is not None:
            self._stdout.say(text)
        else:
            tell(text, self._stream)

    def close(self) -> None:
        pass


class RichDisplay:
    """A display with a live table; `say` prints above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._stream = stream
        self._console = Console(file=stream, highlight=False)
        self._bars = Bars(
            TextColumn("{task.description:8}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._tasks: dict[str, Any] = {}
        self._bars.start()

    def update(self, states: Mapping[str, Progress]) -> None:
        for name, progress in states.items():
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=None, state="starting")
            done, total = progress.done, progress.total or None
            if progress.state in ("warmup", "ready"):
                done, total = (100, 100) if progress.state == "ready" else (99, 100)
            self._bars.update(self._tasks[name], completed=done, total=total, state=progress.state)

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(text, markup=False)

    def tell(self, text: str) -> None:
        """Print a line for the user, unwrapped. Call it after `close`."""
        tell(text, self._stream)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._bars.stop()


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print to stderr; ignore a closed stream."""
    with contextlib.suppress(OSError):
        print(text, file=stream or sys.stderr, flush=True)


def make_display(stream: TextIO | None = None, stdout: StdoutLog | None = None) -> PlainDisplay | RichDisplay:
    """Make the display for a stream. A terminal that cannot redraw (TERM=dumb) gets plain lines, too."""
    stream = stream or sys.stderr
    if stdout is None and stream.isatty():
        from rich.console import Console

        if not Console(file=stream).is_dumb_terminal:
            return RichDisplay(stream)
    return PlainDisplay(stream, stdout)


def chitu_command() -> str:
    """Return the command of this installation as the user can type it here: its name if that is on PATH."""
    own = Path(sysconfig.get_path("scripts")) / "chitu"
    found = shutil.which("chitu")
    if found is not None and os.path.realpath(found) == os.path.realpath(own):
        return "chitu"
    if not own.is_file():
        return f"{shlex.quote(sys.executable)} -m chitu.cli"
    here = os.path.relpath(own)
    return shlex.quote(str(own) if here.startswith("..") else here)


def greeting(
    model: ModelConfig,
    names: Sequence[str],
    url: str,
    log_dir: Path | None,
    missing: Sequence[Role] = (),
    has_key: bool = False,
) -> str:
    """Return the text to print once the cluster serves: its instances, addresses, and a first request to copy. With
    `missing` roles: the instances that have to join first. `has_key`: operators' calls need a token."""
    name = model.served_name or Path(os.path.expanduser(model.path)).resolve().name
    logs = f"  (logs: {log_dir})" if log_dir is not None else ""
    if missing:
        commands = "\n".join(f"    {chitu_command()} join {role} --url {url}" for role in missing)
        return (
            f"\nthe router of {name!r} listens at {url} with {', '.join(names) or 'no instance'}{logs}\n"
            f"requests are answered with 503 until these join:\n\n{commands}\n\nCtrl-C ends it."
        )
    first = first_prompt(name, has_chat_template(Path(os.path.expanduser(model.path))))
    if first.is_chat:
        question = f'"messages": [{{"role": "user", "content": "{first.text}"}}]'
        path, asked = "chat/completions", f'"temperature": 0, {question}'
    else:
        path, asked = "completions", f'"prompt": "{first.text}"'
    return (
        f"\nchitu serves {name!r} with {', '.join(names)} at {url}{logs}\n\n"
        f"    curl {url}/v1/{path} -H 'Content-Type: application/json' \\\n"
        f'        -d \'{{"model": "{name}", "max_tokens": 32, {asked}}}\'\n\n'
        f"In a browser: {url}  In a terminal: {chitu_command()} chat --url {url}\n"
        + (f"Operators' calls (/admin/...) need the token of: {chitu_command()} token --url {url}\n" if has_key else "")
        + "Ctrl-C ends it."
    )


class StopRequest:
    """A request to end, which a signal handler can set while its own thread waits for it: with `threading.Event` it
    would wait for ever for the lock that its thread holds just then."""

    def __init__(self) -> None:
        self._is_set = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self._is_set = True
        self._wake.put(None)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, or for `timeout_s`. Return whether it is set."""
        if not self._is_set:
            with suppress(queue.Empty):
                self._wake.get(timeout=timeout_s)
        return self._is_set


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Yield a request that the first signal sets. Ctrl-C after it raises SystemExit.

    Other signals after the first do not, since they come in twos: Slurm sends SIGTERM twice at a time limit, the shell
    and the kernel send SIGHUP for a terminal that closes. A SIGHUP that is ignored stays so (nohup).
    """
    stop = StopRequest()

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise SystemExit(128 + number)  # the supervisor kills what is left at exit
        stop.set()

    handled = [number for number in SIGNALS if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)]
    previous = {number: signal.signal(number, handle) for number in handled}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) == handle:  # else the launcher ignores it from now on
                signal.signal(number, handler)
