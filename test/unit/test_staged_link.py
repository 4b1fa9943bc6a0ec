"""How a benchmark cuts a prompt into groups that fit a segment."""

from __future__ import annotations

import pytest

from chitu.bench.staged_link import groups_of


@pytest.mark.parametrize(
    ("num_pages", "num_layers", "units"), [(64, 32, 256), (64, 32, 100), (64, 3, 10), (1, 28, 28), (5, 5, 1)]
)
def test_every_page_of_every_layer_is_in_one_group_and_each_fits(num_pages: int, num_layers: int, units: int) -> None:
    groups = list(groups_of(num_pages, num_layers, 100, units * 100 + 99))
    covered = [(layer, page) for group in groups for layer in group.layers for page in range(*group[1:])]
    assert sorted(covered) == [(layer, page) for layer in range(num_layers) for page in range(num_pages)]
    assert all(len(group.layers) * (group.end_page - group.first_page) <= units for group in groups)
    assert len(groups) <= -(-num_pages // min(units, num_pages)) * num_layers


def test_a_segment_that_holds_no_page_is_refused() -> None:
    with pytest.raises(ValueError, match="99 bytes holds no page of 100"):
        list(groups_of(4, 4, 100, 99))
