"""Models with recurrent layers and gpt-oss on several tensor-parallel ranks: logits of transformers, states that cross
between unlike numbers of ranks, and what is refused by name. Ranks are threads but in the clusters."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from checkpoint_table import (
    Checkpoint,
    Instance,
    continued_by,
    divided_by,
    error_of,
    instances,
    pair,
    prompts,
    retracted_by,
    undivided,
)
from engine_checkpoints import PAGE_SIZE
from nursery import WITH_TRANSFORMERS
from recurrent_checkpoints import FAMILIES, HYBRID, Family, write_family
from thread_ranks import Meeting, ThreadRank

from chitu.assets import TINY_MODEL_DIR
from chitu.config.load import load_topology
from chitu.engine.build import load_model
from chitu.engine.executor import CopyState, KeepState, PrefillChunk, StepPlan
from chitu.errors import ConfigError
from chitu.kv_cache.pool import KVPool
from chitu.kv_cache.state_row import line_copies, state_bytes_of
from chitu.kv_cache.state_sums import state_seals_of
from chitu.launch.local import LocalCluster
from chitu.models.generic.mixer_cuts import cut_of
from chitu.models.generic.model import GenericModel
from chitu.ops.torch_ops import TorchOps
from chitu.protocol.snapshot import ClusterSnapshot

TOLERANCE = 1e-5
GPT_OSS = Family(
    "GptOss",
    {
        **HYBRID,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
)
FALCON = {**FAMILIES["falcon_h1"].keys, "mamba_d_ssm": 128, "mamba_n_heads": 8}
ALL = {**FAMILIES, "gpt_oss": GPT_OSS, "falcon_of_8_heads": Family("FalconH1", FALCON)}
IN_CI = (
    "qwen3_next",
    "granite_one_group",
    "nemotron_3",
    "kimi_linear",
    "lfm2",
    "jamba",
    "falcon_of_8_heads",
    "gpt_oss",
)
"""One of each kind of mixer, and gpt-oss."""
OF_4_RANKS = ("qwen3_next", "nemotron_3", "gpt_oss")
"""Families that CI computes on 4 ranks, which hold copies of KV heads, key heads and groups. All others it computes on
2."""
CROSSINGS = {"qwen3_next": [(2, 1), (2, 4)], "granite_one_group": [(1, 2), (4, 2)], "gpt_oss": [(2, 4)]}
"""Numbers of ranks of P and D in CI: each direction of each factor, once of heads and once of copies."""


def by_hand_unless(in_ci: bool) -> Any:
    return () if in_ci else pytest.mark.by_hand


SIZES = [
    pytest.param(
        name, size, id=f"{name}-tp{size}", marks=by_hand_unless(name in IN_CI and (size == 4) == (name in OF_4_RANKS))
    )
    for name in ALL
    for size in (2, 4)
]
PAIRS = [
    pytest.param(name, sizes, id=f"{name}-{sizes[0]}to{sizes[1]}", marks=by_hand_unless(sizes in in_ci))
    for name, in_ci in CROSSINGS.items()
    for sizes in ((2, 1), (1, 2), (4, 2), (2, 4))
]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            made[name] = write_family(tmp_path_factory.mktemp(name), ALL[name])
        return made[name]

    return get


@pytest.mark.engine
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_logits_of_several_ranks_are_those_of_transformers(checkpoints: Any, name: str, size: int) -> None:
    """Ragged prompts in chunks, then tokens of all together. Of 2 KV heads, key heads or groups 4 ranks hold copies."""
    checkpoint = checkpoints(name)
    if name == "falcon_h1" and size == 4:
        pytest.skip("its 6 heads are refused below")
    assert error_of(checkpoint, undivided(checkpoint.folder, prompts((3, 51, 30)), 23, size)) < TOLERANCE


@pytest.mark.engine
@pytest.mark.parametrize("size", [2, 4], ids=lambda size: f"tp{size}")
def test_windows_in_state_rows_are_cut_and_copied_like_kv_heads(checkpoints: Any, size: int) -> None:
    checkpoint = checkpoints("gpt_oss")
    assert error_of(checkpoint, undivided(checkpoint.folder, prompts((3, 51, 80)), 23, size, True)) < TOLERANCE


def whole_states(pools: Sequence[KVPool], row: int) -> dict[tuple[int, str], torch.Tensor]:
    """Return the states of a row as in the whole model, put together from the ranks. Copies must have the same bits."""
    whole: dict[tuple[int, str], torch.Tensor] = {}
    for tensor in pools[0].layout.state:
        found = torch.full(tensor.shape, torch.nan)
        for rank, pool in enumerate(pools):
            part, first, start = pool.states[tensor.layer, tensor.name][row], 0, 0
            sizes = tensor.cut or tensor.shape[:1]
            for size, num_heads in zip(sizes, tensor.heads or sizes, strict=True):
                lines = size // num_heads * max(1, num_heads // len(pools))
                place = start + rank * num_heads // len(pools) * (size // num_heads)
                mine, theirs = part[first : first + lines], found[place : place + lines]
                assert theirs.isnan().all() or torch.equal(mine, theirs)
                found[place : place + lines] = mine
                first, start = first + lines, start + size
            assert first == part.shape[0]
        assert not found.isnan().any()
        whole[tensor.layer, tensor.name] = found
    return whole


@pytest.mark.engine
@pytest.mark.parametrize(("name", "sizes"), PAIRS)
def test_states_cross_between_unlike_numbers_of_ranks(checkpoints: Any, name: str, sizes: tuple[int, int]) -> None:
    """Over shared memory: D has P's states to the bit, the sums of both sides agree, and the logits are right."""
    checkpoint, asked = checkpoints(name), prompts((61, 44))
    with pair(checkpoint.folder, sizes) as (source, target, way):
        assert error_of(checkpoint, divided_by(source, target, way, asked, 23)) < TOLERANCE
        again = target.engine.admit(5, asked[0], len(asked[0]) + 8, kv_len=len(asked[0]))
        sent = source.engine.admit(0, asked[0], len(asked[0]))
        way.send(msgspec.structs.replace(sent, slot=0), again)  # D has gone on from the first row
        if name == "gpt_oss":
            return
        rows = sent.state_slot, again.state_slot
        here, there = (whole_states(side.pools, row) for side, row in zip((source, target), rows, strict=True))
        assert here.keys() == there.keys()
        assert all(torch.equal(here[key], there[key]) for key in here)
        sums = [
            sum(
                state_seals_of(pool, rank, counts_copies=side is target).seal(row).sum
                for rank, pool in enumerate(pools)
            )
            for side, row, pools in zip((source, target), rows, (source.pools, target.pools), strict=True)
        ]
        assert (sums[0] * line_copies(target.pools[0].layout) - sums[1]) % (1 << 64) == 0


@pytest.mark.engine
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_has_its_part_of_a_state_and_copies_of_b_and_c(checkpoints: Any, size: int) -> None:
    """Granite-4-H with one group: 3 layers of 128 inner channels, 16 of B and C each, 4 inputs of each channel."""
    with instances(instance := Instance(checkpoints("granite_one_group").folder, size)):
        channels = 128 + 2 * 16 * size
        recurrent = 8 * 16 * 16
        assert state_bytes_of(instance.pools[0].layout) == 3 * (channels * 4 + recurrent) * 4
        assert instance.pools[-1].states[0, "conv"].shape[1:] == (128 // size + 2 * 16, 4)
        assert instance.pools[-1].states[0, "recurrent"].shape[1:] == (8 // size, 16, 16)


@pytest.mark.engine
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["2to1", "1to2"])
def test_a_sequence_goes_on_after_a_retraction_and_on_another_d(checkpoints: Any, sizes: tuple[int, int]) -> None:
    checkpoint, asked = checkpoints("granite_one_group"), prompts((20, 40))
    with pair(checkpoint.folder, sizes) as way:
        assert error_of(checkpoint, retracted_by(*way, asked)) < TOLERANCE
        assert error_of(checkpoint, continued_by(*way, asked)) < TOLERANCE


@pytest.mark.engine
@pytest.mark.parametrize("name", ["qwen3_next", "granite_one_group", "lfm2"])
def test_a_prompt_goes_on_from_the_kept_state_of_another(checkpoints: Any, name: str) -> None:
    checkpoint, border = checkpoints(name), 2 * PAGE_SIZE
    first, second = prompts((60, 55))
    second = first[:border] + second[border:]
    with instances(instance := Instance(checkpoint.folder, 2)):
        engine, kept = instance.engine, instance.engine.state_slot(5)
        origin = engine.admit(0, first, len(first) + 8)
        instance.step(StepPlan(admit=[origin], prefill=[PrefillChunk(0, 0, border)]))
        keep = [KeepState(0, kept, border)]
        instance.step(StepPlan(keep_state=keep, prefill=[PrefillChunk(0, border, len(first) - border, sample=True)]))
        admit = engine.admit(1, second, len(second) + 8, kv_len=border)
        shared = msgspec.structs.replace(admit, pages=origin.pages[:2] + admit.pages[2:])
        instance.step(StepPlan(admit=[shared], copy_state=[CopyState(1, kept)], decode=[0]))
        instance.step(StepPlan(prefill=[PrefillChunk(1, border, len(second) - border, sample=True)], decode=[0]))
        instance.decode((0, 1), 3)
        logits = {slot: torch.stack(rows) for slot, rows in instance.recorder.logits.items()}
        answers = [(prompt, instance.tokens[slot], logits[slot]) for slot, prompt in enumerate((first, second))]
        assert error_of(checkpoint, answers) < TOLERANCE


class Alone:
    """One of two ranks, whose sums nobody joins."""

    rank, size = 1, 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_columns(self, x_RC: torch.Tensor, widths: Any) -> torch.Tensor:
        return x_RC

    def broadcast(self, x: torch.Tensor) -> Any: ...


@pytest.mark.engine
@pytest.mark.parametrize("name", [name for name in IN_CI if name != "gpt_oss"])
def test_a_rank_has_half_of_the_weights_of_the_layers(checkpoints: Any, name: str) -> None:
    """Norms, routers and blocks that are copied are whole."""
    folder = checkpoints(name).folder
    # With torch's operations, the modules keep their weights.
    models = [load_model(folder, "float32", ops=TorchOps(), shard=shard) for shard in (None, Alone())]
    sizes = []
    for model in models:
        assert isinstance(model, GenericModel)
        sizes.append(sum(math.prod(each.shape) for each in model.parts.decoder.layers.state_dict().values()))
    assert 0.5 < sizes[1] / sizes[0] < 0.6, sizes


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("falcon_h1", 4, r"6 \+ 2 \+ 2 heads of the state 'conv' of layer 0 cannot be cut for 4 ranks"),
        ("kimi_linear", 3, "4 attention heads cannot be split evenly over 3 ranks"),
        ("qwen3_next", 8, "4 attention heads cannot be split evenly over 8 ranks"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused_by_name(checkpoints: Any, name: str, size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=f"tp_size {size}: {words}"):
        load_model(checkpoints(name).folder, "float32", shard=ThreadRank(Meeting(size), 0))


class Strange(torch.nn.Module):
    """A short convolution with one tensor more."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_kernel_size, self.conv = 3, torch.nn.Conv1d(8, 8, 3, groups=8, bias=False)
        self.in_proj, self.out_proj = torch.nn.Linear(8, 24, bias=False), torch.nn.Linear(8, 8, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(8))


@pytest.mark.engine
def test_a_mixer_that_is_not_known_is_refused_by_name() -> None:
    mixer = Strange()
    with pytest.raises(
        ConfigError, match=r"Strange is served with tp_size 1 only: .* 'scale' \(8,\) of 'layers.0.conv'"
    ):
        cut_of("layers.0.conv", mixer, 2, 0)
    del mixer.scale
    mixer.in_proj = torch.nn.Linear(8, 25, bias=False)
    with pytest.raises(ConfigError, match=r"'in_proj.weight' .* 24 numbers are expected in dimension 0"):
        cut_of("layers.0.conv", mixer, 2, 0)
    with pytest.raises(ConfigError, match=r"it is not known how the mixer 'layers\.0\.conv' is cut"):
        cut_of("layers.0.conv", torch.nn.Linear(1, 1), 2, 0)


@pytest.mark.engine
@pytest.mark.parametrize("groups", [2, 1])
def test_another_norm_is_cut_by_groups_or_refused(tmp_path: Path, groups: int) -> None:
    """That of Falcon-H1 may scale before the gate: then it is no norm of what the ranks could add up."""
    keys = {**FALCON, "mamba_n_groups": groups, "mamba_rms_norm": True, "mamba_norm_before_gate": True}
    checkpoint = write_family(tmp_path, Family("FalconH1", keys))
    if groups == 2:
        assert error_of(checkpoint, undivided(checkpoint.folder, prompts((21, 9)), 16, 2)) < TOLERANCE
        return
    with pytest.raises(ConfigError, match="FalconH1RMSNormGated is served on no more ranks than it has groups"):
        load_model(checkpoint.folder, "float32", shard=Alone())


# ------------------------------------------------------------------------------------------------------------- clusters


@pytest.fixture(scope="module", params=["granite_one_group", pytest.param("qwen3_next", marks=pytest.mark.by_hand)])
def served(checkpoints: Any, request: pytest.FixtureRequest) -> Iterator[tuple[Checkpoint, LocalCluster]]:
    """Yield P0 and D1 of two ranks, P1 and D0 of one."""
    checkpoint = checkpoints(request.param)
    for file in TINY_MODEL_DIR.glob("tokenizer*"):
        shutil.copy(file, checkpoint.folder)
    settings = [f"model.path={checkpoint.folder}", "model.served_name=m", "cache.num_pages=100"]
    settings += ["scheduler.chunk_size=40", "scheduler.threads=1", "dp_config.router.policy=round_robin"]
    settings.append("dp_config.router.pd_disaggregation.verify_kv=all")
    for role, sizes in (("prefill", (2, 1)), ("decode", (1, 2))):
        for index, size in enumerate(sizes):
            key = f"dp_config.router.{role}_schedulers.{index}"
            settings += [f"{key}.tp_size={size}", f"{key}.devices=[{','.join(['cpu'] * size)}]"]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=WITH_TRANSFORMERS) as cluster:
        cluster.wait_ready(300)
        yield checkpoint, cluster


def test_a_cluster_of_unlike_ranks_gives_the_logprobs_of_transformers(
    served: tuple[Checkpoint, LocalCluster],
) -> None:
    """Round robin: four requests reach each pair of P and D."""
    checkpoint, cluster = served
    for prompt in prompts((90, 61, 7, 44)):
        body = {"model": "m", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}
        reply = httpx.post(
            f"{cluster.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=120.0, trust_env=False
        )
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        theirs = checkpoint.logits(prompt, choice["token_ids"]).log_softmax(-1)
        assert theirs.argmax(-1).tolist() == choice["token_ids"]
        apart = torch.tensor(choice["logprobs"]["token_logprobs"]) - theirs.amax(-1)
        assert float(apart.abs().max()) < 1e-4, json.dumps(choice)
    snapshot = msgspec.json.decode(httpx.get(f"{cluster.url}/cluster", timeout=10.0).content, type=ClusterSnapshot)
    assert len({(record.prefill, record.decode) for record in snapshot.requests}) == 4
