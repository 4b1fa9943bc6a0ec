"""Step sizes that the topology leaves open follow the devices; sizes that it sets stay."""

from __future__ import annotations

import pytest

from chitu.config.load import dump_topology, load_topology, parse_topology

P, D, U = (f"dp_config.router.{role}_schedulers.0.devices=[{{}}]" for role in ("prefill", "decode", "unified"))


def sizes(name: str, *overrides: str) -> tuple[int, int]:
    scheduler = load_topology(name, overrides).scheduler
    return scheduler.max_batched_tokens, scheduler.chunk_size


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("pd_disagg_1p1d_local", (), (2048, 512)),
        ("pd_disagg_1p1d_local", (P.format("cuda:0"), D.format("cuda:0")), (8192, 8192)),
        ("pd_disagg_1p1d_local", (P.format("cuda:0,cuda:1"),), (8192, 8192)),
        ("pd_disagg_1p1d_local", (D.format("cuda:0"),), (2048, 512)),
        ("unified_local", (U.format("cuda:0"),), (2048, 2048)),
        ("unified_local", (U.format("cuda:0"), "scheduler.chunk_size=100"), (2048, 100)),
        ("unified_local", (U.format("cuda:0"), "scheduler.max_batched_tokens=300"), (300, 300)),
        ("unified_local", (U.format("cuda:0"), "scheduler.chunk_size=4096"), (4096, 4096)),
        (
            "unified_local",
            (U.format("cuda:0"), "scheduler.chunk_size=2048", "scheduler.max_batched_tokens=2048"),
            (2048, 2048),
        ),
    ],
)
def test_what_is_left_open_follows_the_devices(name, overrides, expected):
    assert sizes(name, *overrides) == expected


def test_a_topology_that_was_written_down_stays_as_it_is(tmp_path):
    first = load_topology("pd_disagg_1p1d_local", [P.format("cuda:0")])
    file = tmp_path / "t.yaml"
    file.write_text(dump_topology(first))
    assert load_topology(str(file)) == first
    assert parse_topology({}).scheduler.chunk_size == 512
