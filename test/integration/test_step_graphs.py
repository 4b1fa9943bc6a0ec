"""Recorded steps give the tokens of steps that are not recorded. Here the twin records: the same function again, on the
same tensors, padded to the same buckets. On a GPU, `test/gpu` runs the same cases with CUDA graphs."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from engine_checkpoints import Engine, chunks_of, expected_tokens, generate, make_prompt, write_checkpoint
from thread_ranks import Ranks

from chitu.engine.build import load_model
from chitu.engine.executor import Offload, Restore, StepPlan
from chitu.engine.step_graphs import PREFILL_SIZES, CudaRecorder, EagerRecorder, Recording
from chitu.errors import Internal
from chitu.kv_cache.pool import KVPool
from chitu.models.tensors import tensors_of, why_unlike
from chitu.ops.torch_ops import TorchOps

DECODES = Recording(EagerRecorder(), decode_sizes=(1, 2, 4), prefill_sizes=())
"""Records decodes only: torch's operations read a batch's host side for spans, so prefill cannot be recorded with
them."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, write_checkpoint(folder, "qwen3")


pytestmark = pytest.mark.usefixtures("one_thread")


def test_tokens_are_right_in_every_bucket_and_as_sequences_come_and_go(checkpoint):
    folder, reference = checkpoint
    prompts = [make_prompt(length) for length in (3, 40, 16, 150, 7)]
    expected = [expected_tokens(reference, prompt, 10) for prompt in prompts]
    engine = Engine(folder, ops=TorchOps(), recording=DECODES, max_model_len=256)
    assert generate(engine, prompts, 10) == expected, "five of eight slots: a bucket of eight, three rows of it padding"
    assert generate(engine, prompts[:3], 10) == expected[:3]
    assert generate(engine, prompts[3:4], 10) == expected[3:4]


def test_rows_that_pad_a_bucket_write_into_nobodys_page(checkpoint):
    folder, _ = checkpoint
    engine = Engine(folder, ops=TorchOps(), recording=DECODES, max_model_len=256)
    prompts = [make_prompt(20), make_prompt(21), make_prompt(5)]
    generate(engine, prompts[:1], 2)  # the recording itself writes once
    before = [region.clone() for region in (*engine.pool.k, *engine.pool.v)]
    admit = [engine.admit(slot, prompt, 64) for slot, prompt in enumerate(prompts)]
    own = sorted(page for entry in admit for page in entry.pages)
    plan = StepPlan(
        admit=admit, prefill=[next(iter(chunks_of(s, len(p), 64, sample=True))) for s, p in enumerate(prompts)]
    )
    engine.runner.execute(plan)
    for _ in range(3):
        engine.runner.execute(StepPlan(decode=[0, 1, 2]))
    others = [page for page in range(engine.pool.num_pages) if page not in own]
    for region, old in zip((*engine.pool.k, *engine.pool.v), before, strict=True):
        assert torch.equal(region[others], old[others])
        assert not torch.equal(region[own], old[own])


def test_a_slot_that_was_away_goes_on_where_it_stopped(checkpoint):
    """The recorded batch has the same list of slots again, at other positions."""
    folder, reference = checkpoint
    engine = Engine(folder, ops=TorchOps(), recording=DECODES, max_model_len=256)
    prompt = make_prompt(30)
    expected = expected_tokens(reference, prompt, 9)
    admit = engine.admit(0, prompt, 64)
    tokens = engine.runner.execute(StepPlan(admit=[admit], prefill=list(chunks_of(0, 30, 64, sample=True)))).tokens
    for _ in range(3):
        tokens += engine.runner.execute(StepPlan(decode=[0])).tokens
    engine.runner.execute(StepPlan(offload=[Offload(0, 1)]))
    other = make_prompt(12, seed=5)
    for_other = engine.runner.execute(
        StepPlan(admit=[engine.admit(0, other, 32)], prefill=list(chunks_of(0, 12, 64, sample=True)))
    ).tokens
    for _ in range(2):
        for_other += engine.runner.execute(StepPlan(decode=[0])).tokens
    assert for_other == expected_tokens(reference, other, 3)
    back = engine.admit(0, prompt + tokens, 64, kv_len=33, prompt_len=30)
    engine.runner.execute(StepPlan(release=[0], admit=[back], restore=[Restore(0, 1)]))
    for _ in range(5):
        tokens += engine.runner.execute(StepPlan(decode=[0])).tokens
    assert tokens == expected


def test_other_weights_come_to_where_the_old_ones_are_so_recorded_steps_compute_with_them(checkpoint, tmp_path):
    folder, reference = checkpoint
    other = write_checkpoint(tmp_path, "qwen3")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    other.save_pretrained(tmp_path)
    engine = Engine(folder, ops=TorchOps(), recording=DECODES, max_model_len=256)
    prompts = [make_prompt(length) for length in (3, 40)]
    assert generate(engine, prompts, 10) == [expected_tokens(reference, prompt, 10) for prompt in prompts]
    new = load_model(tmp_path, "float32", max_model_len=256, ops=TorchOps())
    places = [tensor.data_ptr() for _, tensor in tensors_of(engine.runner.model)]
    assert why_unlike(engine.runner.model, new) == "" and len(places) > 20
    with torch.inference_mode():
        engine.runner.change_model(new)
    expected = [expected_tokens(other, prompt, 10) for prompt in prompts]
    assert generate(engine, prompts, 10) == expected
    assert expected != [expected_tokens(reference, prompt, 10) for prompt in prompts]
    assert [tensor.data_ptr() for _, tensor in tensors_of(engine.runner.model)] == places


def test_the_last_token_of_a_full_sequence_overwrites_nothing(checkpoint):
    folder, reference = checkpoint
    engine = Engine(folder, ops=TorchOps(), recording=DECODES, max_model_len=32)
    prompts = [make_prompt(20), make_prompt(29)]
    expected = [expected_tokens(reference, prompts[0], 12), expected_tokens(reference, prompts[1], 3)]
    outputs: list[list[int]] = [[], []]
    admit = [engine.admit(slot, prompt, 32) for slot, prompt in enumerate(prompts)]
    plan = StepPlan(
        admit=admit, prefill=[next(iter(chunks_of(s, len(p), 64, sample=True))) for s, p in enumerate(prompts)]
    )
    while len(outputs[0]) < 12:
        result = engine.runner.execute(plan)
        for slot, token in zip(result.slots, result.tokens, strict=True):
            outputs[slot].append(token)
        plan = StepPlan(decode=[0, 1] if len(outputs[1]) < 4 else [0])
    assert [outputs[0], outputs[1][:3]] == expected


@pytest.mark.engine
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_recorded_prefills_with_the_kernels_of_the_gpu(num_ranks, tmp_path):
    pytest.importorskip("triton", reason="triton is in the dev extra")
    from chitu.ops.triton_ops import TritonOps

    reference = write_checkpoint(tmp_path, "qwen3", num_layers=1)
    recording = Recording(EagerRecorder(), decode_sizes=(1,), prefill_sizes=(72,))
    options = {"recording": recording, "max_model_len": 128, "num_slots": 1}
    if num_ranks == 1:
        engine = Engine(tmp_path, ops=TritonOps(4), **options)
    else:
        engine = Ranks(tmp_path, num_ranks, ops=lambda: OneAtATime(TritonOps(4)), **options)
    prompt = make_prompt(70)
    assert generate(engine, [prompt], 2, chunk_size=70) == [expected_tokens(reference, prompt, 2)]
    if num_ranks > 1:
        engine.close()


class OneAtATime:
    """Operations of ranks that are threads, on an interpreter that takes one call at a time."""

    _lock = threading.Lock()

    def __init__(self, ops) -> None:
        self._ops = ops

    def __getattr__(self, name):
        found = getattr(self._ops, name)
        if not callable(found):
            return found

        def call(*args, **kwargs):
            with self._lock:
                return found(*args, **kwargs)

        return call


def test_all_recordings_share_one_stream(monkeypatch):
    """torch keeps a workspace of cuBLAS for each stream, outside of the memory that the budget knows."""
    device, made, used = torch.device("cuda:1"), [], []

    def new_stream(_device):
        made.append(SimpleNamespace(device=device, wait_stream=lambda other: None))
        return made[-1]

    @contextmanager
    def noted(stream):
        used.append(stream)
        yield

    current = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: current)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: noted(None))
    monkeypatch.setattr(torch.cuda, "stream", noted)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=len))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, stream, capture_error_mode: noted(stream))
    recorder, runs = CudaRecorder(device), []
    for number in range(5):
        recorder.record(lambda number=number: runs.append(number))
    assert len(made) == 1 and [stream for stream in used if stream is not None] == made * 10
    assert runs == [number for number in range(5) for _ in range(3)]


def test_an_instance_records_what_it_runs():
    for computes, sizes in ((True, PREFILL_SIZES), (False, ())):
        assert Recording.of(EagerRecorder(), computes).prefill_sizes == sizes


def test_without_a_scratch_page_nothing_is_recorded(checkpoint):
    folder, _ = checkpoint
    engine = Engine(folder)
    pool = KVPool(engine.pool.layout, 4, 1)
    with pytest.raises(Internal, match="scratch"):
        type(engine.runner)(engine.spec, engine.runner._model, pool, 2, 64, None, DECODES)
