"""What drafts are made of and how many of them a step computes."""

from __future__ import annotations

import itertools
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import INFO, PAGE_SIZE, Instance, prompt_of, room_of
from support.requests import unified_request, with_options

from chitu.assets import TINY_MODEL_DIR
from chitu.engine.executor import StepPlan, StepResult
from chitu.errors import Internal
from chitu.fake.executor import expected_tokens
from chitu.grammars import GrammarCompiler
from chitu.grammars.compiler import CompiledGrammar, Matcher
from chitu.instance.draft_source import Proposal
from chitu.instance.drafts import EXPLORE, PRICED_STEPS, Drafts, source_of
from chitu.instance.grammar_drafts import GrammarDrafts
from chitu.instance.prediction_drafts import FOUND_AGAIN, PredictionDrafts
from chitu.instance.sequences import Sequence, SequenceTimes
from chitu.instance.text_drafts import LEAST, LONGEST, MOST_PLACES, TextDrafts
from chitu.protocol import Grammar, RequestHead, SamplingParams, StepRates, pack_i32
from chitu.tokenizer import Tokenizer

DRAFTING = msgspec.structs.replace(INFO, most_drafts=15)
small_texts = st.lists(st.integers(0, 3), min_size=1, max_size=400)

# ------------------------------------------------------------------------------------------------------------- the text


def looked_up(text: list[int]) -> list[int]:
    """Return what follows the place with the longest match among the newest ones."""
    best = length = 0
    places = [at for at in range(len(text) - 1, LEAST - 1, -1) if text[at - LEAST : at] == text[-LEAST:]]
    for place in places[:MOST_PLACES]:
        found = LEAST
        while found < min(place, LONGEST) and text[place - 1 - found] == text[len(text) - 1 - found]:
            found += 1
        if found > length:
            best, length = place, found
    return text[best:] if best else []


def taken(text: list[int], cuts: list[int]) -> TextDrafts:
    source, start = TextDrafts(), 0
    for length in cuts:
        source.take(array("i", text[start : start + length]))
        start += length
    source.take(array("i", text[start:]))
    return source


@given(small_texts, st.integers(1, 15), st.lists(st.integers(1, 60), max_size=9))
def test_a_guess_is_what_followed_the_longest_match_however_the_text_came(
    text: list[int], most: int, cuts: list[int]
) -> None:
    guess, right = list(taken(text, cuts).propose(most).tokens), looked_up(text)
    assert guess[: len(right)] == right[:most]
    assert len(guess) == (most if right else 0)


def test_a_text_that_repeats_is_guessed_on_beyond_its_end() -> None:
    source = TextDrafts()
    source.take(array("i", [7, 1, 2, 3, 1, 2, 3]))
    assert source.propose(8).tokens == [1, 2, 3, 1, 2, 3, 1, 2]


def test_a_longer_match_is_surer() -> None:
    source = TextDrafts()
    source.take(array("i", [*range(20), 99, 5, 6]))
    few = source.propose(1).sureness
    source.take(array("i", range(7, 14)))
    assert source.propose(1) == Proposal([14], "text", few + 4)


# ------------------------------------------------------------------------------------------------------- the prediction


def test_a_prediction_is_followed_left_and_found_again() -> None:
    predicted = [*range(10, 30)]
    source = PredictionDrafts(pack_i32(predicted), prompt_len=2)
    source.take(array("i", [1, 2]))  # the prompt
    assert list(source.propose(3).tokens) == [10, 11, 12]
    source.take(array("i", [10, 11]))
    assert list(source.propose(3).tokens) == [12, 13, 14]
    source.take(array("i", [900]))
    assert not source.propose(3).tokens
    for token in (15, 16, 17)[: FOUND_AGAIN - 1]:
        source.take(array("i", [token]))
        assert not source.propose(3).tokens
    source.take(array("i", [17]))
    assert list(source.propose(9)[0]) == [*range(18, 27)]
    source.take(array("i", range(18, 30)))
    assert not source.propose(3).tokens, "the prediction is over"


def test_bytes_across_two_tokens_are_no_place() -> None:
    source = PredictionDrafts(pack_i32([0x100, 0x100, 0x100, 0x1, 5]), prompt_len=0)
    source.take(array("i", [7, 0x10000, 0x10000, 0x10000]))  # the bytes of the prediction, but shifted by one
    assert not source.propose(3).tokens


class Fixed:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def take(self, tokens: object) -> None: ...

    def propose(self, most: int) -> Proposal:
        return Proposal(self._tokens[:most], "fixed")


# ---------------------------------------------------------------------------------------------------------- the grammar

NAMED = Grammar("json_schema", '{"type":"object","properties":{"name":{"type":"string"}},"required":["name"]}')


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY_MODEL_DIR)


@pytest.fixture(scope="module")
def named(tokenizer: Tokenizer) -> CompiledGrammar:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(NAMED)


def encoded(tokenizer: Tokenizer, text: str) -> array[int]:
    return array("i", tokenizer.encode(text, add_special_tokens=False))


def test_a_grammar_guesses_what_it_forces_and_cuts_other_guesses(named: CompiledGrammar, tokenizer: Tokenizer) -> None:
    right = encoded(tokenizer, 'name": "x')
    for inner, source in ((Fixed([]), "grammar"), (Fixed([*right]), "fixed"), (Fixed([right[0], 9999]), "grammar")):
        guesses = GrammarDrafts(named.guessing_matcher(), inner, prompt_len=2)
        guesses.take(array("i", [1, 2]) + encoded(tokenizer, '{"'))
        guess = guesses.propose(15)
        assert guess.source == source and guess.tokens
        assert list(guess.tokens) == list(right[: len(guess.tokens)])


@pytest.mark.parametrize("strange", [-1, 1 << 30], ids=["negative", "huge"])
def test_ids_that_no_model_has_are_cut_and_harm_no_grammar(
    named: CompiledGrammar, tokenizer: Tokenizer, strange: int
) -> None:
    guesses = GrammarDrafts(named.guessing_matcher(), Fixed([strange, 5]), prompt_len=0)
    for token in encoded(tokenizer, '{"'):
        guesses.propose(15)
        guesses.take(array("i", [token]))
    assert guesses.propose(15).source == "grammar"


def test_a_grammar_whose_guesses_cost_too_much_or_that_is_left_guesses_no_more(
    named: CompiledGrammar, tokenizer: Tokenizer
) -> None:
    left = GrammarDrafts(named.guessing_matcher(), Fixed([5, 6]), prompt_len=0)
    left.take(encoded(tokenizer, "no object"))
    ticks = itertools.count()
    costly = Matcher(named.guessing_matcher()._matcher, tokenizer.vocab_size, clock=lambda: 1.0 * next(ticks))
    dear = GrammarDrafts(costly, Fixed([]), prompt_len=0)
    dear.take(encoded(tokenizer, '{"'))
    dear.propose(15)
    for guesses in (left, dear):
        assert not guesses.propose(15).tokens


# ------------------------------------------------------------------------------------------------------------ the price


def decoding(count: int, max_tokens: int = 100) -> list[Sequence]:
    found = []
    for number in range(count):
        head = RequestHead(room_of(number), f"r{number}", pack_i32([1, 2, 3]))
        found.append(Sequence(head, (0.0, number), SequenceTimes(0.0), SamplingParams(max_tokens)))
        found[-1].emitted.append(5)
        found[-1].kv_len = 3
    return found


def chosen(drafts: Drafts, sequences: list[Sequence], rates: StepRates) -> int:
    return sum(map(len, drafts.choose(sequences, rates, PRICED_STEPS).values()))


def learnt(rate: float) -> Drafts:
    """Return drafts whose guesses are known to be right that often."""
    drafts, sequences = Drafts(15, 64, 1000, lambda _: Fixed([9] * 15)), decoding(1)
    for turn in range(400):
        drafts.choose(sequences, StepRates(), 0)
        drafts.note(sequences[0], 1, int(turn * rate) != int((turn + 1) * rate))
    return drafts


READ_WEIGHTS = StepRates(decode_step_s=1.0, row_s=0.02, decode_steps=99)
"""A machine whose steps take as long as it reads the weights."""


def test_drafts_are_as_long_as_they_pay() -> None:
    alone = [chosen(learnt(rate), decoding(1), READ_WEIGHTS) for rate in (0.02, 0.3, 0.6, 0.99)]
    assert alone[0] <= 1 and alone[3] == 15 and alone == sorted(alone) and alone[1] < alone[2]
    full = chosen(learnt(0.6), decoding(32), READ_WEIGHTS)
    assert full < 32 * alone[2] / 4, "beside many others a row costs as much as a request"
    costly = StepRates(row_s=1.0, decode_steps=99)
    assert not chosen(learnt(0.9), decoding(4), costly), "where time grows by the row, no guess pays"


def test_what_is_never_tried_is_tried_now_and_then() -> None:
    drafts, sequences = learnt(0.0), decoding(4)
    tried = [chosen(drafts, sequences, READ_WEIGHTS) for _ in range(2 * EXPLORE)]
    assert sum(count > 0 for count in tried) == 2


def test_no_draft_goes_beyond_the_last_token_the_rows_or_the_vocabulary() -> None:
    for left in range(1, 5):
        assert chosen(learnt(0.99), decoding(1, max_tokens=1 + left), READ_WEIGHTS) == left - 1
    few = Drafts(15, 5, 1000, lambda _: Fixed([9] * 15))
    assert 2 + chosen(few, decoding(2), READ_WEIGHTS) <= 5
    outside = Drafts(15, 64, 1000, lambda _: Fixed([9, 999, 1000, 9]))
    assert max(map(len, outside.choose(decoding(1), StepRates(), 0).values())) <= 2
    assert not Drafts(15, 64, 1000, lambda _: Fixed([-1, 9])).choose(decoding(1), StepRates(), 0)


# --------------------------------------------------------------------------------------------------------- the instance


def ask(instance: Instance, index: int, prompt: list[int], count: int, **options: bool) -> None:
    request = unified_request(room_of(index), f"r{index}", pack_i32(prompt), SamplingParams(count, temperature=0.0))
    instance.scheduler.submit(with_options(request, **options))


def right(sequence: Sequence) -> Fixed:
    """Return a source that is always right, for one request alone."""

    class Right(Fixed):
        def propose(self, most: int) -> Proposal:
            return Proposal(self._tokens[len(sequence.emitted) :][:most], "fixed")

    prompt = array("i", sequence.head.token_ids).tolist()
    return Right(expected_tokens(prompt, sequence.max_new_tokens, INFO.vocab_size))


def test_right_drafts_end_an_answer_in_a_sixteenth_of_the_steps_and_are_reported() -> None:
    instance = Instance(32, info=DRAFTING, draft_source=right)
    ask(instance, 1, prompt_of(1, 4), 33)
    ask(instance, 2, prompt_of(2, 4), 33, is_drafted=False)
    while room_of(1) not in instance.finishes:
        instance.scheduler.step()
    assert instance.scheduler.load.steps == 3, "a prefill, and two steps of sixteen tokens"
    instance.run()
    for index in (1, 2):
        assert instance.tokens[room_of(index)] == expected_tokens(prompt_of(index, 4), 33, INFO.vocab_size)
    assert instance.finishes[room_of(1)].drafts == (("fixed", 30, 30),)
    assert not instance.finishes[room_of(2)].drafts


def test_drafts_take_no_page_from_the_cache_and_retract_nobody() -> None:
    cached = prompt_of(9, 16)
    for num_pages in range(8, 24):
        instance = Instance(num_pages, info=DRAFTING, draft_source=right)
        ask(instance, 0, cached, 1)
        instance.run()
        kept = instance.scheduler.load.pages_cached
        ask(instance, 1, prompt_of(1, 3), 5)
        ask(instance, 2, prompt_of(2, 3), 5)
        instance.run()
        needed = 2 * -(-(3 + 5) // PAGE_SIZE)
        load = instance.scheduler.load
        assert not load.retractions
        assert load.evictions <= max(0, kept + needed - num_pages), "only what the answers themselves needed"


def test_a_draft_evicts_nothing_though_it_would_fit() -> None:
    instance = Instance(12, info=DRAFTING, draft_source=right)
    ask(instance, 0, prompt_of(9, 33), 1)
    instance.run()
    assert instance.scheduler.load.pages_cached == 8
    ask(instance, 1, prompt_of(1, 3), 40)
    while len(instance.tokens.get(room_of(1), ())) < 2:
        instance.scheduler.step()
    assert instance.executor.steps > 1 and len(instance.tokens[room_of(1)]) > 4, "it drafted nothing"
    assert not instance.scheduler.load.evictions
    instance.run()
    assert instance.tokens[room_of(1)] == expected_tokens(prompt_of(1, 3), 40, INFO.vocab_size)


def test_the_kv_of_the_newest_token_is_not_cached_at_a_border_of_pages() -> None:
    """It may be that of a draft which was wrong."""
    for count in range(4, 12):
        instance = Instance(32, info=DRAFTING, draft_source=right)
        prompt = prompt_of(1, 6)
        ask(instance, 1, prompt, count)
        instance.run()
        longer = [*prompt, *instance.tokens[room_of(1)], 77, 78]
        ask(instance, 2, longer, 9)
        instance.run()
        assert instance.tokens[room_of(2)] == expected_tokens(longer, 9, INFO.vocab_size)
        assert instance.cached[room_of(2)] == (6 + count - 1) // PAGE_SIZE * PAGE_SIZE


def test_a_model_that_takes_no_drafts_gets_none() -> None:
    instance = Instance(32)
    assert not Drafts(min(12, INFO.most_drafts), 8, 1000).is_on
    ask(instance, 1, prompt_of(1, 4), 9)
    instance.run()
    assert not instance.finishes[room_of(1)].drafts


@pytest.mark.parametrize("wrong", ["order", "too many", "none"])
def test_a_result_that_does_not_fit_its_drafts_ends_the_instance(wrong: str) -> None:
    instance = Instance(32, info=DRAFTING, draft_source=right)
    for index in (1, 2):
        ask(instance, index, prompt_of(index, 4), 20)
    plain = instance.executor.execute

    def execute(plan: StepPlan, *rest: object) -> StepResult:
        result = plain(plan, *rest)  # type: ignore[arg-type]
        if plan.drafts and wrong == "order":
            result.slots.reverse()
        elif plan.drafts and wrong == "too many":
            result.slots += result.slots[-1:] * 16
            result.tokens += result.tokens[-1:] * 16
        elif plan.drafts:
            del result.slots[:], result.tokens[:]
        return result

    instance.executor.execute = execute  # type: ignore[method-assign]
    with pytest.raises(Internal, match="its plan says"):
        instance.run()


def test_sources_are_by_prediction_and_text() -> None:
    (sequence,) = decoding(1)
    sequence.prediction = pack_i32([40, 41])
    source = source_of(sequence)
    source.take(array("i", [7, 8, 9, 7, 8]))
    assert source.propose(2) == Proposal([9, 7], "text", 0), "behind an answer that the prediction does not begin like"
