"""Which weights a cluster serves, and the change to others. Pure: joins, losses and reports in, an order out.

Owned by `pd_coordination.py`, on the loop thread of the process that keeps the membership; its shell publishes `order`
with the view. A change has two phases. *Prepare*: every member reads the folder beside the weights that serve, checks
it, and reports its hash; one that cannot ends the change, with nothing lost. *Commit*: `serve` names the new weights,
and each member changes between two steps. In between new requests wait on all routers, which learn of it from the
members' reports, until these say that no request runs, unless the change is mixed.

A change of LoRA adapters alone is such a change, too: it is mixed, and `Weights.base` says that the model's own weights
stay. Which adapters serve is a list in the record, so whoever learns the weights learns them. Requests with an adapter
that is taken off the list run to their end (`WeightsReport.leaving`).

E prepare and change with the others, and nothing waits until they have changed: a P asks only an E that has its own
weights.

Invariant: nothing but `serve` decides what answers are made of. A member with older weights gets no request until it
has read those of `serve`. So it does not matter who dies: a new router takes the newest weights that any member has,
which exist only if that change was committed, and an instance that starts again learns them from the view. Of all
pauses and ends of pauses, at any router, the last one counts. A pause that sleeps is every router's own, so it outlives
the one that was asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from chitu.errors import ChituError, ModelNotFound, SleepRefused, WeightsRefused
from chitu.protocol import InstanceInfo
from chitu.protocol.weights import (
    ADAPTERS_VERSION,
    MAX_ADAPTERS,
    SLEEP_VERSION,
    Pause,
    PauseMode,
    ServedAdapter,
    SleepLevel,
    Weights,
    WeightsOrder,
    WeightsReport,
)
from chitu.types import Role, instance_name

Phase = Literal["prepare", "drain", "commit", "done", "failed"]
Place = tuple[Role, int]


@dataclass(slots=True, eq=False)
class WeightsChange:
    """A change, from its request to its end."""

    wanted: Weights
    """With its hash once all members have read it."""
    phase: Phase = "prepare"
    error: ChituError | None = None
    """Why it failed."""
    what: str = ""
    """What it changes to, for errors and the log."""

    @property
    def is_over(self) -> bool:
        return self.phase in ("done", "failed")

    @property
    def is_committed(self) -> bool:
        """Whether it cannot be taken back: the members change, or have changed."""
        return self.phase in ("commit", "done")


class ClusterWeights:
    def __init__(self, index: int = 0, num_routers: int = 1) -> None:
        """`index`: that of this router among all. No two of them give one number to a change."""
        self._index, self._num_routers = index, num_routers
        self.serve = Weights()
        self._pause = Pause()
        """The last word about pauses that this router was given; of a pause that another one has ended, the number."""
        self._last_pause = 0
        """Largest number that such a word has had, at any router."""
        self._change: WeightsChange | None = None
        self._last = 0
        """Largest number that a change has had."""
        self._members: dict[Place, tuple[InstanceInfo, WeightsReport]] = {}
        self._holding: set[Place] = set()
        """Members that say that new requests wait."""
        self._behind: set[Place] = set()
        """Members that do not have the weights of `serve`."""

    @property
    def order(self) -> WeightsOrder:
        change = self._change
        is_waiting = change is not None and change.phase in ("prepare", "drain")
        is_held = change is not None and change.phase in ("drain", "commit")
        return WeightsOrder(
            self.serve,
            change.wanted if change is not None and is_waiting else None,
            holds=bool(self._pause.mode) or is_held,
            pause=self._pause,
            may_sleep=bool(self._pause.sleep and self._members) and self.is_drained,
        )

    @property
    def are_held(self) -> bool:
        """Whether a member says that new requests wait."""
        return bool(self._holding)

    @property
    def is_uniform(self) -> bool:
        """Whether all members that compute tokens have the weights of `serve`."""
        return all(role is Role.ENCODE for role, _ in self._behind)

    @property
    def is_drained(self) -> bool:
        """Whether every member says that new requests wait and none runs there, of any router."""
        return all(report.is_drained for _, report in self._members.values())

    @property
    def pause(self) -> PauseMode:
        """How the cluster is paused, by an operator at any router: `finish` lets running requests end, `keep` stops
        them where they are."""
        return self.word.mode

    @pause.setter
    def pause(self, mode: PauseMode) -> None:
        """Say it. Raises WeightsRefused if a cluster that sleeps is to be paused."""
        if mode and self.word.sleep:
            raise WeightsRefused("the cluster sleeps: wake it first (/admin/wake)")
        if mode or self.pause or self._last_pause > self._pause.number:
            self._last_pause += 1
            self._pause = Pause(self._last_pause, mode)

    @property
    def word(self) -> Pause:
        """The last word about pauses, of an operator at any router."""
        return max((self._pause, *self._reported_pauses()), key=lambda pause: pause.age)

    @property
    def is_pause_known(self) -> bool:
        """Whether every member has this router's last word about pauses, or a later one."""
        return all(pause.age >= self._pause.age for pause in self._reported_pauses())

    def begin_sleep(self, level: SleepLevel, *, stays: bool) -> Pause:
        """Have the instances sleep once nothing runs, and return this word. Raises SleepRefused."""
        if self._change is not None:
            raise SleepRefused(f"a change to {self._change.wanted.path} is under way ({self._change.phase})")
        if self.pause == "keep":
            raise SleepRefused("running requests are stopped where they are (/admin/pause with keep): resume first")
        members = [info for info, _ in self._members.values()]
        if old := sorted(info.name for info in members if info.protocol < SLEEP_VERSION):
            raise SleepRefused(f"{', '.join(old)}: instances of an older release cannot sleep")
        if not members:
            raise SleepRefused("there is no instance that could sleep")
        self._last_pause = max(self._last_pause, self.word.number) + 1
        self._pause = Pause(self._last_pause, "finish", level, stays)
        return self._pause

    def end_sleep(self, said: Pause) -> None:
        """Take this word back, if it is still the last one."""
        if self.word == said:
            self.pause = ""

    def wake_for(self, num_waiting: int) -> bool:
        """Wake the cluster if it sleeps, or is about to, while so many requests wait, and may be woken by them. Return
        whether that was news."""
        said = self._pause
        if not num_waiting or not said.sleep or said.stays or self.word != said:
            return False
        self.pause = ""
        return True

    @property
    def are_waking(self) -> bool:
        """Whether a member sleeps that may still wake: it has not said that it cannot read its weights."""
        members = self._members.items()
        return any(info.weights.sleep and not self.cannot_read(*place) for place, (info, _) in members)

    def sleeping(self) -> dict[str, tuple[SleepLevel, WeightsReport]]:
        """Return level and report of each member, by name."""
        return {info.name: (info.weights.sleep, report) for _, (info, report) in sorted(self._members.items())}

    def _reported_pauses(self) -> list[Pause]:
        return [report.pause for _, report in self._members.values()]

    def cannot_read(self, role: Role, rank: int) -> bool:
        """Return whether a member says that it cannot read the weights of `serve`."""
        _, report = self._members.get((role, rank), (None, WeightsReport()))
        return bool(report.error) and report.prepared == self.serve

    def missing(self) -> list[str]:
        """Return the members that do not have the weights of `serve` yet, with the reason if they cannot read them."""
        found = []
        for role, rank in sorted(self._behind):
            why = self._members[role, rank][1].error if self.cannot_read(role, rank) else ""
            found.append(instance_name(role, rank) + (f" ({why})" if why else ""))
        return found

    # ------------------------------------------------------------------------------------------------------ an operator

    def begin(self, path: str, is_mixed: bool) -> WeightsChange:
        """Begin a change to the weights in this folder. Raises WeightsRefused if one runs, or nobody could read
        them."""
        self._require_idle()
        if self.pause == "keep" and not is_mixed:
            raise WeightsRefused(
                "running requests are stopped where they are (/admin/pause with keep), so they cannot end before the "
                "change: resume, or ask for a mixed one"
            )
        if names := ", ".join([each.name for each in self.adapters()]):
            raise WeightsRefused(
                f"the LoRA adapters ({names}) were trained for the weights that serve: unload them first "
                "(/admin/adapters)"
            )
        number = self._next_number()
        wanted = Weights(number, "", path, is_mixed, self._unmixed if is_mixed else 0)
        if self.serve.adapters is not None:
            wanted = msgspec.structs.replace(wanted, adapters=(), base=number)
        return self._begin(wanted, path)

    def adapters(self, folders: Mapping[str, str] | None = None) -> list[ServedAdapter]:
        """Return the LoRA adapters that serve. `folders`: those of the topology, by name."""
        if self.serve.adapters is not None:
            return list(self.serve.adapters)
        started = next((info.layout.adapters for info, _ in self._computing()), ())
        return [ServedAdapter(name, (folders or {}).get(name, ""), found) for name, found in started]

    def begin_adapters(
        self, load: Mapping[str, str], unload: Collection[str], folders: Mapping[str, str]
    ) -> WeightsChange:
        """Begin a change of the LoRA adapters: `load` has folders by name, in the place of what has the name now.
        `folders`: those of the topology. Raises ModelNotFound for a name that is not there to be unloaded,
        WeightsRefused if a change runs or some instance cannot do this."""
        self._require_idle()
        if old := [info.name for info, _ in self._computing() if info.protocol < ADAPTERS_VERSION]:
            raise WeightsRefused(f"{', '.join(old)}: an older release, which changes no adapters while it serves")
        wanted = {each.name: each for each in self.adapters(folders)}
        if unknown := sorted(set(unload) - wanted.keys()):
            raise ModelNotFound(f"there is no LoRA adapter {unknown[0]!r}; there are {', '.join(wanted) or 'none'}")
        for name in unload:
            del wanted[name]
        wanted |= {name: ServedAdapter(name, path) for name, path in load.items()}
        if load and len(wanted) > MAX_ADAPTERS:
            raise WeightsRefused(f"these would be {len(wanted)} LoRA adapters; at most {MAX_ADAPTERS} are served")
        listed = tuple([wanted[name] for name in sorted(wanted)])
        serve, number = self.serve, self._next_number()
        weights = Weights(number, serve.model_hash, serve.path, True, self._unmixed)
        weights = msgspec.structs.replace(weights, adapters=listed, base=serve.base_number)
        return self._begin(weights, "LoRA adapters")

    def why_unable(self, info: InstanceInfo) -> str:
        """Return why an instance cannot follow what serves here; empty if it can."""
        if self.serve.adapters is None or info.protocol >= ADAPTERS_VERSION:
            return ""
        return (
            f"{info.name} is of an older release, and the LoRA adapters of this cluster were changed while it serves, "
            "which that release cannot follow"
        )

    @property
    def leaving(self) -> list[str]:
        """LoRA adapters that serve no more, and where how many requests still run with them."""
        return [
            f"{info.name}: {name} ({count} request{'s' if count != 1 else ''})"
            for _, (info, report) in sorted(self._members.items())
            for name, count in report.leaving
        ]

    @property
    def _unmixed(self) -> int:
        """`Weights.unmixed` of a mixed change that follows what serves."""
        return self.serve.unmixed if self.serve.is_mixed else self.serve.number

    def _computing(self) -> list[tuple[InstanceInfo, WeightsReport]]:
        return [each for (role, _), each in sorted(self._members.items()) if role is not Role.ENCODE]

    def _require_idle(self) -> None:
        if self._change is not None:
            raise WeightsRefused(f"a change to {self._change.what} is under way ({self._change.phase})")
        if self.word.sleep:
            raise WeightsRefused("the cluster sleeps, and reads no weights before it wakes (/admin/wake)")
        if not self._members:
            raise WeightsRefused("there is no instance that could read these weights")

    def _next_number(self) -> int:
        following = max(self._last, self.serve.number) + 1
        self._last = following + (self._index - following) % self._num_routers
        return self._last

    def _begin(self, wanted: Weights, what: str) -> WeightsChange:
        self._change = change = WeightsChange(wanted, what=what)
        return change

    def on_drained(self, change: WeightsChange) -> None:
        """Commit: no request runs, and new ones wait. Not while the members read the weights of another router's
        change, which may come first."""
        if change is self._change and change.phase == "drain" and self._are_read(change):
            self._commit(change)

    def give_up(self, change: WeightsChange, reason: str) -> None:
        """End a change that takes too long, unless it is committed."""
        if change is self._change and not change.is_committed:
            self._fail(change, reason)

    # ---------------------------------------------------------------------------------------------------------- members

    def on_info(self, info: InstanceInfo) -> None:
        """Take the record of a member that joined, or that has other weights now."""
        place = info.role, info.engine_rank
        before = self._members.get(place)
        is_same = before is not None and before[0].incarnation == info.incarnation
        self._members[place] = info, before[1] if before is not None and is_same else WeightsReport()
        self._note(place)
        if info.weights.age > self.serve.age:
            self._adopt(info)
        self._advance()

    def on_lost(self, info: InstanceInfo) -> None:
        self._members.pop((info.role, info.engine_rank), None)
        self._note((info.role, info.engine_rank))
        self._advance()

    def on_report(self, info: InstanceInfo, report: WeightsReport) -> None:
        """Take a report of a member, whose record already has the weights that it reports."""
        self._members[info.role, info.engine_rank] = info, report
        self._note((info.role, info.engine_rank))
        self._hear(report.pause)
        self._advance()

    # --------------------------------------------------------------------------------------------------------- internal

    def _hear(self, said: Pause) -> None:
        """Take what a member reports of pauses. That the cluster sleeps, and that it does not any more, becomes this
        router's own word, unless it is older than one that was heard; any other pause belongs to who was asked for it.
        """
        is_newest, self._last_pause = said.number >= self._last_pause, max(self._last_pause, said.number)
        if said.age <= self._pause.age:
            return
        if said.sleep or self._pause.sleep:
            self._pause = said if is_newest else self._pause
        elif self._pause.mode:
            self._pause = Pause(self._pause.number)

    def _adopt(self, info: InstanceInfo) -> None:
        """Serve the newer weights that a member brought, from an earlier router or another one."""
        change = self._change
        if change is not None and info.weights != change.wanted:
            self._fail(change, f"{info.name} has weights {info.weights.number} of another change by now")
        self._serve(info.weights.awake)

    def _serve(self, weights: Weights) -> None:
        self.serve = weights
        for place in self._members:
            self._note(place)

    def _note(self, place: Place) -> None:
        """Note what a member's record and report say, or that it is gone."""
        info, report = self._members.get(place, (None, WeightsReport()))
        (self._holding.add if report.holds else self._holding.discard)(place)
        is_behind = info is not None and info.weights != self.serve
        (self._behind.add if is_behind else self._behind.discard)(place)

    def _advance(self) -> None:
        change = self._change
        if change is None:
            return
        if change.phase == "prepare":
            self._compare(change)
        if change.phase == "commit" and self._members and self.is_uniform:
            change.phase, self._change = "done", None

    def _compare(self, change: WeightsChange) -> None:
        """Go on once all members have read the folder, and found the same there."""
        found: dict[Weights, str] = {}
        for info, report in self._members.values():
            prepared = report.prepared
            if prepared is None or prepared.key != change.wanted.key:
                return
            if report.error:
                self._fail(change, f"{info.name}: {report.error}")
                return
            if info.role is Role.ENCODE:  # it has no adapters
                prepared = msgspec.structs.replace(change.wanted, model_hash=prepared.model_hash)
                if change.wanted.adapters:
                    continue
            found.setdefault(prepared, info.name)
        if not found:
            self._fail(change, "no instance is left that could read these weights")
        elif len(found) > 1:
            self._fail(change, _why_unequal(found))
        else:
            (change.wanted,) = found
            if change.wanted.is_mixed:
                self._commit(change)
            else:
                change.phase = "drain"

    def _are_read(self, change: WeightsChange) -> bool:
        """Return whether all members have read the weights of a change."""
        read = [report.prepared for _, report in self._members.values()]
        return all(each is not None and each.key == change.wanted.key for each in read)

    def _commit(self, change: WeightsChange) -> None:
        change.phase = "commit"
        self._serve(change.wanted)
        self._advance()

    def _fail(self, change: WeightsChange, reason: str) -> None:
        change.phase, change.error, self._change = "failed", WeightsRefused(reason), None


def _why_unequal(found: Mapping[Weights, str]) -> str:
    """Return in what the members differ that have read one folder. `found`: a member for each result."""
    first = next(iter(found))
    if len({each.model_hash for each in found}) > 1:
        read = ", ".join(
            f"{name} reads {each.model_hash}" for each, name in sorted(found.items(), key=lambda i: i[0].age)
        )
        return f"{first.path} is not the same folder everywhere: {read}"
    by_adapter = list(zip(*[each.adapters or () for each in found], strict=True))
    which = next(same for same in by_adapter if len({one.hash for one in same}) > 1)
    read = ", ".join(f"{name} reads {one.hash}" for one, name in zip(which, found.values(), strict=True))
    return f"the LoRA adapter {which[0].name} in {which[0].path} is not the same everywhere: {read}"
