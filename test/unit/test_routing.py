"""Policies are pure: they spread evenly, reach every pair, skip draining instances, and use load and prompts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_world import RecordingOutbox
from support.requests import generate_request

from chitu.config.schema import RouterConfig
from chitu.errors import ConfigError, NoInstance
from chitu.protocol import ClusterView, InstanceInfo, KVLayout, LoadReport, SamplingParams, pack_i32
from chitu.router.candidates import Candidates, InstanceKey, Way, instance_key
from chitu.router.compatibility import MemberKinds, why_incompatible
from chitu.router.loads import PRIOR
from chitu.router.members import Members
from chitu.router.policies import make_policy
from chitu.router.prefix_history import (
    BLOCK_TOKENS,
    MAX_OWNERS,
    MAX_PROMPT_BLOCKS,
    PATIENCE,
    PrefixHistory,
    prefix_names,
)
from chitu.router.ways import Selector
from chitu.types import Role

PAIR_POLICIES = ("round_robin", "least_loaded", "power_of_two", "prefix_affinity")


def info(role: Role, rank: int, draining: bool = False, incarnation: int = 1) -> InstanceInfo:
    layout = KVLayout.uniform("hash", 2, 2, 16, 16, "float32", 100)
    return InstanceInfo(role, rank, incarnation, "127.0.0.1", 1, 2, layout, 512, draining=draining)


def view(prefill: int, decode: int, unified: int = 0, version: int = 1) -> ClusterView:
    counts = ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.UNIFIED, unified))
    return ClusterView(1, version, tuple(info(role, k) for role, count in counts for k in range(count)))


class Routing:
    """A selector and its members, which join with the view that has them first."""

    def __init__(self, random_bits: Callable[[int], int] = random.getrandbits, **fields: Any) -> None:
        config = RouterConfig(**fields)
        self._members = members = Members(config, RecordingOutbox())
        self.select, self.on_lost = Selector(config, members, random_bits=random_bits).select, members.remove

    def on_view(self, view: ClusterView) -> None:
        for instance in view.instances:
            self._members.add(instance)
        self._members.on_view(view)

    @property
    def candidates(self) -> Candidates:
        return self._members.candidates

    def send(self, key: InstanceKey, new_tokens: int = 0) -> None:
        """Count a request, as the router does once it has sent it."""
        self._members[key].load.on_sent(new_tokens, 0.0)

    def end(self, key: InstanceKey, new_tokens: int = 0) -> None:
        if (member := self._members.get(key)) is not None:
            member.load.on_ended(new_tokens, has_begun=False)

    def start(self, way: Way, new_tokens: int) -> None:
        """Count a request on both instances of a pair."""
        assert way.prefill is not None
        self.send(instance_key(way.prefill), new_tokens)
        self.send(instance_key(way.decode))

    def on_report(self, key: InstanceKey, report: LoadReport) -> None:
        self._members[key].load.on_report(report, 0.0, PRIOR)


def selector(policy: str, members: ClusterView, decode_policy: str | None = None) -> Routing:
    routing = Routing(policy=policy, decode_policy=decode_policy)
    routing.on_view(members)
    return routing


@cache
def prompt(num_tokens: int = 3, seed: int = 0) -> bytes:
    rng = random.Random(seed)
    return pack_i32([rng.randrange(100) for _ in range(num_tokens)])


def names(way: Way) -> tuple[int, int]:
    assert way.prefill is not None
    return way.prefill.engine_rank, way.decode.engine_rank


# ----------------------------------------------------------------------------------------------------------- pairs


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "prefix_affinity"])
@given(prefill=st.integers(1, 6), decode=st.integers(1, 6), before=st.integers(0, 3))
def test_every_pair_gets_the_same_number_of_requests(policy: str, prefill: int, decode: int, before: int) -> None:
    """This holds for 2P2D and 2P4D too, where two counters that run side by side would never meet in every pair. It
    holds for `prefix_affinity` if nothing is cached or may be taken from the cache."""
    chosen = selector(policy, view(prefill, decode))
    for _ in range(before * prefill * decode):
        chosen.select(prompt(200), salt=None)
    prompts = [prompt(200, seed) for seed in range(3 * prefill * decode)]
    pairs = Counter(names(chosen.select(each)) for each in prompts)
    assert set(pairs.values()) == {3} and len(pairs) == prefill * decode


@pytest.mark.parametrize("policy", PAIR_POLICIES)
@given(prefill=st.integers(1, 4), decode=st.integers(1, 4), seed=st.integers(0, 1000))
def test_every_policy_reaches_every_pair_with_prompts_that_differ(
    policy: str, prefill: int, decode: int, seed: int
) -> None:
    chosen = Routing(random.Random(seed).getrandbits, policy=policy)
    chosen.on_view(view(prefill, decode))
    pairs = {names(chosen.select(prompt(200, seed=n))) for n in range(16 * prefill * decode)}
    assert len(pairs) == prefill * decode


@pytest.mark.parametrize("policy", PAIR_POLICIES)
def test_unified_instances_serve_without_a_pair_and_draining_ones_are_skipped(policy: str) -> None:
    alone = selector(policy, view(1, 0, 2)).select(prompt())
    assert alone.prefill is None and alone.decode.role is Role.UNIFIED
    drained = ClusterView(1, 1, (info(Role.PREFILL, 0, True), info(Role.PREFILL, 1), info(Role.DECODE, 0)))
    chosen = selector(policy, drained)
    assert {names(chosen.select(prompt())) for _ in range(8)} == {(1, 0)}
    with pytest.raises(NoInstance, match="no decode"):
        selector(policy, view(1, 0)).select(prompt())


# ----------------------------------------------------------------------------------------------------------- loads


def test_least_loaded_counts_tokens_on_p_and_requests_on_d() -> None:
    chosen = selector("least_loaded", view(2, 2))
    big = chosen.select(prompt(90))
    chosen.start(big, 90)
    decodes = [big.decode.engine_rank]
    for _ in range(3):  # three short prompts are less work for P than the long one, and more requests for D
        small = chosen.select(prompt(10))
        chosen.start(small, 10)
        assert small.prefill is not big.prefill
        decodes.append(small.decode.engine_rank)
    assert sorted(decodes) == [0, 0, 1, 1]


def test_a_finished_request_frees_its_instance_for_the_next() -> None:
    chosen = selector("least_loaded", view(1, 2))
    first = chosen.select(prompt())
    chosen.start(first, 3)
    second = chosen.select(prompt())
    chosen.start(second, 3)
    assert second.decode is not first.decode
    chosen.end(instance_key(first.decode))
    assert [chosen.select(prompt()).decode for _ in range(4)] == [first.decode] * 4


def test_a_report_adds_only_what_others_sent_there() -> None:
    chosen = selector("least_loaded", view(1, 2))
    d0, d1 = chosen.candidates.decode
    for _ in range(3):
        chosen.send(instance_key(d0))
    chosen.on_report(instance_key(d0), LoadReport(running=3))  # our own three requests: nothing new
    chosen.on_report(instance_key(d1), LoadReport(waiting=1, transferring=1, running=1, retracted=1))
    assert [chosen.select(prompt()).decode for _ in range(4)] == [d0] * 4
    chosen.on_report(instance_key(d1), LoadReport())
    assert [chosen.select(prompt()).decode for _ in range(4)] == [d1] * 4


def test_loads_survive_a_view_and_end_with_the_instance() -> None:
    chosen = selector("least_loaded", view(1, 2))
    d0 = instance_key(chosen.candidates.decode[0])
    for _ in range(5):
        chosen.send(d0)
    chosen.on_view(view(2, 3, version=2))
    assert {chosen.select(prompt()).decode.engine_rank for _ in range(9)} == {1, 2}
    chosen.on_view(view(2, 1, version=3))
    assert chosen.select(prompt()).decode.engine_rank == 0
    again = ClusterView(1, 4, (info(Role.PREFILL, 0), info(Role.DECODE, 0, incarnation=2), info(Role.DECODE, 1)))
    chosen.on_view(again)
    chosen.on_lost(d0)
    for _ in range(5):
        chosen.end(d0)  # its requests end after it, and are not counted for its successor
    assert {chosen.select(prompt()).decode.engine_rank for _ in range(4)} == {0, 1}


@given(st.integers(2, 40), st.integers(0, 2**32))
def test_power_of_two_never_takes_the_most_loaded_one(count: int, seed: int) -> None:
    chosen = Routing(random.Random(seed).getrandbits, policy="power_of_two")
    chosen.on_view(view(1, count))
    busiest = chosen.candidates.decode[seed % count]
    chosen.send(instance_key(busiest))
    assert busiest not in [chosen.select(prompt()).decode for _ in range(50)]


def test_power_of_two_keeps_the_fullest_instance_close_to_the_mean() -> None:
    chosen = Routing(random.Random(1).getrandbits, policy="power_of_two")
    chosen.on_view(view(1, 50))
    held: Counter[InstanceKey] = Counter()
    for _ in range(2000):
        key = instance_key(chosen.select(prompt()).decode)
        held[key] += 1
        chosen.send(key)
    assert max(held.values()) <= 2000 / 50 + 4, "one random draw alone would be some 15 over the mean"


# --------------------------------------------------------------------------------------------------- prefix affinity


def owner_of(chosen: Routing, token_ids: bytes) -> int:
    return names(chosen.select(token_ids))[0]


def test_a_prompt_goes_where_its_beginning_went() -> None:
    chosen = selector("prefix_affinity", view(5, 2))
    owners = {seed: owner_of(chosen, prompt(300, seed)) for seed in range(5)}
    assert sorted(owners.values()) == [0, 1, 2, 3, 4], "new prompts spread"
    for seed in (3, 1, 4, 0, 2):
        longer = prompt(300, seed) + prompt(80, seed=99)
        assert owner_of(chosen, longer) == owners[seed]
    assert {names(chosen.select(prompt(300, 0)))[1] for _ in range(4)} == {0, 1}, "D is chosen by its load"


def test_a_short_beginning_in_common_is_no_reason_to_crowd() -> None:
    """The second may wait behind the first, since a queue that short is worth it; the next ones may not."""
    chosen = selector("prefix_affinity", view(3, 1))
    system, rest = prompt(BLOCK_TOKENS, seed=7), PATIENCE * BLOCK_TOKENS // 2 + 1
    prefills = []
    for seed in range(6):
        target = chosen.select(system + prompt(rest, seed))
        chosen.start(target, BLOCK_TOKENS + rest)
        prefills.append(names(target)[0])
    assert Counter(prefills) == {0: 2, 1: 2, 2: 2}


def test_prompts_that_share_no_pages_attract_each_other_as_little_as_others() -> None:
    chosen = selector("prefix_affinity", view(4, 1))
    text = prompt(300)
    asked = [("", ""), ("tenant", ""), (None, "sql"), ("", "sql")]  # None: it uses no cached pages and leaves none
    requests = [
        generate_request("r", text, 300, SamplingParams(1), cache_salt=salt, adapter=adapter) for salt, adapter in asked
    ]
    salts = [request.prefix_salt for request in requests]
    prefills = [names(chosen.select(text, salt=salt))[0] for salt in salts]
    assert sorted(prefills) == [0, 1, 2, 3]
    assert [names(chosen.select(text, salt=salts[i]))[0] for i in (0, 1, 3)] == [prefills[i] for i in (0, 1, 3)]


def test_an_overloaded_owner_is_passed_over_and_its_substitute_becomes_an_owner() -> None:
    chosen = selector("prefix_affinity", view(2, 1))
    text = prompt(300)
    first = owner_of(chosen, text)
    key = InstanceKey(Role.PREFILL, first, 1)
    known = 300 // BLOCK_TOKENS * BLOCK_TOKENS
    chosen.send(key, PATIENCE * known - 1)
    assert owner_of(chosen, text) == first
    chosen.send(key, 1)
    other = owner_of(chosen, text)
    assert other != first
    chosen.end(key, PATIENCE * known - 1)
    assert owner_of(chosen, text) == other, "both own it now: the less loaded one"


def test_a_beginning_that_all_prompts_share_keeps_nobody_idle() -> None:
    """Once two P have it, it is worth only what it saves: all of 20 P get it within two rounds."""
    chosen = selector("prefix_affinity", view(20, 1))
    system, held = prompt(8 * BLOCK_TOKENS, seed=7), Counter[int]()
    for seed in range(60):
        target = chosen.select(system + prompt(8 * BLOCK_TOKENS, seed))
        chosen.start(target, 16 * BLOCK_TOKENS)
        held[names(target)[0]] += 1
    assert len(held) == 20 and max(held.values()) <= PATIENCE, held


def test_a_restarted_owner_owns_nothing() -> None:
    chosen = selector("prefix_affinity", view(2, 1))
    first = owner_of(chosen, prompt(300))
    fresh = (info(Role.PREFILL, 0, incarnation=2), info(Role.PREFILL, 1, incarnation=2), info(Role.DECODE, 0))
    chosen.on_view(ClusterView(1, 2, fresh))
    chosen.send(InstanceKey(Role.PREFILL, first, 2), 1)
    assert owner_of(chosen, prompt(300)) != first


def test_what_is_cached_is_no_load() -> None:
    chosen = selector("prefix_affinity", view(2, 1))
    text, rest = prompt(12 * BLOCK_TOKENS), prompt(10, seed=9)
    first = chosen.select(text)
    assert first.new_tokens == 12 * BLOCK_TOKENS
    prefills = []
    for _ in range(24):
        target = chosen.select(text + rest)
        assert target.new_tokens == 10
        chosen.start(target, target.new_tokens)
        prefills.append(target.prefill)
    assert prefills == [first.prefill] * 24
    assert chosen.select(text, salt=None).new_tokens == 12 * BLOCK_TOKENS, "it uses no cached page"


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "power_of_two"])
def test_without_a_history_a_prompt_counts_as_those_before_it(policy: str) -> None:
    chosen = selector(policy, view(1, 1))
    assert chosen.select(prompt(300)).new_tokens == 300
    chosen.on_report(InstanceKey(Role.PREFILL, 0, 1), LoadReport(cached_share=0.99))
    assert chosen.select(prompt(300)).new_tokens == 3
    assert chosen.select(prompt(3)).new_tokens == 1


def test_unified_instances_are_chosen_by_the_policy_of_prefill() -> None:
    chosen = selector("prefix_affinity", view(0, 0, unified=3))
    owner = chosen.select(prompt(300)).decode
    assert [chosen.select(prompt(300)).decode for _ in range(3)] == [owner] * 3


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.integers(0, 6)), max_size=40), st.integers(1, 30))
def test_the_index_is_bounded_and_never_knows_a_block_without_the_ones_before(
    sends: list[tuple[int, int, int]], capacity: int
) -> None:
    index = PrefixHistory(capacity)
    for seed, blocks, owner in sends:
        chain = prefix_names(prompt(blocks * BLOCK_TOKENS, seed))
        key = InstanceKey(Role.PREFILL, owner, 1)
        index.add(chain, key, ())
        assert len(index) <= capacity
        worth = min(blocks, capacity) * BLOCK_TOKENS * PATIENCE
        assert index.match(chain) == ({key: worth} if worth else {}), "the newest prompt is the last to go"


def test_a_block_remembers_its_newest_owners() -> None:
    index, chain = PrefixHistory(), prefix_names(prompt(2 * BLOCK_TOKENS))
    keys = [InstanceKey(Role.PREFILL, rank, 1) for rank in range(MAX_OWNERS + 2)]
    for key in keys:
        index.add(chain, key, keys)
    assert index.match(chain) == dict.fromkeys(keys[2:], 2 * BLOCK_TOKENS), "what several have is worth what it saves"
    index.add(chain, keys[0], keys[:1])
    assert index.match(chain) == {keys[0]: PATIENCE * 2 * BLOCK_TOKENS}, "who is gone owns nothing"


def test_names_stand_for_all_that_came_before() -> None:
    one, other = prompt(3 * BLOCK_TOKENS + 5, seed=1), prompt(BLOCK_TOKENS, seed=2)
    chain = prefix_names(one)
    assert len(chain) == 3 and prefix_names(one[: 4 * 2 * BLOCK_TOKENS]) == chain[:2]
    assert not set(prefix_names(other + one)) & set(chain)
    assert len(prefix_names(bytes(4 * BLOCK_TOKENS * (MAX_PROMPT_BLOCKS + 9)))) == MAX_PROMPT_BLOCKS


# ----------------------------------------------------------------------------------------------------- configuration


def test_p_and_d_have_policies_of_their_own() -> None:
    chosen = selector("least_loaded", view(2, 2), decode_policy="round_robin")
    p0, d0 = chosen.candidates.prefill[0], chosen.candidates.decode[0]
    chosen.send(instance_key(p0), 10)
    chosen.send(instance_key(d0))
    assert {names(chosen.select(prompt())) for _ in range(4)} == {(1, 0), (1, 1)}


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="'fastest'"):
        make_policy("fastest")


# ----------------------------------------------------------------------------------- instances that are left out


@pytest.mark.parametrize("policy", PAIR_POLICIES)
def test_who_is_left_out_gets_nothing_while_others_can_serve(policy: str) -> None:
    chosen = selector(policy, view(3, 3))
    p0, d1, d2 = (InstanceKey(Role.PREFILL, 0, 1), *(InstanceKey(Role.DECODE, k, 1) for k in (1, 2)))
    pairs = {names(chosen.select(prompt(200, seed=n), {p0, d1}, {d2})) for n in range(60)}
    assert pairs == {(1, 0), (2, 0)}
    assert len({names(chosen.select(prompt(200, seed=n))) for n in range(60)}) > 2, "for that one request only"


@pytest.mark.parametrize("policy", PAIR_POLICIES)
def test_where_all_are_unwanted_a_second_try_comes_before_an_open_breaker(policy: str) -> None:
    chosen = selector(policy, view(1, 2))
    p0, d0, d1 = (InstanceKey(Role.PREFILL, 0, 1), *(InstanceKey(Role.DECODE, k, 1) for k in (0, 1)))
    assert {names(chosen.select(prompt(200, seed=n), {d0}, {d1})) for n in range(20)} == {(0, 0)}
    assert {names(chosen.select(prompt(200, seed=n), {d0}, {p0, d0, d1})) for n in range(20)} == {(0, 1)}
    assert len({names(chosen.select(prompt(200, seed=n), set(), {d0, d1})) for n in range(40)}) == 2


# ----------------------------------------------------------------------------------------------------------------------
# Which instances the router refuses to combine, and the error that it gives.


LAYOUT = KVLayout.uniform("hash", 2, 2, 16, 16, "float32", 100)
SHM = "shm@boot:pid:[1]:0"
RDMA, TCP = "mooncake over rdma", "mooncake over tcp"


def info_of(
    role: Role, host: str, ways: tuple[str, ...] = (), device: str = "cpu", dtype: str = "float32"
) -> InstanceInfo:
    layout = msgspec.structs.replace(LAYOUT, dtype=dtype)
    return InstanceInfo(role, 0, 1, host, 1, 2, layout, 512, device=device, ways=ways)


def prefill(*ways: str, **more: str) -> InstanceInfo:
    return info_of(Role.PREFILL, "10.0.0.1", ways, **more)


def decode(*ways: str, **more: str) -> InstanceInfo:
    return info_of(Role.DECODE, "10.0.0.2", ways, **more)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [((SHM, TCP), (f"{SHM}-elsewhere", TCP)), ((SHM,), (SHM,)), (("nixl",), ("nixl",)), ((), (TCP,))],
)
def test_one_way_in_common_is_enough(mine: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    assert why_incompatible(decode(*mine), prefill(*theirs)) == ""


def test_rdma_on_one_node_alone_is_named_with_both_sides_and_the_cure() -> None:
    assert why_incompatible(decode(SHM, TCP), prefill(f"{SHM}-elsewhere", RDMA)) == (
        "D0 on 10.0.0.2 does not fit P0 on 10.0.0.1: no transport reaches from one to the other. D0 has shm, mooncake "
        "over tcp; P0 has shm, mooncake over rdma: set dp_config.router.pd_disaggregation.mooncake_protocol=tcp on all "
        "nodes, or fix RDMA on the nodes without it (`chitu doctor`)"
    )


def test_a_node_without_the_library_and_two_containers_have_their_own_cures() -> None:
    assert "install Mooncake on 10.0.0.2, too" in why_incompatible(decode(SHM), prefill(f"{SHM}-elsewhere", TCP))
    assert "transport=mooncake" in why_incompatible(decode(SHM), prefill(f"{SHM}-elsewhere"))


def test_instances_without_the_same_adapters_do_not_fit_whatever_they_do() -> None:
    mine = msgspec.structs.replace(decode(TCP), layout=msgspec.structs.replace(LAYOUT, adapters=(("sql", "ab"),)))
    assert why_incompatible(mine, prefill(TCP)) == (
        "D0 on 10.0.0.2 does not fit P0 on 10.0.0.1 (adapters: (('sql', 'ab'),) != ()): give both the same LoRA "
        "adapters (model.adapters)"
    )
    assert "LoRA" in why_incompatible(msgspec.structs.replace(mine, role=Role.UNIFIED), prefill(TCP))


def test_two_p_write_to_each_other_never() -> None:
    other = msgspec.structs.replace(prefill(TCP), engine_rank=1)
    assert why_incompatible(prefill(RDMA), other) == ""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_node_without_gpus_is_named_as_that_whatever_the_dtypes_are(dtype: str) -> None:
    said = why_incompatible(decode(TCP, dtype=dtype), prefill(TCP, device="cuda", dtype="bfloat16"))
    assert "D0 has its pages in host memory, P0 in GPU memory" in said and "dtype" not in said
    assert "10.0.0.1" in said and "10.0.0.2" in said


def test_a_unified_instance_needs_the_model_alone() -> None:
    unified = info_of(Role.UNIFIED, "10.0.0.3", device="cuda", dtype="bfloat16")
    assert why_incompatible(unified, prefill(TCP)) == ""
    alien = msgspec.structs.replace(unified, layout=msgspec.structs.replace(LAYOUT, model_hash="another"))
    assert "give both the same checkpoint" in why_incompatible(alien, prefill(TCP))


def test_a_new_instance_is_compared_with_every_kind_and_in_doubt_with_every_member() -> None:
    """Members of one kind may still differ in the ways that do not leave their machines."""
    kinds = MemberKinds()
    for rank in range(4):
        here = f"{SHM}-{rank % 2}"
        kinds.add(msgspec.structs.replace(prefill(here, TCP), engine_rank=rank))
    assert kinds.why_incompatible(decode(TCP)) == ""
    assert kinds.why_incompatible(decode()) == "", "it does not say which ways it has"
    said = kinds.why_incompatible(decode(f"{SHM}-0", RDMA))
    assert "P1" in said and "no transport" in said, "P0 and P2 share memory with it, P1 does not"
    assert "P0" in kinds.why_incompatible(decode(f"{SHM}-5"))
    for rank in (1, 3):
        kinds.remove(msgspec.structs.replace(prefill(f"{SHM}-1", TCP), engine_rank=rank))
    assert kinds.why_incompatible(decode(f"{SHM}-0", RDMA)) == ""


def test_an_instance_need_not_fit_the_one_whose_place_it_takes() -> None:
    kinds = MemberKinds()
    kinds.add(prefill(SHM, dtype="float32"))
    assert kinds.why_incompatible(prefill(SHM, dtype="bfloat16")) == ""
    kinds.add(msgspec.structs.replace(prefill(SHM, dtype="float32"), engine_rank=1))
    assert "P1" in kinds.why_incompatible(prefill(SHM, dtype="bfloat16"))
