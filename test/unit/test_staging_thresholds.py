"""Which writes are staged if both ways are open: a table, tested at its borders and beyond."""

from __future__ import annotations

import pytest

from chitu.kv_transfer.transports.staged import NEVER, OTHERS, STAGED_FROM, StagedFrom, staged_from


def test_a_write_is_staged_from_its_number_of_pieces_on_while_they_are_small() -> None:
    threshold = StagedFrom(pieces=10, piece_bytes=100)
    assert not threshold.is_met(9, 9)
    assert threshold.is_met(10, 10) and threshold.is_met(10, 1000)
    assert not threshold.is_met(10, 1001), "100.1 bytes in the mean"
    assert not NEVER.is_met(1 << 40, 1)


@pytest.mark.parametrize(
    ("transport", "device", "protocol", "expected"),
    [
        ("mooncake", "cpu", "tcp", STAGED_FROM["mooncake", "tcp", "cpu"]),
        ("mooncake", "cuda:1", "tcp", STAGED_FROM["mooncake", "tcp", "cuda"]),
        ("mooncake", "cuda:0", "rdma", OTHERS),
        ("nixl", "cuda:0", "rdma", STAGED_FROM["nixl", "", "cuda"]),
        ("cuda_ipc", "cuda:0", "tcp", NEVER),
        ("shm", "cpu", "tcp", NEVER),
        ("new", "cpu", "tcp", OTHERS),
    ],
)
def test_the_entry_is_that_of_the_transport_its_protocol_and_the_kind_of_memory(
    transport: str, device: str, protocol: str, expected: StagedFrom
) -> None:
    assert staged_from(transport, device, protocol) == expected
