"""Grammars in the sampler and in the engine: tokens are those of a plain loop over masked logits, whatever the other
sequences and interruptions; also with overlapping steps, retractions and faults."""

from __future__ import annotations

import random
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from engine_checkpoints import VOCAB_SIZE, make_prompt, write_checkpoint
from support.drafts import Guesses
from support.operations import Operations
from test_overlap_engine import DECODES, NUM_SLOTS, POISON_SEED, FaultySampler, serve
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from chitu.engine.sampler import Sampler
from chitu.engine.sampling_layout import bits_of, forbid_, forbidden
from chitu.grammars import GrammarCompiler, GrammarStore
from chitu.instance.drafts import source_of
from chitu.protocol import Grammar, Reasoning, SamplingParams
from chitu.tokenizer import Tokenizer

CPU = torch.device("cpu")
EOS = 2
WORDS = Grammar("regex", "([a-f]{1,5} ){9,20}[a-f]{3}")
NUMBERS = Grammar("json_schema", '{"type":"array","items":{"type":"integer"},"minItems":3,"maxItems":9}')
THOUGHT_OF = msgspec.structs.replace(NUMBERS, reasoning=Reasoning("[", "]", True))
"""Grammar behind a reasoning; with so few tokens its end mark comes early."""


_PAIRS = (a + b for a in "abcdefĠ0123456789,[]" for b in "abcdef0123")
PIECES = ["<a>", "<b>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *_PAIRS]


def make_compiler() -> GrammarCompiler:
    """Return a compiler for a byte-level tokenizer of all bytes and some pairs, which fits the checkpoint's
    vocabulary."""
    pieces = PIECES
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<a>", "<b>", "<eos>"])
    tokenizer = SimpleNamespace(
        eos_token_ids=(EOS,), vocab_size=len(pieces), to_json=backend.to_str, added_token_ids={}
    )
    assert len(pieces) < VOCAB_SIZE
    return GrammarCompiler(cast(Tokenizer, tokenizer), VOCAB_SIZE)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make_compiler()


@pytest.fixture
def grammars(compiler: GrammarCompiler) -> GrammarStore:
    return GrammarStore(lambda: compiler)


def step_logits(step: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(step)) * 3


def plain_loop(compiler: GrammarCompiler, params: SamplingParams, count: int) -> list[int]:
    """Sample without grammar support, over logits in which every forbidden token is already -inf; return the tokens."""
    assert params.grammar is not None
    sampler, matcher = Sampler(1, VOCAB_SIZE, CPU, (EOS,)), compiler.compile(params.grammar).matcher()
    sampler.admit(0, torch.tensor([7]), 1, msgspec.structs.replace(params, grammar=None))
    tokens: list[int] = []
    while len(tokens) < count and EOS not in tokens:
        flags = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[:VOCAB_SIZE]
        logits = step_logits(len(tokens), 1).masked_fill(torch.from_numpy(flags == 0), -torch.inf)
        tokens.append(int(sampler.sample(logits, [0])))
        matcher.consume([tokens[-1]])
    return tokens


PARAMS = [
    SamplingParams(99, temperature=1.0, seed=1, grammar=WORDS),
    SamplingParams(99, temperature=0.0, grammar=WORDS),
    SamplingParams(99, temperature=1.3, seed=2, top_k=5, repetition_penalty=1.4, frequency_penalty=0.5, grammar=WORDS),
    SamplingParams(99, temperature=0.9, seed=3, top_p=0.8, logit_bias={100: 5.0, EOS: -3.0}, grammar=NUMBERS),
    SamplingParams(99, temperature=0.9, seed=4, min_p=0.1, bad_words=((300,), (70, 71)), grammar=NUMBERS),
    SamplingParams(99, temperature=0.0, presence_penalty=1.5, grammar=NUMBERS),
    SamplingParams(99, temperature=1.0, seed=5, logit_bias={PIECES.index("]"): 4.0}, grammar=THOUGHT_OF),
]


def test_tokens_are_those_of_a_plain_loop_over_masked_logits_in_any_company(
    compiler: GrammarCompiler, grammars: GrammarStore
) -> None:
    free = SamplingParams(99, temperature=0.0)
    batch = [*PARAMS, free]
    sampler = Sampler(len(batch), VOCAB_SIZE, CPU, (EOS,), grammars=grammars)
    for slot, params in enumerate(batch):
        sampler.admit(slot, torch.tensor([7]), 1, params)
    outputs: list[list[int]] = [[] for _ in batch]
    for step in range(30):
        logits = step_logits(step, 1).expand(len(batch), -1).contiguous()
        before = logits.clone()
        for slot, token in enumerate(sampler.sample(logits, list(range(len(batch)))).tolist()):
            outputs[slot].append(token)
        assert torch.equal(logits, before) and not sampler.take_failures()
    for params, output in zip(PARAMS, outputs, strict=False):
        right = plain_loop(compiler, params, 30)
        assert output[: len(right)] == right, params
        assert set(output[len(right) :]) <= {EOS}
    assert outputs[-1] == [int(step_logits(step, 1).argmax()) for step in range(30)]


@pytest.mark.parametrize("params", PARAMS)
def test_a_request_that_is_admitted_with_its_tokens_goes_on_where_it_stopped(
    compiler: GrammarCompiler, grammars: GrammarStore, params: SamplingParams
) -> None:
    right = plain_loop(compiler, params, 30)
    for cut in (1, 5, len(right) - 1):
        sampler = Sampler(2, VOCAB_SIZE, CPU, (EOS,), grammars=grammars)
        sampler.admit(1, torch.tensor([7, *right[:cut]]), 1, params)
        assert [int(sampler.sample(step_logits(step, 1), [1])) for step in range(cut, len(right))] == right[cut:]


def test_an_end_that_min_tokens_holds_back_comes_where_nothing_else_can(grammars: GrammarStore) -> None:
    def length(grammar: Grammar, min_tokens: int) -> int:
        sampler = Sampler(1, VOCAB_SIZE, CPU, (EOS,), grammars=grammars)
        sampler.admit(0, torch.tensor([7]), 1, SamplingParams(99, min_tokens, logit_bias={EOS: 90.0}, grammar=grammar))
        tokens: list[int] = []
        while EOS not in tokens:
            tokens += sampler.sample(step_logits(len(tokens), 1), [0]).tolist()
        return len(tokens) - 1

    assert length(Grammar("regex", "[ab]+"), 0) == 1
    assert length(Grammar("regex", "[ab]+"), 9) == 9
    assert length(Grammar("regex", "[ab]{1,3}"), 9) <= 3


def test_allowed_tokens_bound_the_grammar_and_a_request_without_a_way_on_fails_alone(grammars: GrammarStore) -> None:
    sampler = Sampler(2, VOCAB_SIZE, CPU, (EOS,), grammars=grammars)
    few = tuple(PIECES.index(letter) for letter in "abc")  # these make a word, without the space after it
    sampler.admit(0, torch.tensor([7]), 1, SamplingParams(99, grammar=WORDS, allowed_token_ids=few))
    sampler.admit(1, torch.tensor([7]), 1, SamplingParams(99, grammar=WORDS))
    for step in range(6):
        tokens = sampler.sample(step_logits(step, 2), [0, 1])
        failures = sampler.take_failures()
        if failures:
            break
        assert int(tokens[0]) in few
    assert list(failures) == [0] and "allowed_token_ids" in failures[0]
    sampler.release(0)
    sampler.sample(step_logits(9, 1), [1])
    assert not sampler.take_failures()


def test_packed_masks_say_what_their_bits_say() -> None:
    ids = [0, 31, 32, 63, 64, 95, 499]
    packed = torch.from_numpy(np.stack([bits_of(ids, 500), bits_of([], 500), ~bits_of([], 500)]).view(np.int32))
    open_ids = [torch.nonzero(~row).flatten().tolist() for row in forbidden(packed, 500)]
    assert open_ids == [ids, [], list(range(500))]


def test_on_a_gpu_one_launch_forbids_what_all_masks_forbid(grammars: GrammarStore) -> None:
    """A launch, instead of seven operations that made flags of bits; nothing else is new for a grammar's row, but that
    its token is taken to the host."""
    pytest.importorskip("triton", reason="triton is in the dev extra")
    from chitu.ops.kernels.sampling import SamplingKernels

    kernels = SamplingKernels(1, VOCAB_SIZE, CPU, 256, 128)
    masks = np.random.default_rng(1).integers(0, 1 << 32, (3, -(-VOCAB_SIZE // 32)), np.uint32).view(np.int32)
    work, rows, packed = step_logits(3, 5), torch.tensor([4, 0, 2]), torch.from_numpy(masks)
    expected = work.clone()
    forbid_(expected, rows, packed)
    kernels.forbid_(work, rows, packed)
    assert torch.equal(work, expected) and 300 < int((work == -torch.inf).sum()) < 1200
    alone = Sampler(1, VOCAB_SIZE, CPU, (EOS,), kernels, grammars)
    alone.admit(0, torch.tensor([7]), 1, PARAMS[1])
    alone.sample(step_logits(0, 1), [0])
    logits = step_logits(1, 1)
    with Operations() as operations:
        alone.sample(logits, [0])
    of_interpreter = ("set_", "copy_")
    assert [name for name in operations.names if name not in of_interpreter] == [
        "index_select",
        "clamp",
        "index_select",
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("qwen3")
    write_checkpoint(path, "qwen3", num_layers=1)
    return path


SOON = {PIECES.index("]"): 3.0}
"""Bias by which one of two thoughts ends before its request is retracted, and one does not end."""
REQUESTS = list(
    zip(
        [make_prompt(length) for length in (3, 40, 16, 30, 25, 9, 31, 12)],
        [
            SamplingParams(36, temperature=1.0, seed=1, grammar=WORDS),
            SamplingParams(33, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True),
            SamplingParams(36, temperature=1.0, seed=5, repetition_penalty=1.3, min_tokens=20, grammar=WORDS),
            SamplingParams(36, temperature=1.0, seed=25, logit_bias=SOON, grammar=THOUGHT_OF),
            SamplingParams(36, temperature=0.0, ignore_eos=True),
            SamplingParams(30, temperature=1.0, seed=9, grammar=NUMBERS),
            SamplingParams(36, temperature=1.0, seed=3, logit_bias=SOON, grammar=THOUGHT_OF),
            SamplingParams(36, temperature=0.0, ignore_eos=True),
        ],
        strict=True,
    )
)


@pytest.mark.parametrize("recording", [None, DECODES], ids=["eager", "recorded"])
def test_overlap_retraction_drafts_and_a_step_that_raises_change_no_token(folder: Any, recording: Any) -> None:
    def served(overlap: bool, requests: list[Any], is_faulty: bool = False, drafts: Any = None) -> Any:
        grammars = GrammarStore(make_compiler)
        wait([grammars.submit(grammar) for grammar in (WORDS, NUMBERS, THOUGHT_OF)])
        kind = FaultySampler if is_faulty else Sampler
        sampler = kind(NUM_SLOTS, VOCAB_SIZE, CPU, (EOS,), grammars=grammars)
        return serve(folder, requests, overlap, recording, sampler, grammars, drafts)

    off, on = served(False, REQUESTS), served(True, REQUESTS)
    assert on.retractions > 0 and off.retractions > 0, "the pool is large enough for everybody"
    assert on.reasons == off.reasons and set(on.reasons) == set(range(len(REQUESTS) - 1))
    assert {room: on.tokens[room] for room in on.reasons} == {room: off.tokens[room] for room in off.reasons}

    def right(sequence: Any) -> Guesses:
        return Guesses(sequence.prompt_len, on.tokens[sequence.room[-1]], 0.9, random.Random(1), VOCAB_SIZE)

    for drafts in (source_of, right):
        drafted = served(drafts is right, REQUESTS, drafts=drafts)
        assert drafted.reasons == on.reasons
        assert {room: drafted.tokens[room] for room in on.reasons} == {room: on.tokens[room] for room in on.reasons}
    matcher = make_compiler().compile(WORDS).matcher()
    matcher.consume(on.tokens[0])
    matcher.mask()  # all of its tokens were allowed
    bad = (make_prompt(25), SamplingParams(30, temperature=1.0, seed=POISON_SEED, grammar=WORDS))
    for drafts in (None, source_of):
        beside = served(True, [*REQUESTS[:2], bad, *REQUESTS[2:]], is_faulty=True, drafts=drafts)
        assert (beside.reasons.pop(2), beside.tokens.pop(2, [])) == ("error", [])
        assert list(beside.reasons.values()).count("error") == 0
        others = {room - (room > 2): beside.tokens[room] for room in beside.reasons}
        assert others == {room: on.tokens[room] for room in others}
