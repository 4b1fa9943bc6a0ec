"""The self-check of a generic model: what the engine does with it gives what transformers does.

Owns the promise of the family, which no list of names could keep: three random sequences, in chunks and in one batch,
through pages, against the same modules with the library's own attention, each sequence alone. The pages begin as NaN,
so what is read but was not written shows. Windows, chunks of attention and lengths that scale attention are shrunk for
both sides, so that the sequences exceed them. A right model differs by rounding, a wrong one by several percent at
least. Runs once, on the thread that builds the engine, before the pool is allocated. With several ranks each checks
its own part, without the sums over the ranks, which both sides leave out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from chitu.errors import UnsupportedModel
from chitu.kv_cache.state_row import shape_of
from chitu.models.config import ModelSpec
from chitu.models.generic.library import library_version
from chitu.models.model import Model
from chitu.models.window_state import KEYS, VALUES
from chitu.ops.interface import Batch, Span, tiles_of
from chitu.protocol import StateTensor

PAGE_SIZE = 16
LENGTHS = (5, 24, 45)
"""Tokens of the sequences: one within a page, one of two pages, one of three."""
CHUNK = 20
SINGLE = 2
"""Last tokens of each sequence, which are computed one by one. No chunk of the others is of one token."""
SHRUNK = 8
"""Tokens of windows and the like, instead of thousands."""
LIMITS = ("sliding_window", "attention_chunk_size", "floor_scale")
"""Attributes of configs and modules that hold such lengths."""
BOUND = 1e-3
"""Largest error in float32, as a share of the largest logit."""
BOUND_16_BITS = 5e-2
"""The same with fewer bits, for the median of the rows of a kind: rounding may send single rows to other experts."""

logger = logging.getLogger(__name__)


class Checked(Model, Protocol):
    """A model whose modules can be asked for their own result."""

    def reference(self, token_ids_T: torch.Tensor, num_single: int) -> torch.Tensor:
        """Return the hidden states of one sequence by the library's attention, without pages. `num_single`: last tokens
        that are computed one by one if that may differ."""
        ...

    def own_logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return logits on any rank."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Let this rank compute its part without the sums over the ranks."""
        ...

    def parts_with_limits(self) -> Sequence[Any]:
        """Return modules and configs that may have attributes of `LIMITS`."""
        ...


class ScratchCache:
    """Pages and states of a few sequences: `KVViews`."""

    def __init__(self, spec: ModelSpec, tp_size: int, dtype: torch.dtype, device: torch.device) -> None:
        num_pages = sum(-(-length // PAGE_SIZE) for length in LENGTHS) + 1  # one of nobody
        self.k = [torch.empty(0, device=device)] * spec.num_layers  # so are those of layers without attention
        self.v = list(self.k)
        for group in spec.groups:
            heads = max(1, group.num_kv_heads // tp_size)
            for layer in group.layers:
                pages = [
                    torch.full((num_pages, heads, PAGE_SIZE, width), torch.nan, dtype=dtype, device=device)
                    for width in group.head_dims
                ]
                self.k[layer], self.v[layer] = pages[0], pages[-1]
        self.states: Mapping[tuple[int, str], torch.Tensor] = {
            (each.layer, each.name): torch.zeros(
                (len(LENGTHS), *_shrunk_ring(each, tp_size)),
                dtype=dtype if each.dtype == "auto" else getattr(torch, each.dtype),
                device=device,
            )
            for each in spec.state
        }
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5)).tolist()
        self.page_table = torch.full((len(LENGTHS), -(-max(LENGTHS) // PAGE_SIZE)), order.pop(), dtype=torch.int64)
        for slot, length in enumerate(LENGTHS):
            for index in range(-(-length // PAGE_SIZE)):
                self.page_table[slot, index] = order.pop()
        self.page_table = self.page_table.to(device)


def _shrunk_ring(tensor: StateTensor, tp_size: int) -> tuple[int, ...]:
    """Return the shape of a rank's state; of the ring of a window as short as the window will be."""
    first, *others = shape_of(tensor, tp_size)
    if tensor.name in (KEYS, VALUES):
        others[0] = min(others[0], SHRUNK)
    return first, *others


class CheckRows(NamedTuple):
    """Rows of a step: of a sequence, from a position on; `kind` says how they are computed."""

    slot: int
    start: int
    length: int
    kind: str


def steps(end_of: Callable[[int, int], int] = lambda slot, end: end) -> Iterator[list[CheckRows]]:
    """Yield steps that compute all sequences: chunks, and beside them the last tokens of shorter ones as decodes.
    `end_of` gives where a slot's chunk ends instead of at this position."""
    done = [0] * len(LENGTHS)
    while any(position < length for position, length in zip(done, LENGTHS, strict=True)):
        step = []
        for slot, length in enumerate(LENGTHS):
            prompt = length - SINGLE
            if done[slot] < prompt:
                kind = "a later chunk" if done[slot] else "a first chunk"
                end = end_of(slot, min(done[slot] + CHUNK, prompt))
                step.append(CheckRows(slot, done[slot], end - done[slot], kind))
            elif done[slot] < length:
                step.append(CheckRows(slot, done[slot], 1, "a single token"))
        for rows in step:
            done[rows.slot] += rows.length
        yield sorted(step, key=lambda rows: rows.kind == "a single token")


def batch_of(step: Sequence[CheckRows], cache: ScratchCache, has_state: bool) -> Batch:
    """Return the batch of a step."""
    device, spans, row = cache.page_table.device, [], 0
    slots = [rows.slot for rows in step for _ in range(rows.length)]
    positions = [rows.start + index for rows in step for index in range(rows.length)]
    decodes = [rows for rows in step if rows.kind == "a single token"]
    for rows in step[: len(step) - len(decodes)]:
        spans.append(Span(row, rows.length, rows.slot, rows.start, rows.slot if has_state else -1))
        row += rows.length
    return Batch(
        slots_T=torch.tensor(slots, device=device),
        positions_T=torch.tensor(positions, device=device),
        page_table=cache.page_table,
        spans=tuple(spans),
        spans_X4=torch.tensor([(s.row, s.length, s.slot, s.start) for s in spans], dtype=torch.int64).view(-1, 4),
        tiles_Y4=torch.tensor(tiles_of(spans), dtype=torch.int64, device=device).view(-1, 4),
        decode_row=row,
        decode_slots=tuple(rows.slot for rows in decodes),
        max_decode_len=max((rows.start + 1 for rows in decodes), default=0),
        decode_states=tuple(rows.slot for rows in decodes) if has_state else (),
    )


@contextmanager
def shrunk(parts: Sequence[Any]) -> Iterator[None]:
    """Let all windows and the like be short."""
    before = []
    for part in parts:
        for name in LIMITS:
            value = vars(part).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > SHRUNK:
                before.append((part, name, value))
    try:
        for part, name, _ in before:
            setattr(part, name, SHRUNK)
        yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)


def check(
    model: Checked, spec: ModelSpec, device: torch.device, tp_size: int = 1, fuse: Callable[[], None] | None = None
) -> None:
    """Raise UnsupportedModel if pages and batches change what the model computes, or what `fuse` does to its modules:
    it is called when their own results are known. Logs what it cost."""
    started = time.perf_counter()
    try:
        with torch.inference_mode(), model.alone(), shrunk(model.parts_with_limits()):
            errors = errors_of(model, spec, device, tp_size, fuse)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"{spec.architecture} is not supported: the code of transformers {library_version()} cannot be computed in "
            f"batches over pages: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    for kind, found, bound in beyond(errors, model.dtype == torch.float32):
        raise UnsupportedModel(
            f"{spec.architecture} is not supported: computed in batches over pages, {kind} of a sequence has "
            f"logits that are {found:.2g} of the largest away from those of transformers {library_version()} "
            f"(bound {bound:g}): it keeps or reads something that this project does not know"
        )
    worst = max(float(apart.max()) for apart in errors.values())
    logger.info(
        "%s, computed by transformers %s, was checked in %.1f s: largest error %.1e of the largest logit",
        spec.architecture,
        library_version(),
        time.perf_counter() - started,
        worst,
    )


def beyond(errors: Mapping[str, torch.Tensor], is_exact: bool) -> Iterator[tuple[str, float, float]]:
    """Yield the kinds of rows whose errors are beyond the bound, with what was found and the bound. `is_exact`: whether
    numbers have 32 bits."""
    for kind, apart in errors.items():
        found, bound = float(apart.max() if is_exact else apart.median()), BOUND if is_exact else BOUND_16_BITS
        if not found <= bound:
            yield kind, found, bound


def errors_of(
    model: Checked, spec: ModelSpec, device: torch.device, tp_size: int, fuse: Callable[[], None] | None = None
) -> dict[str, torch.Tensor]:
    """Return, by kind of row, the error of each row's logits as a share of the largest of its sequence."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(spec.vocab_size, (length,), generator=generator).to(device) for length in LENGTHS]
    theirs = [model.own_logits(model.reference(prompt, SINGLE)) for prompt in prompts]
    if fuse is not None:
        fuse()
    cache = ScratchCache(spec, tp_size, model.dtype, device)
    errors: dict[str, list[torch.Tensor]] = {}
    for step in steps():
        tokens_T = torch.cat([prompts[rows.slot][rows.start : rows.start + rows.length] for rows in step])
        hidden_TD = model.forward(tokens_T, batch_of(step, cache, bool(spec.state)), cache)
        logits_TV = model.own_logits(hidden_TD)
        first = 0
        for rows in step:
            wanted, own = theirs[rows.slot], logits_TV[first : first + rows.length]
            apart = (own - wanted[rows.start : rows.start + rows.length]).abs().amax(1)
            errors.setdefault(rows.kind, []).append(apart / wanted.abs().max())
            first += rows.length
    return {kind: torch.cat(each).nan_to_num(torch.inf, torch.inf).cpu() for kind, each in errors.items()}
