"""Which way is faster for a write: straight to its places, or gathered, sent as a whole and scattered? Pure numbers.

P has one `TransferCost` for each D; its transfer threads ask and tell it. The model (docs/adr/0005):

    direct = pieces * per_piece_s + bytes * direct_s_per_byte
    staged = per_message_s + bytes * staged_s_per_byte + gather and scatter of one group

In a pipeline of groups only the first gather and the last scatter show. Prices begin with what was measured of the
transport elsewhere (`price_of`) and follow what is measured here: each write moves the prices it consists of by a part
of its error, in proportion to their share of it, as a factor (a normalised gradient step on the logarithm). So prices
stay positive, old writes fade, sizes that always come in the same proportion do no harm, and one write that took ever
so long counts as `LARGEST_ERROR` at most. A decision for writes of a size changes only when the other way is better by
`HYSTERESIS`. What is never taken is never measured: so every `EXPLORE_EVERY`-th decision takes the other way (while
little is known of it, from every `EXPLORE_FIRST`-th on), where that is not predicted to cost more than `EXPLORE_LOSS_S`
or `EXPLORE_FACTOR`; small writes thus teach the prices of large ones.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace

HYSTERESIS = 1.15
EXPLORE_FIRST, EXPLORE_EVERY = 4, 64
EXPLORE_LOSS_S = 2e-3
EXPLORE_FACTOR = 1.25
EXPLORE_AT_MOST = 4.0
"""Whatever the loss in seconds: a write that takes so many times as long is no experiment."""
LARGEST_ERROR = math.log(4.0)
FIRST_GAIN, LAST_GAIN = 0.5, 0.15
"""Of the error of a write, as much is taken for true: of the first one, and of each after many."""
LEAST_SHARE = 0.25
"""A write that consists of fixed costs mostly says little about the others."""


@dataclass(frozen=True, slots=True)
class Price:
    per_piece_s: float
    direct_s_per_byte: float
    staged_s_per_byte: float
    per_message_s: float = 2e-4
    """`Staged` there, `Scattered` back, and the launches of both copies. An assumption; a message there and back
    between two Python processes took 49 us."""
    copy_s_per_byte: float = 2 / 1400e9
    """Gather and scatter of a byte: two launched copies at 1400 GB/s."""


_PCIE = 2 / 52e9
"""Gather into and scatter from pinned host memory (52 and 54 GB/s)."""
_HOST_COPY = 2 / 3e9
"""The same between host memory, one core."""

PRICES = {
    # Measured on one H100, pieces of 64 KiB in GPU memory (7168 pieces, and the same as one):
    # 405 and 361 ms; the library copies through host memory itself
    ("mooncake", "tcp", "cuda"): Price(6.1e-6, 1 / 1.3e9, 1 / 1.3e9, copy_s_per_byte=_PCIE),
    # 107.6 and 0.52 ms
    ("nixl", "", "cuda"): Price(15e-6, 1 / 899e9, 1 / 899e9),
    # 0.37 ms, both
    ("cuda_ipc", "", "cuda"): Price(0.0, 1 / 1271e9, 1 / 1271e9),
    # gather and D2H, H2D and scatter in 32 parts: 16.4 ms
    ("shm", "", "cuda"): Price(0.0, 1 / 29e9, 1 / 29e9, copy_s_per_byte=_PCIE),
    # On two cores, pages of 16 KiB in host memory (docs/benchmarks.md)
    # (Mooncake's pieces took 60 to 80 us while others used the cores, NIXL's 11)
    ("mooncake", "tcp", "cpu"): Price(30e-6, 1 / 1.3e9, 1 / 1.3e9, copy_s_per_byte=_HOST_COPY),
    ("nixl", "", "cpu"): Price(10e-6, 1 / 2.4e9, 1 / 2.4e9, copy_s_per_byte=_HOST_COPY),
    ("shm", "", "cpu"): Price(0.5e-6, 1 / 4e9, 1 / 4e9, copy_s_per_byte=_HOST_COPY),
}
UNKNOWN = Price(6e-6, 1 / 20e9, 1 / 20e9)
"""RDMA and what else was never measured: a price per piece like Mooncake's over NVLink (5.9 us), a link of 200 Gbit/s.
Both are guesses, which the first writes correct."""


def price_of(transport: str, device: str, protocol: str = "tcp") -> Price:
    """What to begin with. `device`: of the pools, `cpu` or `cuda:N`; `protocol`: Mooncake's."""
    kind = "cuda" if device.startswith("cuda") else "cpu"
    return PRICES.get((transport, protocol if transport == "mooncake" else "", kind), UNKNOWN)


class TransferCost:
    """Any thread. `group_bytes`: what is gathered at once, a segment."""

    def __init__(self, price: Price, group_bytes: int) -> None:
        self._lock = threading.Lock()
        self._price = price
        self._group_bytes = group_bytes
        self._num_noted = {False: 0, True: 0}
        """By whether it was staged."""
        self._asked_since_noted = {False: 0, True: 0}
        self._last: dict[int, bool] = {}
        """The last decision, by the power of two of the number of pieces."""

    @property
    def price(self) -> Price:
        """As it is known by now."""
        return self._price

    def seconds(self, num_pieces: int, nbytes: int, is_staged: bool) -> float:
        """As predicted for one write."""
        price = self._price
        if not is_staged:
            return num_pieces * price.per_piece_s + nbytes * price.direct_s_per_byte
        return price.per_message_s + nbytes * price.staged_s_per_byte + self._copies_s(nbytes)

    def is_staged_faster(self, num_pieces: int, nbytes: int) -> bool:
        """Whether this write should be staged: because it is faster, or now and then to see whether it still is not."""
        if num_pieces < 1 or nbytes < 1:
            return False
        with self._lock:
            times_s = {way: self.seconds(num_pieces, nbytes, way) for way in (False, True)}
            size = num_pieces.bit_length()
            chosen = self._last.get(size, times_s[True] < times_s[False])
            if times_s[chosen] > HYSTERESIS * times_s[not chosen]:
                chosen = not chosen
            self._last[size] = chosen
            other = not chosen
            self._asked_since_noted[other] += 1
            every = min(EXPLORE_EVERY, EXPLORE_FIRST * (1 + self._num_noted[other]))
            if self._asked_since_noted[other] >= every and _is_cheap(times_s[other], times_s[chosen]):
                self._asked_since_noted[other] = 0
                return other
            return chosen

    def note_direct(self, num_pieces: int, nbytes: int, seconds: float) -> None:
        """A direct write of so many pieces took `seconds`."""
        with self._lock:
            price = self._price
            pieces_s, bytes_s = num_pieces * price.per_piece_s, nbytes * price.direct_s_per_byte
            factors = self._factors(False, (pieces_s, bytes_s), 0.0, seconds)
            self._price = replace(
                price,
                per_piece_s=price.per_piece_s * factors[0],
                direct_s_per_byte=price.direct_s_per_byte * factors[1],
            )

    def note_staged(self, num_pieces: int, nbytes: int, seconds: float) -> None:
        """A staged write, of however many groups, took `seconds`: from the begin of its first gather until its last
        `Scattered` came."""
        with self._lock:
            price = self._price
            bytes_s = nbytes * price.staged_s_per_byte
            factors = self._factors(True, (price.per_message_s, bytes_s), self._copies_s(nbytes), seconds)
            self._price = replace(
                price,
                per_message_s=price.per_message_s * factors[0],
                staged_s_per_byte=price.staged_s_per_byte * factors[1],
            )

    def _copies_s(self, nbytes: int) -> float:
        return min(nbytes, self._group_bytes) * self._price.copy_s_per_byte

    def _factors(
        self, is_staged: bool, parts_s: tuple[float, float], fixed_s: float, seconds: float
    ) -> tuple[float, float]:
        """What to multiply the prices with that `parts_s` come from, after a write that took `seconds`."""
        predicted_s = sum(parts_s) + fixed_s
        if not (seconds > 0 and predicted_s > 0 and math.isfinite(seconds)):
            return 1.0, 1.0
        count = self._num_noted[is_staged]
        self._num_noted[is_staged] = count + 1
        self._asked_since_noted[is_staged] = 0
        gain = max(LAST_GAIN, FIRST_GAIN / (1 + count / 2))
        error = max(-LARGEST_ERROR, min(LARGEST_ERROR, math.log(seconds / predicted_s)))
        shares = [part_s / predicted_s for part_s in parts_s]
        norm = max(LEAST_SHARE, sum(share * share for share in shares))
        first, second = (math.exp(gain * error * share / norm) for share in shares)
        return first, second


def _is_cheap(other_s: float, chosen_s: float) -> bool:
    """Whether taking the other way is a loss that may be risked."""
    if other_s > EXPLORE_AT_MOST * chosen_s:
        return False
    return other_s <= EXPLORE_FACTOR * chosen_s or other_s - chosen_s <= EXPLORE_LOSS_S
