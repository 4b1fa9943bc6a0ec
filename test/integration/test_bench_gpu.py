"""`chitu bench gpu` runs unchanged on a machine without a GPU: same code, with the interpreter and the eager twin in
place of kernels and graphs. Its figures mean nothing, but every part must finish and find the right bytes."""

from __future__ import annotations

import functools
import json
import os

import pytest
import torch
from nursery import FORKED

pytest.importorskip("triton", reason="triton is in the dev extra")

from chitu.models.checkpoint import check_checkpoint
from chitu.models.common import build_decoder
from chitu.models.config import read_model_spec
from chitu.models.families import traits_of
from chitu.tools.bench.gpu import budget, served
from chitu.tools.bench.gpu.__main__ import main
from chitu.tools.bench.gpu.card import TINY, Card
from chitu.tools.bench.gpu.shapes import RandomWeights, names

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for a GPU here"),
]


def run(*arguments: object) -> int:
    """Run the command in this process, which has torch already; its kernels are interpreted anyway."""
    return main([str(argument) for argument in arguments])


@pytest.mark.by_hand
@pytest.mark.slow
@pytest.mark.timeout(600)  # most of a minute of an otherwise idle core
def test_every_figure_is_found_on_the_twin(tmp_path, capsys, monkeypatch):
    for module in (served, budget):
        monkeypatch.setattr(module, "LocalCluster", functools.partial(module.LocalCluster, entries=FORKED))
    status = run("--device", "cpu", "--tiny", "--json-dir", tmp_path)
    assert status == 0, capsys.readouterr().out
    record = json.loads(next(tmp_path.glob("gpu-*.json")).read_text())
    assert record["machine"]["device"].startswith("CPU")
    rows = {row["what"]: row for row in record["results"]}
    for beginning in (
        "copy",
        "matmul",
        "7 scattered",
        "decode attention",
        "decode step, batch 2, context 20: device",
        "decode step, batch 2, context 20: scheduler, overlap on",
        "prefill 9 tokens, recorded",
        "prefill 20 tokens",
        "prefill 20 tokens, own kernel",
        "prefill 5 tokens behind 15, own kernel",
        "2 decodes and a chunk of 16: longest decode, at once",
        "8b: decode step, batch 2, context 20: device",
        "8b-fp8: prefill 20 tokens",
        "30b-a3b: decode step, batch 2, context 20: scheduler, overlap on",
        "8b, 1P1D without num_pages: ready",
        "shm: 4 pages, one write",
        "shm: 4 pages, staged",
        "first token",
        "p99 between",
    ):
        assert [row for what, row in rows.items() if what.startswith(beginning) and row["measured"] > 0], beginning
    assert {"byte floor", "executor's time", "turn's time", "matmul rate"} <= {row["of"] for row in rows.values()}


def test_what_cannot_be_measured_is_named_and_the_command_fails(tmp_path, capsys):
    """Covers a part that has no time left, and one that does not exist."""
    options = ("--device", "cpu", "--tiny", "--json-dir", tmp_path)
    assert run(*options, "--only", "transfer", "--minutes", 0) == 1
    assert "NOT MEASURED transfer: not run, the time was up" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run("--only", "lunch")
    assert "lunch" in capsys.readouterr().err


@pytest.mark.parametrize("name", names())
def test_a_shape_has_the_bytes_that_its_steps_are_measured_against(name, tmp_path):
    card = Card(torch.device("cpu"), TINY)
    budget.write_zeros(card, tmp_path, name)
    spec = read_model_spec(tmp_path, code="own")
    ops = card.kernels()
    weights = RandomWeights(card, ops if name.endswith("-fp8") else None)
    build_decoder(spec, traits_of(spec), weights, ops, card.device, 64)
    weighed = weights.weighed(spec)
    numbers = check_checkpoint(tmp_path, spec).numbers
    table = spec.vocab_size * spec.hidden_size
    in_layers = numbers - (table if spec.tie_word_embeddings else 2 * table)
    assert weighed.layer_numbers + weighed.expert_numbers == in_layers
    assert weighed.bytes_of(1) < weighed.bytes_of(64) or not weighed.expert_bytes
    read, wide = weighed.step_bytes + weighed.expert_bytes, 4 * (in_layers + table)
    assert read == wide or (name.endswith("-fp8") and read < 4 * table + 2 * in_layers)
