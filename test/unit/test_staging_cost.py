"""The choice between direct and staged writes, over simulated links whose prices it does not know."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from chitu.kv_transfer.staging.cost import PRICES, Price, TransferCost, price_of

PIECE = 64 << 10
GROUP = 16 << 20


@dataclass
class Link:
    """A link as it really is. `noise`: standard deviation of the logarithm; one in `outlier_every` takes 30 times as
    long."""

    price: Price
    noise: float = 0.15
    outlier_every: int = 25
    seed: int = 0
    num_writes: int = 0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def true_seconds(self, num_pieces: int, is_staged: bool) -> float:
        return TransferCost(self.price, GROUP).seconds(num_pieces, num_pieces * PIECE, is_staged)

    def write(self, cost: TransferCost, num_pieces: int) -> bool:
        """Choose, write, tell."""
        is_staged = cost.is_staged_faster(num_pieces, num_pieces * PIECE)
        self.num_writes += 1
        seconds = self.true_seconds(num_pieces, is_staged) * self.rng.lognormvariate(0, self.noise)
        if self.outlier_every and self.num_writes % self.outlier_every == 0:
            seconds *= 30
        (cost.note_staged if is_staged else cost.note_direct)(num_pieces, num_pieces * PIECE, seconds)
        return is_staged

    def train(self, cost: TransferCost, count: int, sizes: tuple[int, ...]) -> list[bool]:
        return [self.write(cost, self.rng.choice(sizes)) for _ in range(count)]


SIZES = (4, 10, 20, 60, 150, 400, 1000, 4000)


def clear_sizes(link: Link, sizes: tuple[int, ...] = SIZES) -> dict[int, bool]:
    """Sizes at which one way is better by half, and which."""
    found = {}
    for size in sizes:
        direct_s, staged_s = (link.true_seconds(size, way) for way in (False, True))
        if max(direct_s, staged_s) > 1.5 * min(direct_s, staged_s):
            found[size] = staged_s < direct_s
    return found


def answers(cost: TransferCost, size: int) -> bool:
    """What it says mostly: one question in many is an experiment."""
    return sum(cost.is_staged_faster(size, size * PIECE) for _ in range(9)) > 4


def test_measured_prices_put_the_break_even_where_the_decision_record_says() -> None:
    """5.9 us a piece of 64 KiB over NVLink, 0.2 ms the message: staged from some 35 pieces on."""
    cost = TransferCost(Price(5.9e-6, 1 / 1431e9, 1 / 1431e9), GROUP)
    choices = [cost.is_staged_faster(size, size * PIECE) for size in (1, 20, 32, 40, 64, 7168)]
    assert choices == [False, False, False, True, True, True]


def test_a_library_that_takes_lists_for_nothing_is_written_to_directly() -> None:
    cost = TransferCost(Price(0.0, 1 / 25e9, 1 / 25e9), GROUP)
    assert not any(answers(cost, size) for size in SIZES)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "real",
    [
        Price(1e-6, 1 / 20e9, 1 / 20e9, per_message_s=4e-4),
        Price(40e-6, 1 / 20e9, 1 / 20e9, per_message_s=1e-4),
        Price(0.2e-6, 1 / 20e9, 1 / 12e9),
        Price(6e-6, 1 / 2e9, 1 / 6e9),
    ],
    ids=["cheap pieces", "dear pieces", "lists of pieces, slow staging", "slow direct link"],
)
def test_after_300_writes_it_takes_the_better_way_whatever_it_was_told_at_first(real: Price, seed: int) -> None:
    cost, link = TransferCost(price_of("mooncake", "cuda", "rdma"), GROUP), Link(real, seed=seed)
    link.train(cost, 300, SIZES)
    expected = clear_sizes(link)
    assert expected, "there is something to find"
    assert {size: answers(cost, size) for size in expected} == expected


def test_a_link_that_changes_is_noticed() -> None:
    """The prices of pieces fall to nothing while everything is staged: experiments find it."""
    cost = TransferCost(Price(6e-6, 1 / 20e9, 1 / 20e9), GROUP)
    sizes = 60, 80, 120
    assert Link(Price(6e-6, 1 / 20e9, 1 / 20e9)).train(cost, 30, sizes).count(True) >= 25
    after = Link(Price(0.1e-6, 1 / 20e9, 1 / 20e9, per_message_s=3e-4), outlier_every=0)
    after.train(cost, 1000, sizes)
    assert [answers(cost, size) for size in sizes] == [clear_sizes(after, sizes)[size] for size in sizes]
    assert not answers(cost, 60)


def test_sizes_that_are_always_alike_do_no_harm() -> None:
    """One size only: pieces and bytes cannot be told apart, but their sum can be known."""
    cost, link = TransferCost(Price(6e-6, 1 / 20e9, 1 / 20e9), GROUP), Link(Price(2e-6, 1 / 5e9, 1 / 5e9), noise=0.05)
    link.outlier_every = 0
    for _ in range(400):
        link.write(cost, 1000)
    price = cost.price
    for way in (False, True):
        ratio = cost.seconds(1000, 1000 * PIECE, way) / link.true_seconds(1000, way)
        assert ratio == pytest.approx(1, rel=0.25), (way, price)
    assert all(1e-9 < number < 1e-2 for number in (price.per_piece_s, price.per_message_s))


def test_near_the_break_even_it_does_not_change_its_mind_all_the_time() -> None:
    real = Price(6e-6, 1 / 20e9, 1 / 20e9)
    break_even = next(n for n in range(1, 999) if Link(real).true_seconds(n, False) > Link(real).true_seconds(n, True))
    cost, link = TransferCost(real, GROUP), Link(real, noise=0.3, outlier_every=0)
    made = [link.write(cost, break_even) for _ in range(600)]
    changes = sum(a != b for a, b in pairwise(made))
    assert changes < 26, "an experiment is two changes, and one in 64 is one"


def test_one_write_that_took_for_ever_does_not_turn_the_choice() -> None:
    cost = TransferCost(Price(6e-6, 1 / 20e9, 1 / 20e9), GROUP)
    Link(Price(6e-6, 1 / 20e9, 1 / 20e9), outlier_every=0).train(cost, 100, SIZES)
    before = cost.seconds(1000, 1000 * PIECE, True)
    assert answers(cost, 1000)
    cost.note_staged(1000, 1000 * PIECE, 3600.0)
    assert answers(cost, 1000)
    assert cost.seconds(1000, 1000 * PIECE, True) < 1.5 * before


def test_an_experiment_is_never_dear() -> None:
    """7000 pieces are 40 ms against 0.7: such a write is never tried the other way, a small one is."""
    real = Price(6e-6, 1 / 1400e9, 1 / 1400e9)
    cost, link = TransferCost(real, GROUP), Link(real, noise=0.01, outlier_every=0)
    assert all(link.write(cost, 7000) for _ in range(500))
    tried = [link.write(cost, 60) for _ in range(60)]
    assert 1 <= tried.count(False) <= 6, "at first, when nothing is known of it, a little more often"
    cost, link = TransferCost(real, GROUP), Link(real, noise=0.01, outlier_every=0)
    assert all(link.write(cost, 250) for _ in range(500)), "1.5 ms for 0.2 ms is too much of a loss, too"


def test_nonsense_changes_nothing() -> None:
    cost = TransferCost(PRICES["nixl", "", "cuda"], GROUP)
    for seconds in (0.0, -1.0, float("inf"), float("nan")):
        cost.note_direct(10, 10, seconds)
        cost.note_staged(10, 10, seconds)
    cost.note_direct(0, 0, 1.0)
    assert cost.price == PRICES["nixl", "", "cuda"]
    assert not cost.is_staged_faster(0, 0)


def test_prices_are_those_of_the_transport_and_the_kind_of_memory() -> None:
    assert price_of("nixl", "cuda:1").per_piece_s == 15e-6
    assert price_of("mooncake", "cuda:0", "tcp") is PRICES["mooncake", "tcp", "cuda"]
    assert price_of("mooncake", "cuda:0", "rdma") == price_of("fake", "cpu")
    assert price_of("shm", "cpu") is not price_of("shm", "cuda:0")
