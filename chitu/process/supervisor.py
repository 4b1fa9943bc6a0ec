"""Processes of one machine over all their incarnations: starts, watches, reports deaths, restarts, ends together.

Used by the launchers. All of it happens inside its methods, in the caller's thread, which must outlive the processes
(see `child.py`); `probes.py` answers beside it. Each process writes `NAME.log` into `log_dir`. The death of a process
that was never ready fails the start; any later death is an event.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chitu.errors import ConfigError, Internal
from chitu.process.child import ChildProcess, ProcessSpec, is_router
from chitu.process.logs import StdoutLog, claim_log
from chitu.process.probes import Probes
from chitu.process.progress import DRAINED, TAKEN, Progress, file_of, joined, read_progress, write_progress
from chitu.process.run_dir import RunDir

RENDEZVOUS_KEY = "PET_RDZV_ENDPOINT"
"""torchrun's option for the rendezvous, as an environment variable: the rendezvous file of an instance of one rank."""
POLL_S = 0.05
GRACE_OVER_DRAIN_S = 0.5
"""Time beyond `deadlines.drain_delay_s` and `drain_s` after which a process is killed: 4.5 s with the defaults."""
STABLE_S = 60.0
"""Lifetime after which the count of deaths in a row starts again."""
HUNG_S = 10.0
"""Time without a beat after which a router is killed, if clients have another one on its host."""
MAX_PAUSE_S = 5.0
"""A longer pause between two polls counts as one of this process, in which others may have been stopped too."""
STALLED_S = 600.0
"""Time without progress after which a process that starts again is killed: to read weights reports all the time, and
kernels were compiled by the first start."""


class StartFailed(Internal):
    """A process ended, or was not ready in time, before the cluster served."""


@dataclass(slots=True)
class Member:
    """One process over all its incarnations."""

    name: str
    child: ChildProcess | None = None
    progress: Progress = field(default_factory=Progress)
    """Its progress; of a group that of the member of the cluster that is furthest behind."""
    parts: tuple[Progress, ...] = (Progress(),)
    """Progress of each member of the cluster in it, by data rank."""
    was_ready: bool = False
    failures: int = 0
    """Number of deaths in a row; each doubles the wait before the next start."""
    restart_at_s: float | None = None
    progressed_s: float = 0.0
    """Time of its start, or of its newest progress; infinite if it cannot report."""
    exit_code: int | None = None
    """Exit code of the last incarnation, once its death was noticed."""
    has_left: bool = False
    """Whether the instance was drained and is not restarted by itself."""
    beat_ns: int = -1
    beat_s: float = 0.0
    """Newest beat of a router by its file, and when it was seen."""
    lost_rank: bool = False
    """Whether its last incarnation ended because another process has its rank."""
    last: tuple[Progress, ...] = (Progress(),)
    """`parts` of the last process that ended."""
    is_part: bool = False
    """As in its `ProcessSpec`."""


class Supervisor:
    """Supervisor of processes. Every start calls `spec_of` for the command."""

    def __init__(
        self,
        names: Sequence[str],
        spec_of: Callable[[str], ProcessSpec],
        log_dir: Path | None,
        *,
        restart: bool,
        on_event: Callable[[str], None],
        env: Mapping[str, str] | None = None,
        max_log_bytes: int = 0,
        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
        stalled_s: float = STALLED_S,
        probe_address: tuple[str, int] | None = None,
        stdout: StdoutLog | None = None,
        ends_hung: bool = False,
    ) -> None:
        """Make the members without starting them. With `log_dir` None the processes write to `stdout`, or as this one.
        `max_log_bytes` limits each process's log. `probe_address`: where probes are answered until the end.
        `ends_hung`: kill a router that hangs.

        Raise ConfigError if probes cannot be answered there."""
        self._run_dir: RunDir | None = None
        """The launcher's folder, from the first start to the end."""
        self.members = {name: Member(name) for name in names}
        self.log_dir = log_dir or self.run_dir.path
        self._has_logs = log_dir is not None
        self._claims = [claim_log(self.log_path(name)) for name in names] if self._has_logs else []
        """Claims of the logs, until the end."""
        self._spec_of = spec_of
        self._restart = restart
        self._on_event = on_event
        self._env = dict(env or {})
        self._max_log_bytes = max_log_bytes
        self._popen = popen
        self._stalled_s = stalled_s
        self._id = uuid.uuid4().hex[:12]
        self._starts = 0
        self._was_clean = True
        """Whether no process died."""
        self._is_ending = False
        self._stdout = stdout
        self._ends_hung = ends_hung
        self._polled_s = time.monotonic()
        self._probes = Probes(*probe_address, self.why_unready) if probe_address is not None else None

    def start(self, name: str) -> None:
        """Start a process that is not running."""
        member = self.member(name)
        spec = self._spec_of(name)
        progress = self._progress_path(name)
        member.parts, member.is_part = (Progress(),) * spec.num_members, spec.is_part
        can_report = True
        for path in self._progress_paths(member):
            try:  # in place, since the disk may be full
                write_progress(path, Progress())
            except OSError:
                path.unlink(missing_ok=True)
                can_report = False
        # Not beside the logs, since a network file system may lack the locks of torch's file store.
        tmp = self.run_dir.make_empty(name)
        self._starts += 1
        member.child = ChildProcess(
            spec,
            {
                "CHITU_PROGRESS_FILE": str(progress),
                **({} if spec.is_part else {RENDEZVOUS_KEY: str(tmp / "rendezvous")}),
                "TMPDIR": str(tmp),
                **self._env,
            },
            self.log_path(name) if self._has_logs else None,
            f"{self._id}/{name}/{self._starts}",
            self._popen,
            self._stdout.capture(name) if self._stdout is not None else None,
        )
        member.progress = Progress()
        member.progressed_s = time.monotonic() if can_report else math.inf
        member.restart_at_s = None
        member.has_left = False

    def poll(self) -> None:
        """Check every process once: detect deaths, start due processes. Call about every 0.1 s.

        Raise StartFailed if a process ended before it was ever ready.
        """
        now_s = time.monotonic()
        for member in self.members.values():
            if member.child is not None and (code := member.child.exit_code()) is not None:
                self._died(member, member.child, code, now_s)
            elif member.child is None and member.restart_at_s is not None and now_s >= member.restart_at_s:
                self._start_again(member, now_s)
            elif member.child is not None:
                member.child.bound_log(self._max_log_bytes)
                if member.progress.state != "ready":
                    self._look_at_progress(member)
                    self._end_if_stalled(member, member.child, now_s)
                elif self._ends_hung and is_router(member.name):
                    self._end_if_hung(member, member.child, now_s)
        self._polled_s = now_s

    def dead(self) -> list[Member]:
        """Return members that ended without being drained and will not be restarted."""
        return [
            member
            for member in self.members.values()
            if member.child is None
            and member.restart_at_s is None
            and member.exit_code is not None
            and not member.has_left
        ]

    def why_unready(self) -> str:
        """Return why not all processes serve now, or "". Any thread: it reads what the processes report."""
        if self._is_ending:
            return "this launcher ends"
        for member in self.members.values():
            parts = [read_progress(path) for path in self._progress_paths(member)]
            state = joined(parts).state if member.child is not None else "dead"
            if state != "ready":
                return f"{member.name} is {state}"
            if not is_router(member.name) and not all(part.is_member for part in parts):
                return f"{member.name} is not in the cluster, or drains"
        return ""

    def stop(self, drain_s: float, delay_s: float = 0.0) -> dict[str, int | None]:
        """Drain and end everything, the router first, so that no new request arrives. Return exit codes by name.

        The router serves for `delay_s` before it drains. Processes left `delay_s` + `drain_s` + 0.5 s after the start
        of the stop (`drain_s` + 0.5 s without a router) are killed. Idempotent.
        """
        router = [m.child for m in self.members.values() if m.child and is_router(m.name)]
        workers = [m.child for m in self.members.values() if m.child and not is_router(m.name)]
        end_s = time.monotonic() + (delay_s if router else 0.0) + drain_s + GRACE_OVER_DRAIN_S
        # The router finishes running requests before it exits, and needs the workers for that; they get the remaining
        # time, in which it tells its clients what became of the rest.
        turns = (router, end_s - 0.4 * drain_s if workers else end_s), (workers, end_s)
        awaited: list[ChildProcess] = []
        self._is_ending = True
        try:
            for children, until_s in turns:
                awaited += children
                for child in children:
                    child.terminate()
                while any(child.exit_code() is None for child in awaited) and time.monotonic() < until_s:
                    time.sleep(POLL_S)
        finally:
            codes = {}
            for member in self.members.values():
                member.restart_at_s = None
                if member.child is not None:
                    member.child.kill_tree()
                    member.exit_code = member.child.exit_code()
                    member.child = None
                codes[member.name] = member.exit_code
            if self._stdout is not None:
                self._stdout.flush()
            if self._probes is not None:
                self._probes.close()
                self._probes = None
            if self._run_dir is not None:
                self._run_dir.remove()
                self._run_dir = None
            while self._claims:
                if (claim := self._claims.pop()) is not None:
                    claim.close()
        # One that was never ready may have ended by the signal itself, before it had a handler: that is no death.
        self._was_clean = self._was_clean and all(m.exit_code == 0 for m in self.members.values() if m.was_ready)
        return codes

    def remove_logs(self) -> bool:
        """Remove the folder of the logs after `stop`, unless a process died. Return whether it was removed."""
        if self._was_clean:
            shutil.rmtree(self.log_dir, ignore_errors=True)
        return self._was_clean

    @property
    def probe_port(self) -> int | None:
        return self._probes.port if self._probes is not None else None

    @property
    def run_dir(self) -> RunDir:
        if self._run_dir is None:
            self._run_dir = RunDir()
        return self._run_dir

    def member(self, name: str) -> Member:
        if name not in self.members:
            raise ConfigError(f"the cluster has no process {name!r}; it has {', '.join(self.members)}")
        return self.members[name]

    def child(self, name: str) -> ChildProcess:
        child = self.member(name).child
        if child is None:
            raise StartFailed(f"{name} does not run")
        return child

    def log_path(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def logs(self, name: str) -> str:
        """Return everything that the process wrote, over all its incarnations."""
        with contextlib.suppress(FileNotFoundError):
            return self.log_path(name).read_text(encoding="utf-8", errors="replace")
        return ""

    def _progress_path(self, name: str) -> Path:
        return self.log_dir / f"{name}.progress"

    def _progress_paths(self, member: Member) -> list[Path]:
        """Return the file of each member of the cluster in a process, by data rank."""
        return [file_of(self._progress_path(member.name), rank) for rank in range(len(member.parts))]

    def look(self) -> None:
        """Read what the processes report, also those that are ready: an instance may have changed its role."""
        for member in self.members.values():
            if member.child is not None and self._progress_path(member.name).exists():  # else a cleaner deleted it
                self._look_at_progress(member)

    def _look_at_progress(self, member: Member) -> None:
        found = tuple(map(read_progress, self._progress_paths(member)))
        if found != member.parts or joined(found) != member.progress:
            member.parts, member.progress, member.progressed_s = found, joined(found), time.monotonic()
        if member.progress.state in ("ready", DRAINED, TAKEN):
            member.was_ready = True

    def _end_if_stalled(self, member: Member, child: ChildProcess, now_s: float) -> None:
        """Kill a process that hangs while it starts again: it would stay away for ever. A user waits for the first
        start, which may compile for a GPU for longer; without restarts the launcher has a bound of its own."""
        if not (self._restarts(member) and member.was_ready) or now_s - member.progressed_s <= self._stalled_s:
            return
        state, member.progressed_s = member.progress.state, now_s
        self._on_event(f"{member.name} hangs: still {state} after {self._stalled_s:g} s; it is killed")
        child.kill_tree()

    def _end_if_hung(self, member: Member, child: ChildProcess, now_s: float) -> None:
        """Kill a router whose loop does not turn: it would keep its share of the new connections."""
        try:
            beat_ns = self._progress_path(member.name).stat().st_mtime_ns
        except OSError:  # a cleaner deleted the file
            beat_ns = -1
        if beat_ns != member.beat_ns or beat_ns < 0 or now_s - self._polled_s > MAX_PAUSE_S:
            member.beat_ns, member.beat_s = beat_ns, now_s
        elif now_s - member.beat_s > HUNG_S:
            self._on_event(f"{member.name} hangs: its loop has not turned for {HUNG_S:g} s; it is killed")
            child.kill_tree()

    def _start_again(self, member: Member, now_s: float) -> None:
        """Restart a process. Retry later if the system has no process, descriptor or file for it now."""
        try:
            self.start(member.name)
        except (OSError, ConfigError) as error:
            self._on_event(f"{member.name} cannot be started again now: {error}")
            self._restart_later(member, now_s)
        else:
            self._on_event(f"{member.name} is started again")

    def _restarts(self, member: Member) -> bool:
        return self._restart or member.is_part

    def _restart_later(self, member: Member, now_s: float) -> float:
        """Schedule the restart and return the seconds until then."""
        member.failures += 1
        wait_s = min(10.0, 0.25 * 2 ** (member.failures - 1))
        member.restart_at_s = now_s + wait_s
        return float(wait_s)

    def _died(self, member: Member, child: ChildProcess, code: int, now_s: float) -> None:
        self._look_at_progress(member)
        member.last = member.parts
        member.has_left = member.progress.state == DRAINED  # a follower that hung has another exit code
        member.lost_rank = member.progress.state == TAKEN
        child.kill_tree()
        member.child = None
        member.exit_code = code
        member.progress = Progress("dead", ports=member.progress.ports)  # a router keeps them
        member.parts = (member.progress,) * len(member.parts)
        if member.has_left:
            self._on_event(f"{member.name} has left: it was drained, and is not started again")
            return
        self._was_clean = False
        reason = child.describe_end(code)
        if code == 0 and member.was_ready and not is_router(member.name):
            first = member.name.partition("-")[0]  # a group's is D0-D1
            reason = f"exit code 0 after a signal; `chitu drain {first}` keeps it out"
        life_s = now_s - child.started_s
        report = f"{member.name} ended ({reason}) after {life_s:.1f} s"
        if child.log is not None:
            lines = "".join(f"\n    {line}" for line in child.tail())
            report += f"; its last lines ({child.log}):{lines}"
        if not member.was_ready:
            raise StartFailed(report)
        if self._restarts(member):
            if life_s > STABLE_S:
                member.failures = 0
            report += f"\n{member.name} starts again in {self._restart_later(member, now_s):g} s"
        self._on_event(report)
