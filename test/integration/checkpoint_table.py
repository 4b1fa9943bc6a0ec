"""Checkpoints of the list (`support/checkpoints.py`) with random weights, and the ways that a prompt takes through the
engine: undivided, or computed by P, whose pages cross to D by a real transport. Each way gives logits.

Weights come from the classes of `transformers`, in the names of the published files. A way is a number of ranks on
both sides, a chunk size, and what happens to the sequence between two of its tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import transformers
from engine_checkpoints import GREEDY, PAGE_SIZE, Engine, GreedySampler, chunks_of
from safetensors.torch import load_file, save_file
from support.checkpoints import Row, config_of, write_row_config
from support.quantised_weights import encode
from thread_ranks import Ranks

from chitu.engine.executor import Admit, CopyPage, CopyState, FirstToken, Offload, Restore, StepPlan
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.shard_writer import TransferKVChunk, open_shards
from chitu.kv_transfer.transports.shm import ShmTransport
from chitu.kv_transfer.transports.transport import Transport
from chitu.models.config_keys import TEXT_DECODERS
from chitu.protocol import PROTOCOL_VERSION, KVArgsRegisterInfo

LENGTHS = (7, 90, 203)
"""Lengths of the prompts of a batch; the shrunk windows, ropes and chunks are shorter than the last two."""
NUM_DECODES = 4
NUM_PAGES = 384
"""Pages of an instance. None is used twice, so that what a sequence leaves in one is no other's."""
TOLERANCE = 1e-5
"""Bound on the error as a share of the largest logit, in float32."""


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Return prompts without the ids of images and other special tokens."""
    source = random.Random(11)
    return [[source.randrange(10, 480) for _ in range(length)] for length in lengths]


@dataclass
class Checkpoint:
    """A folder, and the model by which it is judged."""

    folder: Path
    reference: transformers.PreTrainedModel
    _known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def logits(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """Return the logits, `[len(tokens), vocabulary]`, after the prompt and after each of these tokens but the
        last, by one forward of `transformers`."""
        known = (*prompt, *tokens[:-1])
        if known not in self._known:
            with torch.inference_mode():
                positions = torch.arange(len(known)).unsqueeze(0)  # which some models need to be right
                out = self.reference(torch.tensor([known]), position_ids=positions, use_cache=False)
            self._known[known] = out.logits[0, -len(tokens) :].float()
        return self._known[known]


def randomise(model: transformers.PreTrainedModel) -> None:
    """Draw all weights, biases and norms, so that omitting one shows."""
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            last = name.rpartition(".")[2]
            if not parameter.is_floating_point() or "inv_freq" in name or last in ("std_bias", "embed_scale"):
                continue
            if last in ("A_log", "D") or ("norm" in name and parameter.dim() == 1):
                middle = float(parameter.any())  # norms that add 1 to their weights begin with zeros
                parameter.uniform_(middle - 0.5, middle + 0.5)
            elif "bias" in last or last == "sinks":
                parameter.normal_(0, 0.3)
            elif isinstance(parameter, torch.nn.Parameter):
                parameter.normal_(0, 0.1)


def make_checkpoint(row: Row, folder: Path) -> Checkpoint:
    """Write the row's folder with random weights: float32, or quantised in the row's form, which the reference has
    dequantised."""
    config, quantization = config_of(row), {}
    for part in (config, config.get("text_config", {})):
        quantization |= part.pop("quantization_config", None) or {}
    outer = TEXT_DECODERS.get(config["architectures"][0])
    config = config if outer is None else config["text_config"]
    model_class = getattr(transformers, config["architectures"][0])
    config["model_type"] = model_class.config_class.model_type  # by which it names tensors; kimi_k2 is deepseek_v3
    torch.manual_seed(sum(row.name.encode()))
    model = model_class(model_class.config_class.from_dict(config)).float().eval()
    randomise(model)
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    if row.form:
        plain = folder / "dequantised"
        model.save_pretrained(plain)
        small, large = encode(row.form, load_file(folder / "model.safetensors"), quantization)
        assert len(small) > len(large), "nothing is quantised"
        for where, tensors in ((folder, small), (plain, large)):
            copies = {name: each.contiguous().clone() for name, each in tensors.items()}
            save_file(copies, where / "model.safetensors", metadata={"format": "pt"})
        model = model_class.from_pretrained(plain, dtype=torch.float32).eval()
    if outer is not None:
        tensors = {outer.prefix + name: each for name, each in load_file(folder / "model.safetensors").items()}
        tensors["vision_tower.patch_embed.proj.weight"] = torch.ones(4, 3)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_row_config(row, folder)
    return Checkpoint(folder, model)


class Recorder(GreedySampler):
    """Keeps the logits of every token, by slot."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: dict[int, list[torch.Tensor]] = {}
        self.avoided: dict[int, list[int]] = {}
        """Tokens that a slot may not sample."""

    def sample(self, logits: torch.Tensor, slots: list[int]) -> torch.Tensor:
        logits = logits.clone()
        for slot, row in zip(slots, logits, strict=True):
            self.logits.setdefault(slot, []).append(row.float().clone())
            row[self.avoided.pop(slot, [])] = -torch.inf
        return super().sample(logits, slots)


class Adapted(NamedTuple):
    """A folder whose sequences have LoRA adapters."""

    folder: Path
    adapters: Mapping[str, str]
    """Folders of the adapters, by name."""
    chosen: Mapping[int, int]
    """Number of the adapter of each slot that has one."""


Source = Path | Adapted


class Instance:
    """An engine of one rank, or of several that are threads, and what it recorded."""

    def __init__(self, source: Source, size: int = 1, *, sampling: bool = True, window_state: bool = False) -> None:
        folder, adapters, chosen = source if isinstance(source, Adapted) else Adapted(source, {}, {})
        self.recorder = Recorder()
        shared: dict[str, Any] = {
            "sampler": self.recorder,
            "sampling": sampling,
            "adapters": adapters,
            "window_state": window_state,
        }
        if size == 1:
            engine = Engine(folder, num_pages=NUM_PAGES, num_slots=6, **shared)
            self.pools = [engine.pool]
        else:
            engine = Ranks(folder, size, NUM_PAGES, **shared)  # type: ignore[assignment]
            self.pools = engine.pools  # type: ignore[attr-defined]
        engine.chosen = chosen
        self.engine = engine
        self.runner = engine.runner
        self.tokens: dict[int, list[int]] = {}

    def step(self, plan: StepPlan) -> None:
        result = self.runner.execute(plan)
        for slot, token in zip(result.slots, result.tokens, strict=True):
            self.tokens.setdefault(slot, []).append(token)

    def decode(self, slots: Sequence[int], steps: int) -> None:
        for _ in range(steps):
            self.step(StepPlan(decode=list(slots)))

    def forget(self, slots: Sequence[int]) -> None:
        """Release sequences and what is known of them. Their pages are not given to others."""
        self.step(StepPlan(release=list(slots)))
        self.tokens.clear()
        self.recorder.logits.clear()

    def close(self) -> None:
        if isinstance(self.engine, Ranks):
            self.engine.close()


@contextmanager
def instances(*made: Instance) -> Iterator[None]:
    yield
    for instance in made:
        instance.close()


Answers = list[tuple[list[int], list[int], torch.Tensor]]
"""Prompt, tokens and their logits `[tokens, vocabulary]` of each sequence."""


def answers_of(instance: Instance, asked: Sequence[list[int]]) -> Answers:
    recorded, tokens = instance.recorder.logits, instance.tokens
    return [(prompt, tokens[slot], torch.stack(recorded[slot])) for slot, prompt in enumerate(asked)]


def undivided(
    folder: Path, asked: Sequence[list[int]], chunk: int, size: int = 1, window_state: bool = False
) -> Answers:
    """Compute all prompts at once, each in chunks, then tokens together. `size`: ranks."""
    instance = Instance(folder, size, window_state=window_state)
    with instances(instance):
        return undivided_by(instance, asked, chunk)


def undivided_by(instance: Instance, asked: Sequence[list[int]], chunk: int) -> Answers:
    """Do the same on this instance, and leave no sequence behind."""
    admit = [instance.engine.admit(slot, prompt, len(prompt) + 8) for slot, prompt in enumerate(asked)]
    pending = [list(chunks_of(slot, len(prompt), chunk, sample=True)) for slot, prompt in enumerate(asked)]
    while any(pending):
        instance.step(StepPlan(admit=admit, prefill=[chunks.pop(0) for chunks in pending if chunks]))
        admit = []
    instance.decode(range(len(asked)), NUM_DECODES)
    answers = answers_of(instance, asked)
    instance.forget(range(len(asked)))
    return answers


class Link:
    """What carries pages, state and logits from P to D: the writers of each rank of P, over real transports."""

    def __init__(self, source: Instance, target: Instance, kind: type[Transport] = ShmTransport) -> None:
        self._transports = [kind() for _ in (*source.pools, *target.pools)]
        for transport, pool in zip(self._transports, (*source.pools, *target.pools), strict=True):
            transport.register(pool.arena_base, pool.arena_bytes)
        theirs = self._transports[len(source.pools) :]
        ranks = tuple(
            rank_memory(pool, rank, [transport.local_session()])
            for rank, (pool, transport) in enumerate(zip(target.pools, theirs, strict=True))
        )
        layout = target.pools[0].layout
        info = KVArgsRegisterInfo(PROTOCOL_VERSION, 0, 1, "127.0.0.1", 1, layout, ranks)
        self._writers = [
            open_shards(info, pool.layout, rank, pool, [transport])
            for rank, (pool, transport) in enumerate(zip(source.pools, self._transports, strict=False))
        ]
        self._num_layers = layout.num_layers

    def send(self, mine: Admit, theirs: Admit) -> None:
        """Write a prompt's pages, its state, and its logits row, whose number on both sides is that of P's slot."""
        whole = TransferKVChunk(0, self._num_layers, 0, len(mine.pages))
        for writer in self._writers:
            writer.write_pages([whole], mine.pages, theirs.pages[: len(mine.pages)], 30.0)
            if mine.state_slot >= 0:
                writer.write_state(mine.state_slot, theirs.state_slot, 30.0)
        self._writers[0].write_aux(mine.slot, mine.slot, 30.0)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        for transport in self._transports:
            transport.close()


def divided(
    folder: Path, asked: Sequence[list[int]], chunk: int, sizes: tuple[int, int] = (1, 1), **link: Any
) -> Answers:
    """Compute the prompts on P, in chunks, and the tokens on D. `sizes`: ranks of P and of D."""
    with pair(folder, sizes, **link) as (source, target, way):
        return divided_by(source, target, way, asked, chunk)


def divided_by(source: Instance, target: Instance, way: Link, asked: Sequence[list[int]], chunk: int) -> Answers:
    hand_over(source, target, way, asked, chunk)
    target.decode(range(len(asked)), NUM_DECODES)
    answers = answers_of(target, asked)
    forget_all(source, target, asked)
    return answers


@contextmanager
def pair(
    folder: Source, sizes: tuple[int, int] = (1, 1), window_state: bool = False, **link: Any
) -> Iterator[tuple[Instance, Instance, Link]]:
    """Yield P, D and what connects them."""
    source = Instance(folder, sizes[0], sampling=False, window_state=window_state)
    target = Instance(folder, sizes[1], window_state=window_state)
    with instances(source, target):
        way = Link(source, target, **link)
        yield source, target, way
        way.close()


def hand_over(source: Instance, target: Instance, way: Link, asked: Sequence[list[int]], chunk: int) -> list[Admit]:
    """Compute the prompts on P, send them, and sample their first tokens on D. Return the admissions on D."""
    here = [source.engine.admit(slot, prompt, len(prompt), sampling=None) for slot, prompt in enumerate(asked)]
    pending = [list(chunks_of(slot, len(prompt), chunk, aux_slot=slot)) for slot, prompt in enumerate(asked)]
    admit = here
    while any(pending):
        source.step(StepPlan(admit=admit, prefill=[chunks.pop(0) for chunks in pending if chunks]))
        admit = []
    there = [
        target.engine.admit(slot, prompt, len(prompt) + 24, kv_len=len(prompt), sampling=GREEDY)
        for slot, prompt in enumerate(asked)
    ]
    for mine, theirs in zip(here, there, strict=True):
        way.send(mine, theirs)
    target.step(StepPlan(admit=there, first_tokens=[FirstToken(slot, slot) for slot in range(len(asked))]))
    return there


def retracted(folder: Source, asked: Sequence[list[int]], **options: Any) -> Answers:
    with pair(folder, **options) as (source, target, way):
        return retracted_by(source, target, way, asked)


def retracted_by(source: Instance, target: Instance, way: Link, asked: Sequence[list[int]]) -> Answers:
    """Retract the last sequence after some tokens, give its pages to others, and let it go on."""
    there, slot = hand_over(source, target, way, asked, 37), len(asked) - 1
    target.decode(range(len(asked)), 2)
    target.step(StepPlan(offload=[Offload(slot, key=5)]))
    poison(target.pools, there[slot])
    target.decode(range(slot), 1)
    known = asked[slot] + target.tokens[slot]
    back = target.engine.admit(slot, known, len(known) + 8, kv_len=len(known) - 1, prompt_len=len(asked[slot]))
    target.step(StepPlan(admit=[back], restore=[Restore(slot, key=5)], decode=list(range(len(asked)))))
    target.decode(range(len(asked)), 2)
    answers = answers_of(target, asked)
    forget_all(source, target, asked)
    return answers


def continued(folder: Source, asked: Sequence[list[int]], **options: Any) -> Answers:
    with pair(folder, **options) as (source, target, way):
        return continued_by(source, target, way, asked)


def continued_by(source: Instance, target: Instance, way: Link, asked: Sequence[list[int]]) -> Answers:
    """Let D lose all that it has after some tokens, as another one has nothing, and continue: P computes prompts and
    tokens again."""
    there = hand_over(source, target, way, asked, 37)
    target.decode(range(len(asked)), NUM_DECODES)
    known = [prompt + target.tokens[slot] for slot, prompt in enumerate(asked)]
    forget_all(source, target, asked)
    for admit in there:
        poison(target.pools, admit)
    hand_over(source, target, way, known, 37)
    target.decode(range(len(asked)), NUM_DECODES)
    answers = answers_of(target, known)
    forget_all(source, target, asked)
    return answers


def forked(folder: Source, prompt: list[int]) -> Answers:
    with pair(folder) as (source, target, way):
        return forked_by(source, target, way, prompt)


def forked_by(source: Instance, target: Instance, way: Link, prompt: list[int]) -> Answers:
    """Let three sequences share the full pages of one prompt; the page that they write to and the state are copied.
    They sample different tokens."""
    (first,) = hand_over(source, target, way, [prompt], 37)
    whole = len(prompt) // PAGE_SIZE
    for slot in (1, 2):
        fork = target.engine.admit(slot, prompt, len(prompt) + 24, kv_len=len(prompt))
        shared = msgspec.structs.replace(fork, pages=first.pages[:whole] + fork.pages[whole:])
        copy_state = [CopyState(slot, first.state_slot)] if first.state_slot >= 0 else []
        copy = [CopyPage(slot, first.pages[whole], fork.pages[whole])] if len(prompt) % PAGE_SIZE else []
        target.recorder.avoided[slot] = [target.tokens[other][0] for other in range(slot)]
        first_tokens = [FirstToken(slot, 0)]
        target.step(StepPlan(admit=[shared], copy=copy, copy_state=copy_state, first_tokens=first_tokens))
    target.decode(range(3), NUM_DECODES)
    answers = answers_of(target, [prompt] * 3)
    source.forget([0])
    target.forget(range(3))
    return answers


def forget_all(source: Instance, target: Instance, asked: Sequence[list[int]]) -> None:
    for side in (source, target):
        side.forget(range(len(asked)))


def error_of(checkpoint: Checkpoint, answers: Answers) -> float:
    """Return the largest error of a logit as a share of the largest logit; infinite for one that is no number."""
    worst = 0.0
    for prompt, tokens, logits in answers:
        theirs = checkpoint.logits(prompt, tokens)
        apart = float((logits - theirs).abs().max() / theirs.abs().max())
        worst = max(worst, apart if apart == apart else float("inf"))
    return worst


def poison(pools: Sequence[KVPool], admit: Admit) -> None:
    """Overwrite pages and state of a sequence, as their next owner would."""
    for pool in pools:
        for region in pool.regions:
            region[list(admit.pages)] = float("nan")
        if admit.state_slot >= 0:
            pool.state_rows[admit.state_slot] = 255  # NaN
