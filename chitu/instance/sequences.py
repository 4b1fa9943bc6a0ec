"""The sequences of an instance: their states, what each holds, and when that is free again.

Owned by `PDScheduler`, whose managers decide on events; step thread only, except `Inbox.put` and `Inbox.waiting`.

* A state changes by `Sequences.take` alone, along `SEQUENCE_TRANSITIONS` (docs/protocol.md shows it). A request is in
  exactly one queue, that of its state. A pair without an entry changes nothing, so from every state a request ends
  once; it is LEAVING once, and then no peer touches what it held.
* While a launched step is unread, nothing that was held at its launch is free (`Resources`). A kernel may still read or
  write it, and D offers free pages and aux slots to a peer, whose writes none of our streams orders.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Final

from chitu.cache_manager import PagedKVCacheManager
from chitu.errors import Internal
from chitu.grammars import CompiledGrammar
from chitu.instance.draft_source import Drafting
from chitu.instance.images import ImageGate, PromptImages
from chitu.kv_cache.prefix_index import PageKeys
from chitu.kv_cache.state_row import Snapshot, StateSlots, stamp_of
from chitu.kv_cache.tiers.pages import PageLoad
from chitu.kv_transfer.layout import MetadataBuffers
from chitu.net.threads import Waker
from chitu.protocol import (
    DecodeRequest,
    PrefillRequest,
    PromptOutput,
    RequestHead,
    SampledRequest,
    SamplingParams,
    SchedulerMessage,
    TransferSums,
)
from chitu.protocol.account import NO_TIMES, PrefillTimes, StageTimes


class SequenceState(Enum):
    """State of a request on an instance. P: WAITING to INFLIGHT. D: WAITING, TRANSFER and later. D and unified, if they
    compute the prompt: WAITING, COMPUTING, RUNNING and later; with forks INFLIGHT, too."""

    __hash__ = object.__hash__  # each is the key of its queue; Enum's own is a Python function

    WAITING = auto()
    """It holds nothing."""
    COMPUTING = auto()
    """Its prompt is computed here, or its pages come from the cache tiers, so that less has to be computed."""
    INFLIGHT = auto()
    """P: the last chunk is launched, and its KV is being sent. D, unified: the last chunk of a prompt with forks is
    launched."""
    TRANSFER = auto()
    """D: its pages were announced to P."""
    LOGITS = auto()
    """D: as TRANSFER, and the logits row has arrived. The first token can be sampled."""
    STARTED = auto()
    """D: as LOGITS, and the first token is launched. KV is still in flight."""
    LANDED = auto()
    """All of its prompt's KV and the logits row have arrived, and no token was launched."""
    RUNNING = auto()
    """It decodes."""
    RETRACTED = auto()
    """Its KV is in host memory."""
    FORK_WAITING = auto()
    """A choice whose prompt holds nothing yet."""
    FORK_HELD = auto()
    """A choice whose prompt holds pages: it holds these pages and a slot, too."""
    CLOSING = auto()
    """Over for the client, but a peer may still touch its pages, or a fork needs them."""
    LEAVING = auto()
    """All that it holds is free, or will be once a step in flight has been read."""


class SequenceEvent(Enum):
    __hash__ = object.__hash__

    ADMIT = auto()
    """It got pages and a slot, to be computed."""
    COMPUTED = auto()
    """The last chunk is launched, and no token is sampled with it."""
    GIVE_WAY = auto()
    """P: what it holds is given to a request that D has announced."""
    ANNOUNCE = auto()
    """It got pages, an aux slot and a slot, for P to write to."""
    ROW_HERE = auto()
    KV_HERE = auto()
    """All KV has arrived; for a fork, that of its prompt."""
    START = auto()
    """Its first token is launched."""
    HOLD = auto()
    """The prompt of a fork got pages."""
    RETRACT = auto()
    RESUME = auto()
    END = auto()
    """Its last token, a failure, a cancellation or a deadline came; on P, its KV was sent."""
    FREE = auto()
    """No peer and no fork needs what it holds."""


_S, _E = SequenceState, SequenceEvent

OPEN_STATES: Final = frozenset(_S) - {_S.CLOSING, _S.LEAVING}
"""States in which the request is not over for the client."""
AT_PEER_STATES: Final = frozenset({_S.TRANSFER, _S.LOGITS, _S.STARTED})
"""States of D in which P may write to its pages."""

SEQUENCE_TRANSITIONS: Final[Mapping[tuple[SequenceState, SequenceEvent], SequenceState]] = {
    (_S.WAITING, _E.ADMIT): _S.COMPUTING,
    (_S.COMPUTING, _E.COMPUTED): _S.INFLIGHT,
    (_S.COMPUTING, _E.GIVE_WAY): _S.WAITING,
    (_S.INFLIGHT, _E.GIVE_WAY): _S.WAITING,
    (_S.COMPUTING, _E.START): _S.RUNNING,
    (_S.WAITING, _E.ANNOUNCE): _S.TRANSFER,
    (_S.TRANSFER, _E.ROW_HERE): _S.LOGITS,
    (_S.LOGITS, _E.START): _S.STARTED,
    (_S.LOGITS, _E.KV_HERE): _S.LANDED,
    (_S.STARTED, _E.KV_HERE): _S.RUNNING,
    (_S.LANDED, _E.START): _S.RUNNING,
    (_S.RUNNING, _E.RETRACT): _S.RETRACTED,
    (_S.RETRACTED, _E.RESUME): _S.RUNNING,
    (_S.FORK_WAITING, _E.HOLD): _S.FORK_HELD,
    (_S.FORK_HELD, _E.KV_HERE): _S.LANDED,
    **{(state, _E.END): _S.CLOSING for state in _S if state in OPEN_STATES},
    (_S.CLOSING, _E.FREE): _S.LEAVING,
}
"""(state, event) -> next state; a pair that is not here is absorbed."""

SEQUENCE_AWAITS: Final[Mapping[SequenceState, str]] = {
    _S.WAITING: "pages or a slot",
    _S.COMPUTING: "the end of its prefill",
    _S.INFLIGHT: "its KV to reach the other side",
    _S.TRANSFER: "its logits",
    _S.LOGITS: "its first token",
    _S.STARTED: "its KV",
    _S.LANDED: "its first token",
    _S.RUNNING: "its last token",
    _S.RETRACTED: "free pages to resume",
    _S.FORK_WAITING: "pages for its prompt",
    _S.FORK_HELD: "its prompt",
}
"""Event that a request waits for in each state that is not over."""


def queue_order(arrival_s: float, number: int, priority: int, most_s: float) -> tuple[float, int]:
    """Return the place of a request in every queue of an instance, and in the order in which running requests give way:
    the time of its arrival, moved by its priority. The `number` of its arrival decides between equal times.

    A priority below 0 moves it ahead, one above 0 back, by less than `most_s`: by half of that for 1, two thirds for 2.
    So urgent requests overtake only what came shortly before them, and a request ages: after twice `most_s` nothing
    that arrives overtakes it any more, whatever the priorities. A place never changes, so no two requests can retract
    each other in turn.
    """
    return arrival_s + most_s * priority / (1 + abs(priority)), number


@dataclass(slots=True, eq=False)
class PromptProgress:
    """What is known of a sequence's prompt, and who computes it."""

    asked: PromptOutput = field(default_factory=PromptOutput)
    """P and unified instances compute it, D passes it on."""
    lines: bytes | None = None
    """Packed logprobs of the prompt, or its pooled states, as far as they are known; None if none are, or none were
    requested."""
    peer: tuple[int, int] | None = None
    """D: engine rank and incarnation of the P that computes it; None if it is computed here."""
    announced: bool = False
    """P: D has reserved its pages, so what is computed can be delivered."""
    early: SamplingParams | None = None
    """P: by which it draws the first token ahead of D; None: it does not."""
    cached_tokens: int = 0
    """Tokens that are not computed because cached pages hold them. Known once the prefill is admitted, on D when the
    logits arrive."""
    known_tokens: int = 0
    """Tokens that are expected to need no computing here, as they are cached in the pool or in host memory. An estimate
    for load reports, until the prompt computes."""
    keep_at: int = 0
    """Tokens behind which its state is kept for later prompts: a chunk ends there; 0: nowhere."""


@dataclass(slots=True, eq=False)
class Holdings:
    """What a sequence holds beside its slot and its pages, which `Sequence.slot` and the cache have."""

    keys: PageKeys | None = None
    """Keys of its pages in the prefix cache; None if it takes none from there and adds none."""
    load: PageLoad | None = None
    """Load of prompt pages from the tiers. Until it ends, the sequence computes nothing and the executor does not know
    it."""
    admitted: bool = False
    """Whether the executor knows the sequence's slot, from this step's plan on at the latest."""
    aux_slot: int = -1
    state_slot: int = -1
    """Row of its recurrent state, from its admission or announcement to its end, but for a retraction; -1 without."""
    snapshot: Snapshot | None = None
    """That of its state, until the step that copies it is read."""
    offload_key: int = -1

    def stop_load(self) -> None:
        """Stop a load from the tiers, so that the pages can be given to another sequence."""
        if self.load is not None:
            self.load.stop()
            self.load = None


@dataclass(slots=True, eq=False)
class Output:
    """What the router is told of a sequence beside its tokens, and what they must follow."""

    grammar: CompiledGrammar | None = None
    """Kept here so that the executor finds it at every admission."""
    group: int = 1
    """Most tokens that are sent together."""
    num_sent: int = 0
    """Tokens that were sent, if they are sent in groups."""
    kv_bytes: int = 0
    """Bytes that P moved for this request; 0 until the KV is here."""
    transfer_sums: TransferSums | None = None
    """Checksums of the pages that P wrote, on both sides, if the request asks for them and its KV is here."""


@dataclass(slots=True, eq=False)
class SequenceTimes:
    """Moments of a sequence on the instance's clock; 0: not yet."""

    arrival_s: float
    computing_since_s: float = 0.0
    """When the first prefill chunk began."""
    announced_s: float = 0.0
    kv_landed_s: float = 0.0
    first_token_s: float = 0.0
    prefill: PrefillTimes = NO_TIMES

    def stages(self, now_s: float) -> StageTimes:
        """Return the times to report to the router when the request ends on D or a unified instance at `now_s`."""
        moments_s = self.announced_s, self.first_token_s, self.kv_landed_s, now_s
        return StageTimes.of(self.prefill, self.arrival_s, *moments_s)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on one instance, compared by identity. The sequence with the lowest `order` (see `queue_order`) comes
    first everywhere, and gives way last. What a step touches of each sequence is here; the rest is in four parts."""

    head: RequestHead
    """As it came, or for a fork, that of its prompt with its own room."""
    order: tuple[float, int]
    times: SequenceTimes
    sampling: SamplingParams | None = None
    """None on P."""
    adapter: int = 0
    """As in `Admit`. Its pages hold K and V of this adapter alone."""
    stop_ids: frozenset[int] = frozenset()
    images: PromptImages | None = None
    """Images of its prompt; None without."""
    prompt: PromptProgress = field(default_factory=PromptProgress)
    holds: Holdings = field(default_factory=Holdings)
    output: Output = field(default_factory=Output)
    forks: list[Sequence] = field(default_factory=list)
    """Forks that begin with this prompt; a fork that has begun leaves the list. While it is not empty, this is only a
    prompt, of which nothing is sampled."""
    source: Sequence | None = None
    """Prompt that this sequence is, or was, a fork of."""
    state: SequenceState = SequenceState.WAITING
    slot: int = -1
    kv_len: int = 0
    """Tokens whose KV is in the pages once the launched steps are done."""
    capacity_tokens: int = 0
    """Tokens for which the held pages have room."""
    prediction: bytes = b""
    """Tokens that its answer may have, int32 LE."""
    drafting: Drafting | None = None
    """What guesses its next tokens; None: nothing has guessed yet."""
    guess: list[int] = field(default_factory=list)
    """What the model drafts behind the newest token; empty: nothing."""
    launched: int = 0
    """Tokens that launched steps sample: those emitted, and the one that may be in flight."""
    emitted: array[int] = field(default_factory=partial(array, "i"))
    """Tokens that were sampled here."""
    room: bytes = field(init=False)
    """That of its head."""
    prompt_len: int = field(init=False)
    """Tokens in the head: the client's prompt, then `num_emitted` tokens of output."""
    max_new_tokens: int = field(init=False)
    """Most tokens to sample here; 0 on P."""

    def __post_init__(self) -> None:
        head, sampling = self.head, self.sampling
        self.room, self.prompt_len = head.room, len(head.token_ids) // 4
        self.max_new_tokens = 0 if sampling is None else sampling.max_tokens - head.num_emitted

    @property
    def is_open(self) -> bool:
        """Whether the request is not over for the client."""
        return self.state in OPEN_STATES

    @property
    def client_prompt_len(self) -> int:
        """Number of tokens in the client's prompt; the rest of the head's tokens counts as output."""
        return self.prompt_len - self.head.num_emitted

    @property
    def from_peer(self) -> bool:
        """Whether a P computes the prompt, and its KV comes from there."""
        return (self.source or self).prompt.peer is not None

    @property
    def needs_kv(self) -> bool:
        """Whether D needs the KV. A request for one token samples it from P's logits row and computes nothing here."""
        return self.max_new_tokens > 1

    @property
    def draws_from_row(self) -> bool:
        """Whether D draws the first token once the logits row is here, before the KV. A request for the row alone waits
        for Success, which follows at once with P's times and bytes. Prompt logprobs come with Success, and leave with
        the first token."""
        return self.needs_kv and self.prompt.asked.logprobs is None and not self.forks

    @property
    def final_len(self) -> int:
        """Most prompt and output tokens at the end. On P, and for a prompt with forks, the prefilled tokens."""
        if self.sampling is None or self.forks:
            return self.prompt_len
        return self.client_prompt_len + self.sampling.max_tokens

    @property
    def choices(self) -> list[Sequence]:
        """Sequences that the router sees in place of this one: its forks, or itself."""
        return list(self.forks) or [self]

    @property
    def remaining_prompt(self) -> int:
        return self.prompt_len - self.kv_len

    @property
    def tokens_to_compute(self) -> int:
        """Prompt tokens still to compute, by what is known of the caches."""
        return self.prompt_len - max(self.kv_len, self.prompt.known_tokens)

    def token_ids(self) -> bytes:
        """Return prompt and output so far, int32 LE."""
        return self.head.token_ids + self.emitted.tobytes()

    def finish_reason(self, token: int) -> str:
        """Return why the request ends with `token`, its newest; empty if it continues."""
        if token in self.stop_ids:
            return "stop"
        return "length" if len(self.emitted) >= self.max_new_tokens else ""


class SlotPool:
    """The slots of an executor; `owner[slot]` is the sequence in a slot. Step thread only."""

    def __init__(self, num_slots: int) -> None:
        self.owner: list[Sequence | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._to_release: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def next_free(self) -> int:
        """The slot that `take` gives next. The executor may still have to release it (`take_releases`)."""
        return self._free[-1]

    def take(self, sequence: Sequence) -> None:
        """Reserve a slot for a sequence; the caller checked `num_free`."""
        sequence.slot = self._free.pop()
        self.owner[sequence.slot] = sequence

    def free(self, sequence: Sequence, is_offloaded: bool = False) -> None:
        """Free the sequence's slot, if it has one. The next plan releases it if the executor has admitted the sequence.
        `is_offloaded`: the executor itself does, after it has saved its pages."""
        slot, is_known = sequence.slot, sequence.holds.admitted
        if slot < 0:
            return
        sequence.slot, sequence.holds.admitted = -1, False
        self.owner[slot] = None
        self._free.append(slot)
        if is_known and not is_offloaded:
            self._to_release.append(slot)

    def take_releases(self) -> list[int]:
        """Return and clear the slots that the next plan must release, which it does before it admits any sequence."""
        releases, self._to_release = self._to_release, []
        return releases


class Resources:
    """The pages, slots, aux slots, state slots and features of images of an instance. What is released while a launched
    step is unread becomes free when the newest one is read, of each lane; but rows of features at once (`images.py`).

    With state a prompt goes on behind cached pages only where a snapshot of the state was kept (`StateSlots`)."""

    def __init__(
        self,
        cache: PagedKVCacheManager,
        num_slots: int,
        aux: MetadataBuffers,
        states: StateSlots | None = None,
        images: ImageGate | None = None,
    ) -> None:
        self.cache = cache
        self.images = images or ImageGate()
        self.slots = SlotPool(num_slots)
        self.aux = aux
        self.states = states or StateSlots()
        self.has_state = self.states.num_slots > 0
        cache.states = self.states if self.has_state else None
        self._num_launched = self._num_read = 0
        self._beside_launched = self._beside_read = 0
        self._leaving: deque[tuple[int, int, Callable[[], None]]] = deque()
        """Releases that wait, each until that many steps have been read, and that many in the lane of prompts."""

    @property
    def num_unread(self) -> int:
        """Number of launched steps that are not read yet, in both lanes."""
        return self.num_unread_steps + self._beside_launched - self._beside_read

    @property
    def num_unread_steps(self) -> int:
        """The same without the lane of prompts."""
        return self._num_launched - self._num_read

    @property
    def is_lane_busy(self) -> bool:
        """Whether chunks compute in the lane of prompts, or wait there to be read."""
        return self._beside_launched > self._beside_read

    def launched(self) -> None:
        """Note that a step is about to be launched, which may use what is held now."""
        self._num_launched += 1
        if self.has_state:
            self.states.unpin()

    def launched_beside(self) -> None:
        """Note that the step which was just launched has chunks in the lane of prompts."""
        self._beside_launched += 1

    def read(self, is_beside: bool = False) -> None:
        """Note that the oldest unread step of a lane was read, and make free what waited for it."""
        self._num_read += not is_beside
        self._beside_read += is_beside
        while self._leaving and self._leaving[0][0] <= self._num_read and self._leaving[0][1] <= self._beside_read:
            self._leaving.popleft()[2]()

    def take_aux(self) -> int:
        """Take an aux slot. The caller has just checked that one is free."""
        slot = self.aux.allocate()
        if slot is None:
            raise Internal("an aux slot was counted as free but none is")
        return slot

    def states_wanted(self, sequence: Sequence) -> int:
        """Return how many state slots a sequence and its forks take that computes, or gets KV. Forks take one each, as
        each continues the state of the prompt by itself."""
        return 1 + len(sequence.forks) if self.has_state else 0

    def take_state(self, sequence: Sequence) -> None:
        """Take a state slot for the sequence, if the model has state. The caller has just checked that one is free."""
        if self.has_state:
            sequence.holds.state_slot = self.states.take()

    def go_on_from_state(self, sequence: Sequence) -> int:
        """Take a state slot for a sequence whose first `kv_len` tokens `cache.begin` has just found, and return the row
        of the snapshot that the plan must copy to it; -1 if the slot is that row."""
        assert sequence.holds.keys is not None
        key = sequence.holds.keys.key_at(sequence.kv_len // self.cache.page_size - 1, sequence.head.token_ids)
        sequence.holds.state_slot, source = self.states.take_after(key, self.states_wanted(sequence))
        return source

    def keep_state(self, sequence: Sequence) -> Snapshot | None:
        """Take a row for a snapshot of the state of a prompt, which has computed its first `kv_len` tokens. Return None
        if no row is to spare, there is such a snapshot, or the cache was flushed since the prompt came."""
        keys = sequence.holds.keys
        if not self.cache.accepts(keys):
            return None
        key = keys.key_at(sequence.kv_len // self.cache.page_size - 1, sequence.head.token_ids)
        return self.states.add(key, stamp_of(sequence.head.token_ids, sequence.kv_len))

    def hold_forks(self, source: Sequence) -> None:
        """Reserve for each fork the page in which the prompt ends, a state row if the prompt has one, and a slot; the
        first fork later gets the slot of the prompt, if that has one. The caller has just checked that they are
        free."""
        for fork in source.forks:
            if source.holds.state_slot >= 0:
                self.take_state(fork)
            self.cache.reserve(fork.room, source.prompt_len % self.cache.page_size)
        for fork in source.forks[source.slot >= 0 :]:
            self.slots.take(fork)

    def free_slot(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that keeps its pages, if it has one."""
        if sequence.slot >= 0:
            self.when_read(partial(self.slots.free, sequence))

    def free_aux(self, sequence: Sequence) -> None:
        """Free the aux slot of a sequence, if it has one."""
        if sequence.holds.aux_slot >= 0:
            self.when_read(partial(self._free_aux, sequence))

    def vacate(self, sequence: Sequence, is_offloaded: bool = False) -> None:
        """Free at once all that a sequence holds. No step may be in flight. `is_offloaded`: the executor itself
        releases the slot after it has saved its pages."""
        if self.num_unread:
            raise Internal(f"pages are wanted back from {sequence.head.request_id} with a step in flight")
        self.free_now(sequence, is_offloaded)

    def when_read(self, action: Callable[[], None]) -> None:
        """Call the action when the newest launched step is read; at once if it has been."""
        if self.num_unread:
            self._leaving.append((self._num_launched, self._beside_launched, action))
        else:
            action()

    def free_now(self, sequence: Sequence, is_offloaded: bool = False) -> None:
        """Free all that a sequence holds, which no launched step and no peer touches. `is_offloaded` is as in
        `vacate`."""
        self.slots.free(sequence, is_offloaded)
        self._free_aux(sequence)
        if sequence.holds.state_slot >= 0:
            self.states.free(sequence.holds.state_slot)
            sequence.holds.state_slot = -1
        if sequence.holds.snapshot is not None:
            self.states.drop(sequence.holds.snapshot)
            sequence.holds.snapshot = None
        self.leave_images(sequence)
        self.cache.remove_task(sequence.room)

    def leave_images(self, sequence: Sequence) -> None:
        """Give up the features of a sequence that computes no more."""
        if sequence.images is not None:
            self.images.leave(sequence, self.when_read)

    def _free_aux(self, sequence: Sequence) -> None:
        if sequence.holds.aux_slot >= 0:
            self.aux.free(sequence.holds.aux_slot)
            sequence.holds.aux_slot = -1


class Sequences:
    """The sequences of an instance by state. `resources` are what they hold; `on_gone` gets the room of each sequence
    that leaves."""

    def __init__(self, resources: Resources, on_gone: Callable[[bytes], None] = lambda room: None) -> None:
        self.resources = resources
        self._on_gone = on_gone
        self._all: dict[bytes, Sequence] = {}
        self._queues: dict[SequenceState, dict[bytes, Sequence]] = {state: {} for state in SequenceState}
        self.dropped_keys: list[int] = []
        """Keys of saved copies that no request needs any longer; the next plan drops them."""

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, room: bytes) -> bool:
        """Return whether the room is here, even if it is over and a peer may still touch its pages."""
        return room in self._all

    def get(self, room: bytes) -> Sequence | None:
        return self._all.get(room)

    def find(self, room: bytes) -> Sequence | None:
        """Return the room's sequence unless it is over for the client."""
        sequence = self._all.get(room)
        return sequence if sequence is not None and sequence.state in OPEN_STATES else None

    def queue(self, *states: SequenceState) -> list[Sequence]:
        """Return a copy of these queues, one state after the other, each in the order of entry."""
        return [sequence for state in states for sequence in self._queues[state].values()]

    def of(self, state: SequenceState) -> Mapping[bytes, Sequence]:
        """Return the live queue of a state, by room."""
        return self._queues[state]

    @property
    def open(self) -> list[Sequence]:
        """Every request that is not over for its client; for a prompt with forks, its forks."""
        return [s for s in self._all.values() if s.state in OPEN_STATES and not s.forks]

    def num_choices(self, *states: SequenceState) -> int:
        """Return the number of requests in these states, with forks counted one by one."""
        return sum(len(sequence.forks) or 1 for state in states for sequence in self._queues[state].values())

    # ---------------------------------------------------------------------------------------------------- transitions

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence as WAITING, with forks that wait for it."""
        for each in (sequence, *sequence.forks):
            each.state = SequenceState.WAITING if each is sequence else SequenceState.FORK_WAITING
            self._all[each.room] = self._queues[each.state][each.room] = each

    def take(self, sequence: Sequence, event: SequenceEvent) -> bool:
        """Apply an event: the only way in which a state changes. Return False if the event is absorbed."""
        target = SEQUENCE_TRANSITIONS.get((sequence.state, event))
        if target is None:
            return False
        del self._queues[sequence.state][sequence.room]
        sequence.state = target
        self._queues[target][sequence.room] = sequence
        return True

    def drop_all_but_retracted(self, saved_keys: Collection[int]) -> None:
        """Drop these saved copies with the next plan, except those of retracted sequences."""
        wanted = {sequence.holds.offload_key for sequence in self.queue(SequenceState.RETRACTED)}
        self.dropped_keys = [key for key in saved_keys if key not in wanted]

    def take_dropped_keys(self) -> list[int]:
        keys, self.dropped_keys = self.dropped_keys, []
        return keys

    def hold_forks(self, source: Sequence) -> None:
        """Reserve what the forks of a prompt need, and mark them as held."""
        self.resources.hold_forks(source)
        for fork in source.forks:
            self.take(fork, SequenceEvent.HOLD)

    def close(self, sequence: Sequence) -> bool:
        """End a sequence for the client: it computes no more. Return False if it was over already."""
        is_retracted = sequence.state is SequenceState.RETRACTED
        if not self.take(sequence, SequenceEvent.END):
            return False
        sequence.holds.stop_load()
        self.resources.leave_images(sequence)
        if is_retracted:
            self.dropped_keys.append(sequence.holds.offload_key)
        self.resources.free_slot(sequence)
        return True

    def free(self, sequence: Sequence) -> None:
        """Free all that a closed sequence holds. The caller knows that no peer touches its pages."""
        if self.take(sequence, SequenceEvent.FREE):
            self.resources.when_read(partial(self._remove, sequence))

    def _remove(self, sequence: Sequence) -> None:
        self.resources.free_now(sequence)
        del self._all[sequence.room], self._queues[sequence.state][sequence.room]
        self._on_gone(sequence.room)


StepCommand = SchedulerMessage | Callable[[], None]
"""A message of the router, or a call for the step thread."""


class Inbox:
    """What other threads have for the step thread, in the order of arrival. A deque suffices: operations at its ends
    are atomic."""

    def __init__(self, waker: Waker | None = None) -> None:
        """`waker`: what the step thread sleeps in; any thread wakes it."""
        self.waker = waker or Waker()
        self._commands: deque[StepCommand] = deque()

    def __len__(self) -> int:
        return len(self._commands)

    def put(self, command: StepCommand) -> None:
        self._commands.append(command)
        self.waker.wake()

    def take(self) -> Iterator[StepCommand]:
        """Yield messages until none is left, including those that arrive meanwhile."""
        while self._commands:
            yield self._commands.popleft()

    def waiting(self) -> tuple[int, int]:
        """Return the number of requests not taken yet, and of their prompt tokens on P, cached or not. Any thread."""
        new = [m for m in tuple(self._commands) if isinstance(m, (PrefillRequest, SampledRequest))]
        count = sum(1 if isinstance(message, PrefillRequest) else len(message.forks) or 1 for message in new)
        return count, sum(len(m.head.token_ids) // 4 for m in new if not isinstance(m, DecodeRequest))
