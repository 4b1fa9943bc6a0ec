"""Requests stay within one revision that can serve them, and an operator sets the share of one."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from chitu.config.schema import CanaryConfig
from chitu.protocol import InstanceInfo, KVLayout
from chitu.protocol.admin import Canary
from chitu.router.candidates import Candidates, instance_key
from chitu.router.revisions import Revisions
from chitu.types import Role

LAYOUT = KVLayout.uniform("m", 1, 1, 2, 1, "float32", 8)
DRAWS = 4096


def member(role: Role, rank: int, revision: str) -> InstanceInfo:
    incarnation = 1 + rank + 100 * (role is Role.DECODE)
    return InstanceInfo(role, rank, incarnation, "h", 1, 2, LAYOUT, 64, revision=revision)


def pair(rank: int, revision: str, decode: str | None = None) -> list[InstanceInfo]:
    other = revision if decode is None else decode
    return [member(Role.PREFILL, rank, revision), member(Role.DECODE, rank, other)]


def arranged(members: list[InstanceInfo], canary: Canary | None = None) -> Revisions:
    revisions = Revisions(*([canary] if canary else []))
    revisions.arrange(Candidates.among(members))
    return revisions


def shares(members: list[InstanceInfo], canary: Canary | None = None) -> dict[str, float]:
    """Return which share of the requests each revision gets."""
    revisions, found = arranged(members, canary), Counter[str]()
    for number in range(DRAWS):
        out = revisions.draw(number << 20)
        [label] = {info.revision for info in members if info.revision and instance_key(info) not in out}
        found[label] += 1
    return {label: round(count / DRAWS, 2) for label, count in found.items()}


def test_one_revision_and_instances_without_a_label_cost_no_choice() -> None:
    assert not arranged(pair(0, "a") + pair(1, "a") + pair(2, "")).are_several
    assert not arranged(pair(0, "") + pair(1, "")).are_several


def test_each_revision_that_can_serve_alone_gets_requests_by_its_instances() -> None:
    assert shares(pair(0, "a") + pair(1, "a") + pair(2, "a") + pair(3, "b")) == {"a": 0.75, "b": 0.25}


def test_a_revision_without_a_d_gets_nothing_until_it_has_one() -> None:
    half = [*pair(0, "a"), member(Role.PREFILL, 1, "b")]
    assert shares(half) == {"a": 1.0}
    assert shares([*half, member(Role.DECODE, 1, "b")]) == {"a": 0.5, "b": 0.5}


def test_if_no_revision_can_serve_alone_all_are_paired() -> None:
    assert not arranged(pair(0, "a", decode="b")).are_several


def test_an_instance_without_a_label_completes_each_revision() -> None:
    members = [member(Role.PREFILL, 0, "a"), member(Role.PREFILL, 1, "b"), member(Role.DECODE, 0, "")]
    revisions = arranged(members)
    for number in range(16):
        assert instance_key(members[2]) not in revisions.draw(number << 28)
    assert shares(members) == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize(
    ("share", "found"), [(0.0, {"a": 1.0}), (0.1, {"a": 0.9, "b": 0.1}), (1.0, {"b": 1.0})], ids=str
)
def test_an_operator_sets_the_share_of_one(share: float, found: dict[str, float]) -> None:
    assert shares(pair(0, "a") + pair(1, "b"), Canary("b", share)) == found


def test_a_share_is_of_no_effect_if_nothing_else_serves_or_its_revision_does_not() -> None:
    assert not arranged(pair(0, "b"), Canary("b", 0.0)).are_several
    assert shares([*pair(0, "a"), member(Role.PREFILL, 1, "b")], Canary("b", 1.0)) == {"a": 1.0}
    assert shares(pair(0, "a") + pair(1, "c"), Canary("b", 1.0)) == {"a": 0.5, "c": 0.5}


def test_the_rest_is_shared_among_the_others() -> None:
    members = pair(0, "a") + pair(1, "b") + pair(2, "c") + pair(3, "c")
    assert shares(members, Canary("b", 0.4)) == {"a": 0.2, "b": 0.4, "c": 0.4}


def test_the_share_of_the_configuration_is_bounded() -> None:
    with pytest.raises(msgspec.ValidationError, match="<= 1"):
        msgspec.convert({"revision": "b", "share": 1.5}, CanaryConfig)
