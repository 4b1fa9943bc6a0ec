"""A unified instance over a checkpoint with a layer that drafts: its answers, plans and guesses. And plans of an engine
over it, step by step. An engine has one rank (`Engine`) or several (`Ranks`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from engine_checkpoints import PAGE_SIZE, Engine, chunks_of
from mtp_checkpoints import NUM_MODEL_LAYERS
from support.clock import FakeClock
from support.drafts import AllDrafts
from support.requests import unified_request
from thread_ranks import Ranks

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.engine.executor import Admit, FirstToken, StepPlan
from chitu.engine.sampler import Sampler
from chitu.engine.step_graphs import Recording
from chitu.instance.core import InstanceCore, LoadedEngine, SchedulerSettings
from chitu.instance.drafts import source_of
from chitu.instance.roles import DecodeRole
from chitu.instance.token_manager import TokenManager
from chitu.kv_transfer.layout import MetadataBuffers
from chitu.models.config import read_model_spec
from chitu.ops.interface import Ops
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import pack_i32, token_codec

NUM_SLOTS, NUM_PAGES = 4, 64
LAYER = NUM_MODEL_LAYERS


@dataclass
class Instance:
    """A unified instance over a checkpoint."""

    folder: Path
    drafts: bool = True
    num_pages: int = NUM_PAGES
    overlap: bool = False
    sampler: type[Sampler] = Sampler
    num_ranks: int = 1
    """Tensor-parallel ranks; `close` ends those."""
    mtp_tokens: int = 1
    ops: Ops | None = None
    recording: Recording | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    plans: list = field(default_factory=list)
    num_drawn: int = 0
    guesses: list[tuple[int, int]] = field(default_factory=list)
    """Tokens drawn until then, and the first that the model drafts; for a single request."""

    def __post_init__(self) -> None:
        runner, pool = self._load()
        vocab_size = runner.info.vocab_size
        launch = runner.launch

        def noted(plan, on_layer=None):
            self.plans.append(plan)
            step = launch(plan, on_layer)
            self.num_drawn += len(step.tokens.tokens)
            self.guesses += [(self.num_drawn, guess[0]) for guess in step.tokens.drafts.values()]
            return step

        runner.launch = noted
        config = SchedulerConfig(
            max_running_requests=NUM_SLOTS, max_batched_tokens=48, chunk_size=23, reserved_decode_tokens=1
        )
        self.cache = PagedKVCacheManager(self.num_pages, PAGE_SIZE, b"mtp")
        core = InstanceCore(
            SchedulerSettings(config, DeadlineConfig(), overlap=self.overlap),
            LoadedEngine(runner, self.cache, MetadataBuffers(pool.aux_rows, 4 * pool.layout.aux_numbers)),
            TokenManager(1, self._take),
            lambda room, error: None,
            FakeClock(),
        )
        if self.drafts:
            core.drafts = AllDrafts(source_of, NUM_SLOTS, vocab_size)
        self.scheduler = PDScheduler(core, DecodeRole(core))

    def _load(self):
        """Load the model; return the executor, and the pages of its main rank."""
        spec, num_slots = read_model_spec(self.folder), NUM_SLOTS if self.num_ranks == 1 else 8
        sampler = self.sampler(num_slots, spec.vocab_size, torch.device("cpu"), spec.eos_token_ids)
        if self.num_ranks > 1:
            options = {"drafts": self.drafts, "mtp_tokens": self.mtp_tokens}
            self.engine = Ranks(self.folder, self.num_ranks, self.num_pages, sampler=sampler, **options)
            return self.engine.runner, self.engine.pools[0]
        self.engine = Engine(
            self.folder,
            num_pages=self.num_pages,
            num_slots=NUM_SLOTS,
            max_model_len=256,
            drafts=self.drafts,
            mtp_tokens=self.mtp_tokens,
            sampler=sampler,
            ops=self.ops,
            recording=self.recording,
        )
        return self.engine.runner, self.engine.pool

    def close(self) -> None:
        self.engine.close()

    def _take(self, frame: bytes) -> bool:
        batch = token_codec.decode(frame)
        for room, token in zip(batch.rooms, batch.tokens, strict=True):
            self.tokens.setdefault(room[-1], []).append(token)
        assert all(finish.reason in ("length", "stop") for finish in batch.finished)
        return True

    def serve(self, requests) -> list[list[int]]:
        """Return the answers of new requests, (prompt, sampling) each."""
        first = len(self.tokens)
        for number, (prompt, sampling) in enumerate(requests, first):
            self.scheduler.submit(unified_request(number.to_bytes(16, "big"), f"r{number}", pack_i32(prompt), sampling))
            self.scheduler.step()
        self.run()
        return [self.tokens[number] for number in range(first, first + len(requests))]

    def run(self) -> None:
        while not self.scheduler.is_idle:
            self.scheduler.step()
        self.scheduler.step()

    @property
    def num_decodes(self) -> int:
        return sum(bool(plan.decode) for plan in self.plans)


def poison(engine):
    """Fill all pages with NaN, as those of other requests may hold it."""
    for pool in pools_of(engine):
        for region in pool.regions:
            region.fill_(float("nan"))
    return engine


def pools_of(engine):
    """Return the pages of every rank."""
    return engine.pools if isinstance(engine, Ranks) else [engine.pool]


def prefilled(engine, slot: int, prompt: list[int], size: int, total: int, **fields):
    """Compute a prompt in chunks; return its admission, and the result of the last."""
    admit = engine.admit(slot, prompt, total, **fields.pop("admission", {}))
    for chunk in chunks_of(slot, len(prompt), size, **fields):
        result = engine.runner.execute(StepPlan(admit=[] if chunk.start else [admit], prefill=[chunk]))
    return admit, result


def entries(engine, admit: Admit, end: int, rank: int = 0) -> torch.Tensor:
    """Return the entries of a sequence in the pages of a rank, `[end, C]`."""
    return pools_of(engine)[rank].k[LAYER][list(admit.pages)][:, 0].flatten(0, 1)[:end]


def sent(source, target, prompt: list[int], from_pages, has_kv: bool = True, aux_slot: int = 3):
    """Hand a prompt over as transfers do, and draw its first token there."""
    admit = target.admit(5, prompt, len(prompt) + 20, kv_len=len(prompt))
    there = list(admit.pages[: len(from_pages)])
    for pool in pools_of(target):  # a row is whole on every rank
        for mine, theirs in zip(pools_of(source)[0].regions, pool.regions, strict=True):
            theirs[there] = mine[list(from_pages)]
    pools_of(target)[0].aux[1] = pools_of(source)[0].aux[aux_slot]
    return admit, target.runner.execute(StepPlan(admit=[admit], first_tokens=[FirstToken(5, 1, has_kv)]))
