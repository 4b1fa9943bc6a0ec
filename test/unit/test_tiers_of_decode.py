"""The way back: P gets what D computed through a store, so a turn computes only what is new."""

from __future__ import annotations

from scheduler_world import PAGE_SIZE, prompt_of, room_of
from tiered_instances import MemoryStore, Stored, TieredPair, names_of, prompt_bytes

from chitu.config.schema import CacheConfig, StoreConfig
from chitu.kv_cache.tiers.build import DECODE_HOST_BYTES, decode_cache
from chitu.kv_cache.tiers.page_store import PageStore, StoreError
from chitu.protocol import CancelRequest, DecodeRequest, PrefillRequest, SamplingParams


def pair_over(prefill: PageStore, decode: PageStore) -> tuple[TieredPair, Stored]:
    pair = TieredPair(
        lambda wire: Stored({"store": prefill}, num_pages=64, sender=wire),
        lambda wire: Stored({"store": decode}, num_pages=64, receiver=wire),
    )
    assert isinstance(pair.decode, Stored)
    return pair, pair.decode


def test_p_computes_what_is_new_in_a_turn_and_takes_the_answers_from_d() -> None:
    store = MemoryStore()
    pair, decode = pair_over(store, store)
    prompt, known = prompt_of(1, 22), 0
    for turn in range(4):
        assert pair.ask(turn, prompt, max_tokens=13) == known // PAGE_SIZE * PAGE_SIZE
        known = len(prompt) + 12  # the newest token has no K and V yet
        prompt = [*prompt, *decode.tokens[room_of(turn)], *range(5)]
    assert sorted(store.records) == sorted(names_of(decode, prompt[:known]))
    assert decode.copies.extracted and not decode.copies.restored
    pair.prefill.check_empty()
    decode.check_empty()


def test_d_hands_on_what_p_lacks_and_nothing_else() -> None:
    """The page in which the prompt ends is the first one handed on. A request that keeps out of the cache leaves none,
    and pages of a salt serve that salt only."""
    theirs, ours = MemoryStore(), MemoryStore()
    pair, decode = pair_over(theirs, ours)
    prompt = prompt_of(1, 22)
    pair.ask(0, prompt, max_tokens=13, salt=None)
    assert not theirs.records and not ours.records
    pair.ask(1, prompt, max_tokens=13, salt="mine")
    tokens = prompt + decode.tokens[room_of(1)][:12]
    names = names_of(decode, tokens, "mine")
    assert sorted(theirs.records) == sorted(names[:5]) and sorted(ours.records) == sorted(names[5:8])
    pair.ask(2, tokens[:25], max_tokens=1, salt="mine")
    assert len(ours.records) == 3


def test_d_leaves_nothing_of_a_request_that_is_cancelled() -> None:
    store = MemoryStore()
    pair, decode = pair_over(MemoryStore(), store)
    room, tokens = room_of(0), prompt_bytes(prompt_of(1, 22))
    sampling = SamplingParams(60, temperature=0.0)
    decode.scheduler.submit(DecodeRequest(room, "r", tokens, sampling, 0, 1, cache_salt=""))
    pair.prefill.scheduler.submit(PrefillRequest(room, "r", tokens, 0, 1, cache_salt=""))
    while len(decode.tokens.get(room, [])) < 20:
        pair.turn()
    decode.scheduler.submit(CancelRequest(room))
    decode.run()
    assert not decode.copies.extracted and not store.records


def test_d_takes_a_bounded_part_of_host_memory_and_gives_the_store_none() -> None:
    for host_bytes in (1000, DECODE_HOST_BYTES, DECODE_HOST_BYTES + 1):
        config = decode_cache(CacheConfig(host_bytes=host_bytes, store=StoreConfig(master="m:1", segment_bytes=7)))
        assert config.host_bytes == min(host_bytes, DECODE_HOST_BYTES)
        assert config.store == StoreConfig(master="m:1")


def test_a_store_that_fails_costs_d_no_token_and_p_a_prefill() -> None:
    ours = MemoryStore()
    pair, decode = pair_over(MemoryStore(), ours)
    ours.error = StoreError("away")
    prompt = prompt_of(1, 22)
    pair.ask(0, prompt, max_tokens=13)
    longer = [*prompt, *decode.tokens[room_of(0)], 9]
    assert pair.ask(1, longer, max_tokens=13) == 20  # of the prompt
    decode.check_empty()
