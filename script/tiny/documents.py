"""Training documents: token ids with the weight of each token in the loss. Called by the training loop and the report.

Two kinds. A chat document is a conversation in the chat template: a list of facts with a first question, then many more
questions and answers, so that one document teaches dozens of answers. A plain document has no template: a list, then
its facts again in another order, then perhaps "Question: ... Answer: ..." as people type it into a completion box.

Only what an answer must contain counts in the loss: the assistant's turns, and the second time a fact is said.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from chitu.assets.tiny_tasks import (
    ADJECTIVES,
    FACT_TOKENS,
    NOUNS,
    TASKS,
    Fact,
    absent_answer,
    check_fact,
    draw_absent,
    draw_facts,
    say_list,
)
from chitu.tools.make_model import BOS, END_OF_TURN, EOS, START_OF_TURN, train_tokenizer

VOCAB_SIZE = 1280
SIDE_TASKS = {"copy": 0.15, "sum": 0.55, "sort": 0.2, "other": 0.1}
"""Tasks that need no list, with the share of each. Sums are learned last."""


def tiny_tokenizer() -> Tokenizer:
    """Return the tokenizer of chitu-tiny: every word of the lexicon, with the space before it, is one token."""

    def texts() -> Iterator[str]:
        rng = random.Random(0)
        for name, task in TASKS.items():
            for _ in range(1500):
                example = task(rng, 6 if name in ("recall", "absent", "yes_no") else 0, False)
                yield example.prompt
                yield f"{example.answer}\nQuestion: Answer:"
        for word in (*ADJECTIVES, *NOUNS):
            yield f" {word}" * 300
        yield "user\nassistant\nsystem\n" * 300

    return train_tokenizer(VOCAB_SIZE, texts())


@dataclass(slots=True)
class Document:
    """Token ids and, for each, its weight in the loss (0: not predicted)."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Mix:
    """Composition of a batch, as shares between 0 and 1."""

    plain: float = 0.3
    """Share of documents without the chat template."""
    side: float = 0.1
    """Share of chat turns that are side tasks."""
    checks: float = 0.25
    """Share of chat turns that are yes/no questions; half as many ask about names that are not on the list."""


class Writer:
    """Writes documents with one tokenizer. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._special = {token: tokenizer.token_to_id(token) for token in (BOS, EOS, START_OF_TURN, END_OF_TURN)}
        self._known: dict[str, list[int]] = {}

    def batch(self, count: int, length: int, mix: Mix, held_out: bool = False) -> list[Document]:
        """Return `count` documents of exactly `length` tokens."""
        return [self.document(length, mix, held_out) for _ in range(count)]

    def document(self, length: int, mix: Mix, held_out: bool = False) -> Document:
        rng = self._rng
        room = max(2, (length - 40) // FACT_TOKENS)
        if rng.random() < mix.plain:
            facts = draw_facts(rng, max(2, int(length / FACT_TOKENS * rng.choice((0.4, 0.5, 0.6)))), held_out)
            document = self._plain(facts, length)
        else:
            share = rng.choice((0.0, 0.3, 0.5, 0.7, 0.9, 1.0)) if length > 512 else rng.choice((0.3, 0.5, 0.7))
            if mix.side >= 1.0:
                share = 0.0
            facts = draw_facts(rng, max(2, int(room * share)), held_out) if share else []
            document = self._chat(facts, length, mix, held_out)
        del document.ids[length:], document.weights[length:]
        return document

    def _plain(self, facts: Sequence[Fact], length: int) -> Document:
        rng = self._rng
        document = Document([self._special[BOS]], [0.0])
        self._put(document, say_list(facts), 0.0)
        asked = rng.random() < 0.4
        while len(document.ids) < length:
            fact = rng.choice(facts)
            if asked:
                self._put(document, f" Question: {fact.question} Answer:", 0.0)
                self._put(document, f" {fact.sentence}", 1.0)
                if rng.random() < 0.3:
                    document.ids.append(self._special[EOS])
                    document.weights.append(1.0)
                    self._put(document, say_list(facts), 0.0)
            else:
                self._put(document, f" The {fact.name}", 0.0)
                self._put(document, f" {fact.relation.says} {fact.value}.", 1.0)
        return document

    def _chat(self, facts: Sequence[Fact], length: int, mix: Mix, held_out: bool) -> Document:
        document = Document([self._special[BOS]], [0.0])
        first = True
        while len(document.ids) < length:
            question, answer = self._turn(facts, mix, held_out)
            if first and facts:
                question = f"{say_list(facts)} {question}"
            self._put(document, START_OF_TURN, 0.0)
            self._put(document, "user\n", 0.0)
            self._put(document, question, 0.0)
            for text in (END_OF_TURN, "\n", START_OF_TURN, "assistant\n"):
                self._put(document, text, 0.0)
            self._put(document, answer, 1.0)
            self._put(document, END_OF_TURN, 1.0)
            self._put(document, "\n", 0.0)
            first = False
        return document

    def _turn(self, facts: Sequence[Fact], mix: Mix, held_out: bool) -> tuple[str, str]:
        rng = self._rng
        kind = rng.random()
        if kind < mix.side or not facts:
            task = rng.choices(list(SIDE_TASKS), list(SIDE_TASKS.values()))[0]
            example = TASKS[task](rng, 0, held_out)
            return example.prompt, example.answer
        fact = rng.choice(facts)
        if kind < mix.side + mix.checks:
            question, answer, _ = check_fact(rng, facts, fact, held_out)
            return question, answer
        if kind < mix.side + 1.5 * mix.checks:
            fact = draw_absent(rng, facts, held_out)
            return fact.question, absent_answer(fact)
        return fact.question, fact.sentence

    def _put(self, document: Document, text: str, weight: float) -> None:
        special = self._special.get(text)
        ids = [special] if special is not None else self._encode(text)
        document.ids += ids
        document.weights += [weight] * len(ids)

    def _encode(self, text: str) -> list[int]:
        if len(text) > 60:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return ids
        if text not in self._known:
            if len(self._known) > 100_000:
                self._known.clear()
            self._known[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._known[text]
