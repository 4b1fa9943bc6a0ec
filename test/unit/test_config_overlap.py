"""`scheduler.overlap` by key, device and TP size."""

from __future__ import annotations

from typing import Literal

import pytest

from chitu.config.overlap import overlaps_steps
from chitu.config.schema import InstanceConfig, SchedulerConfig


@pytest.mark.parametrize(
    ("key", "devices", "expected"),
    [
        ("auto", ("cpu",), False),
        ("auto", ("cuda:1",), True),
        ("on", ("cpu",), True),
        ("off", ("cuda:0",), False),
        ("auto", ("cuda:0", "cuda:1"), False),
        ("on", ("cpu", "cpu"), False),
    ],
)
def test_steps_overlap_where_the_device_computes_by_itself_and_is_one(
    key: Literal["auto", "on", "off"], devices: tuple[str, ...], expected: bool
) -> None:
    instance = InstanceConfig(devices=devices, tp_size=len(devices))
    assert overlaps_steps(SchedulerConfig(overlap=key), instance) is expected
