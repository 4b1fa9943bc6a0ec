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
from chitu.tools.bench.gpu.hop_process import STAMPED
from chitu.tools.bench.gpu.hops import HOPS, hops_of, sorted_stamps
from chitu.tools.bench.gpu.shapes import names, weights_of

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
        "hop, 40 tokens: D's step thread begins to draw",
        "hops, 40 tokens",
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


def test_hops_are_counted_from_the_stamps_of_both_processes_request_by_request():
    """The functions that are stamped exist. P reads a step and D takes messages before, between and after."""
    assert all(callable(getattr(owner, name)) for owner, name, _, _ in STAMPED)
    names_of_p = ("read", *(name for side, name, _ in HOPS if side == "P"))
    names_of_d = [name for side, name, _ in HOPS if side == "D"]
    p, d = [("read", 50)], [("frame", 90), ("read", 91), ("flushed", 92)]
    for start in (100, 1000):
        p += [("read", start - 1), *((name, start + 10 * at) for at, name in enumerate(names_of_p))]
        d += [("frame", start + 5), *((name, start + 60 + 7 * at) for at, name in enumerate(names_of_d))]
    stamps = sorted_stamps([d, p])
    expected = [10] * 5 + [10] + [7] * 5
    assert hops_of(stamps, 99, 300) == hops_of(stamps, 999, 1300) == expected
    for begin, end in ((1200, 1300), (99, 110)):  # nothing was asked, or D has not drawn by then
        with pytest.raises(LookupError):
            hops_of(stamps, begin, end)
    del stamps["P", "sealed"]
    with pytest.raises(KeyError):
        hops_of(stamps, 99, 300)


@pytest.mark.parametrize("name", names())
def test_a_shape_has_the_bytes_that_its_steps_are_measured_against(name, tmp_path):
    card = Card(torch.device("cpu"), TINY)
    budget.write_zeros(card, tmp_path, name)
    spec = read_model_spec(tmp_path, code="own")
    ops, weights = weights_of(card, name)
    build_decoder(spec, traits_of(spec), weights, ops, card.device, 64)
    weighed = weights.weighed(spec)
    numbers = check_checkpoint(tmp_path, spec).numbers
    table = spec.vocab_size * spec.hidden_size
    in_layers = numbers - (table if spec.tie_word_embeddings else 2 * table)
    assert weighed.layer_numbers + weighed.expert_numbers == in_layers
    assert weighed.bytes_of(1) < weighed.bytes_of(64) or not weighed.expert_bytes
    read, wide = weighed.step_bytes + weighed.expert_bytes, 4 * (in_layers + table)
    is_small = name.endswith("-fp8") or name == "gpt-oss-20b"
    assert read == wide or (is_small and read < 4 * table + 2 * in_layers)
