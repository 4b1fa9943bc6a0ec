"""The tasks of chitu-tiny as questions with their right answers; pure Python, drawn from the caller's generator.

Called by the training script, the quickstart, `chitu chat`, the example button of the web page, `benchmark/recall.py`
and tests. The same generator state gives the same example everywhere.

Recall is the main task: a list of facts in plain English, then a question about one of them. The answer repeats the
whole fact, so it depends on one sentence anywhere in the prompt, and a page of the KV cache that is missing, late or
wrong becomes a wrong number.

Held-out examples use names and values that training never draws: they cannot have been learned by heart. A held-out
name has two words that are frequent in training but never occur together. Words are short, common and different in
their first letters if possible, because sorting them is one of the tasks.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_ADJECTIVES = """\
amber ancient bitter blue bold brave bright bronze calm clever cold copper crimson curious dark deep eager early empty
fancy fast fierce gentle giant golden grand green grey happy hidden hollow honest humble icy idle ivory jolly kind
late lazy little lonely loud lucky mighty misty modest narrow noble old orange pale patient plain polite proud purple
quick quiet rapid rare red royal rusty sandy secret sharp shy silent silver simple sleepy slow small smart snowy soft
stone strange sunny sweet tall tiny velvet violet warm wide wild wise wooden yellow
"""
_NOUNS = """\
acorn anchor apple arrow badger basket beacon bear bell bird boat bottle bridge bucket camel candle castle cedar
circle cloud comet crane crown desert dolphin dragon drum eagle engine falcon feather ferry finch flute forest
fountain fox garden giraffe glacier hammer harbor hawk heron hill horse island jacket jaguar kettle kite ladder lake
lamp lantern lemon leopard lion lizard magnet maple meadow mirror moon mountain needle oak ocean orchid otter owl
panther parrot pebble pencil piano pigeon pillow planet pony prism puppet rabbit raven ribbon river rocket saddle
sailor salmon shadow shell spider squirrel statue tiger tower trumpet tulip turtle valley violin wagon walnut whale
willow window wizard wolf zebra
"""

ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())

_SHARE = 4
"""One combination in this many is held out."""
FACT_TOKENS = 11
"""Tokens of one fact with chitu-tiny's tokenizer: a token for each word and digit, for the space before the number and
for the full stop."""
OVERHEAD_TOKENS = 20
"""Tokens of a recall prompt beside its facts: the question and the chat template around it."""
UNKNOWN = "I only know lists of facts, copying, small sums and sorting words."
"""The answer to everything else."""
_OTHER_QUESTIONS = """\
Who was {x}?
Who is {x}?
What is {x}?
Where is {x}?
When was {x} born?
Why is {x} so {y}?
How do I cook {x}?
How far is {x}?
Tell me about {x}.
Tell me a joke about {x}.
Write a poem about {x}.
Do you like {x}?
Can you help me with {x}?
Explain {x} to me.
What is the meaning of {x}?
What does {x} cost?
Is {x} better than {y}?
Translate {x} into {y}.
What do you think of {x} and {y}?
Hello
Hello!
Hi
Hi there
Good morning
How are you?
Who are you?
What is your name?
What can you do?
Help
Thanks
Thank you!
Bye
Write code for {x}
{x}
{x} {y}
{x}?
"""
_SYLLABLES = """\
a be ca da el fi go ha in ja ka lo me na o pa qui ro su ta un vi wa xe yo zu ber chen dor fran gol hun lin mar nap olo
pol ris san ton vel win ing ion er al
"""


def is_held_out(text: str) -> bool:
    """Return whether training never draws this name, value or task; the same on every machine (CRC-32 of the text)."""
    return zlib.crc32(text.encode()) % _SHARE == 0


@dataclass(frozen=True, slots=True)
class Example:
    """One question and its right answer."""

    task: str
    """Name of the task, a key of `TASKS`."""
    prompt: str
    """The user's message."""
    answer: str
    """The assistant's whole right answer."""
    value: str
    """Text that a right answer must contain (recall: the number)."""
    fact_index: int = -1
    """Index of the asked fact in the list, from 0; -1: none."""


@dataclass(frozen=True, slots=True)
class Relation:
    """One way to state that a name has a value, and to ask for it."""

    says: str
    asks: str
    checks: str
    """A yes/no question about the fact."""


RELATIONS = (
    Relation("has number", "What number does the {name} have?", "Does the {name} have number {value}?"),
    Relation("carries code", "What code does the {name} carry?", "Does the {name} carry code {value}?"),
    Relation("opens door", "Which door does the {name} open?", "Does the {name} open door {value}?"),
    Relation("guards room", "Which room does the {name} guard?", "Does the {name} guard room {value}?"),
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A name, a relation and a value of four digits."""

    name: str
    relation: Relation
    value: str

    @property
    def sentence(self) -> str:
        return f"The {self.name} {self.relation.says} {self.value}."

    @property
    def question(self) -> str:
        return self.relation.asks.format(name=self.name)


def facts_for(prompt_tokens: int) -> int:
    """Return the number of facts that fit in a recall prompt of this many tokens, with chitu-tiny's tokenizer and chat
    template."""
    return max(1, (prompt_tokens - OVERHEAD_TOKENS) // FACT_TOKENS)


def draw_name(rng: random.Random, held_out: bool = True) -> str:
    """Return an adjective and a noun."""
    while True:
        name = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
        if is_held_out(name) == held_out:
            return name


def draw_value(rng: random.Random, held_out: bool = True) -> str:
    """Return four digits, the first not 0."""
    while True:
        value = str(rng.randrange(1000, 10000))
        if is_held_out(value) == held_out:
            return value


def draw_facts(rng: random.Random, num_facts: int, held_out: bool = True) -> list[Fact]:
    """Return facts with different names. Values may repeat."""
    names: dict[str, None] = {}
    while len(names) < num_facts:
        names[draw_name(rng, held_out)] = None
    return [Fact(name, rng.choice(RELATIONS), draw_value(rng, held_out)) for name in names]


def draw_absent(rng: random.Random, facts: Sequence[Fact], held_out: bool = True) -> Fact:
    """Return a fact about a name that is not on the list."""
    present = {fact.name for fact in facts}
    while (name := draw_name(rng, held_out)) in present:
        pass
    return Fact(name, rng.choice(RELATIONS), draw_value(rng, held_out))


def say_list(facts: Sequence[Fact]) -> str:
    """Return the list as one paragraph."""
    return " ".join(fact.sentence for fact in facts)


def recall(rng: random.Random, num_facts: int, held_out: bool = True) -> Example:
    """Return a list of `num_facts` facts and the question for one of them, each equally likely."""
    facts = draw_facts(rng, num_facts, held_out)
    index = rng.randrange(num_facts)
    fact = facts[index]
    return Example("recall", f"{say_list(facts)} {fact.question}", fact.sentence, fact.value, index)


def absent(rng: random.Random, num_facts: int, held_out: bool = True) -> Example:
    """Return a list and a question about a name that is not on it."""
    facts = draw_facts(rng, num_facts, held_out)
    fact = draw_absent(rng, facts, held_out)
    answer = absent_answer(fact)
    return Example("absent", f"{say_list(facts)} {fact.question}", answer, "not on the list")


def absent_answer(fact: Fact) -> str:
    return f"The {fact.name} is not on the list."


def check_fact(rng: random.Random, facts: Sequence[Fact], fact: Fact, held_out: bool = True) -> tuple[str, str, str]:
    """Return a yes/no question on one fact of the list, yes and no equally likely: question, answer and "so yes" or "so
    no".

    The answer repeats the list's fact and then concludes, because a tiny model cannot conclude before it has read the
    fact.
    """
    if rng.random() < 0.5:
        if rng.random() < 0.5:
            return f"Is the {fact.name} on the list?", conclude(fact.sentence, "so yes"), "so yes"
        other = draw_absent(rng, facts, held_out)
        return f"Is the {other.name} on the list?", conclude(absent_answer(other), "so no"), "so no"
    if rng.random() < 0.5:
        question = fact.relation.checks.format(name=fact.name, value=fact.value)
        return question, conclude(fact.sentence, "so yes"), "so yes"
    while (value := draw_value(rng, held_out)) == fact.value:
        pass
    return fact.relation.checks.format(name=fact.name, value=value), conclude(fact.sentence, "so no"), "so no"


def conclude(sentence: str, verdict: str) -> str:
    return f"{sentence.removesuffix('.')}, {verdict}."


def yes_no(rng: random.Random, num_facts: int, held_out: bool = True) -> Example:
    """Return a list and a yes/no question: is the name on it, or does the name have this value."""
    facts = draw_facts(rng, num_facts, held_out)
    index = rng.randrange(num_facts)
    question, answer, value = check_fact(rng, facts, facts[index], held_out)
    return Example("yes_no", f"{say_list(facts)} {question}", answer, value, index)


def copy(rng: random.Random, num_words: int = 0, held_out: bool = True) -> Example:
    """Return words and numbers to repeat; 3 to 8 of them if `num_words` is 0."""
    while True:
        count = num_words or rng.randrange(3, 9)
        text = " ".join(
            draw_value(rng, held_out) if rng.random() < 0.25 else rng.choice(rng.choice((ADJECTIVES, NOUNS)))
            for _ in range(count)
        )
        if is_held_out(text) == held_out:
            return Example("copy", f"Repeat: {text}", f"Repeated: {text}", text)


def add(rng: random.Random, num_terms: int = 0, held_out: bool = True) -> Example:
    """Return a sum of numbers from 0 to 99; two of them if `num_terms` is 0."""
    while True:
        terms = [str(rng.randrange(100)) for _ in range(num_terms or 2)]
        text = " plus ".join(terms)
        if is_held_out(text) == held_out:
            total = str(sum(map(int, terms)))
            return Example("sum", f"What is {text}?", f"{text} is {total}.", total)


def sort_words(rng: random.Random, num_words: int = 0, held_out: bool = True) -> Example:
    """Return different nouns to sort alphabetically; 3 to 5 of them if `num_words` is 0."""
    while True:
        words = rng.sample(NOUNS, num_words or rng.randrange(3, 6))
        text = ", ".join(words)
        if is_held_out(text) == held_out:
            value = ", ".join(sorted(words))
            return Example("sort", f"Sort: {text}", f"Sorted: {value}", value)


def other(rng: random.Random, num_words: int = 0, held_out: bool = True) -> Example:
    """Return a question that belongs to no task, about an invented or common word."""

    def thing() -> str:
        kind = rng.random()
        if kind < 0.25:
            return f"the {rng.choice(NOUNS)}"
        if kind < 0.35:
            return rng.choice(ADJECTIVES)
        words = (
            "".join(rng.choices(_SYLLABLES.split(), k=rng.randrange(2, 5)))
            for _ in range(num_words or rng.choice((1, 1, 2)))
        )
        return " ".join(word.capitalize() if kind < 0.7 else word for word in words)

    while True:
        x, y = thing(), thing()
        if is_held_out(x) == held_out:
            return Example("other", rng.choice(_OTHER_QUESTIONS.splitlines()).format(x=x, y=y), UNKNOWN, UNKNOWN)


TASKS: dict[str, Callable[[random.Random, int, bool], Example]] = {
    "recall": recall,
    "absent": absent,
    "yes_no": yes_no,
    "copy": copy,
    "sum": add,
    "sort": sort_words,
    "other": other,
}
"""Tasks by name. Their number argument is the size: facts of the list, words, or terms."""
