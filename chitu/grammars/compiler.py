"""A `Grammar` compiled for one tokenizer, and the matcher that follows one answer: llguidance, within bounds.

The threads of `GrammarStore` and the router's body process compile; a matcher belongs to the step thread. llguidance
works in Rust without the GIL and counts its work, so a hostile grammar ends with an error and not with a stall:
`LIMITS` bounds a compilation, a mask and the memory of both, `MASK_S_PER_TOKEN` the total cost of an answer's masks.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from chitu.errors import InvalidRequest
from chitu.grammars.marks import behind_reasoning, quoted
from chitu.grammars.schema import enforceable, find_fault, in_plain_words
from chitu.grammars.tool_calls import OTHER_ANSWER, begins_as_json, json_value, tool_calls_lark
from chitu.protocol import Grammar, ToolCalls

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from chitu.tokenizer import Tokenizer

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 300_000,  # to compile regular expressions: about 10 ms
    "step_lexer_fuel": 100_000,  # per mask: about 10 ms
    "step_max_items": 20_000,  # of the parser, per mask: 1 ms
    "max_items_in_row": 2_000,
    "max_lexer_states": 5_000,  # 1 to 5 kB each
    "max_grammar_size": 20_000,
}
MASK_GRACE_S, MASK_S_PER_TOKEN = 0.5, 0.005
"""Processor time that the masks of one answer may take: a fixed part, plus a part per token. Beyond it the answer ends
with an error, because the other answers of its batch wait for each mask."""
MAX_GBNF_CHARS = 2048
"""Characters of a grammar in GBNF (`root ::= ...`): its translation, in Python, takes quadratic time."""
FAULT_S = 0.5
"""Processor time in which the place of an error within a schema is looked for."""
ERROR_CHARS = 300
"""Characters of an error of llguidance that are repeated to the client."""

_JSON_OPTIONS: Any = {
    # All options with which a schema itself (`x-guidance`) could have keywords ignored, or get output that is not JSON.
    "lenient": False,
    "coerce_one_of": False,
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    # One space, or a line break with indentation. Without this bound a model may emit spaces until the end.
    "whitespace_pattern": r"\x20|\r?\n[\x20\x09]{0,20}",
}
_calls_decoder = msgspec.json.Decoder(ToolCalls)
_ASCII_CLASSES = {"d": "[0-9]", "w": "[0-9A-Za-z_]", "s": r"[\t\n\v\f\r ]"}


class Matcher:
    """Position of one answer in its grammar. `clock`: processor seconds of the calling thread. `renew` returns a
    matcher at the beginning that has not met any text yet."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        clock: Callable[[], float] = time.thread_time,
        renew: Callable[[], LLMatcher] | None = None,
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._clock = clock
        self._renew = renew
        self._spent_s = 0.0
        self._tokens: list[int] = []
        self._error = ""

    def consume(self, tokens: Sequence[int]) -> None:
        """Advance by emitted tokens. If one violates the grammar, the next `mask` raises."""
        self._tokens += tokens
        if self._error or self._matcher.consume_tokens(list(tokens)):
            return
        start_s = self._clock()
        error = _in_one_line(self._matcher.get_error()) or "an emitted token does not follow the grammar"
        if not self._is_renewed():
            self._error = error
        self._spent_s += self._clock() - start_s

    def mask(self) -> npt.NDArray[np.uint32]:
        """Return which tokens may come next: one bit each, the first token in the lowest bit, at least one. After the
        end of the answer these are the eos. Raise InvalidRequest if there is no mask, or if masks cost too much."""
        start_s = self._clock()
        if not self._error:
            bits = self._bits()
            if self._matcher.is_error() and self._is_renewed():
                bits = self._bits()
            self._spent_s += self._clock() - start_s
            if self._matcher.is_error():
                self._error = _in_one_line(self._matcher.get_error())
            elif not bits.any():
                self._error = "no token of the model is allowed next"
            else:
                self._bound_cost()
        if self._error:
            raise InvalidRequest(f"the grammar of this request cannot be followed any further: {self._error}")
        return bits

    def forced(self) -> list[int]:
        """Return tokens of the only text that may come next, as the tokenizer spells it; none if there is a choice, or
        if the grammar cannot be followed."""
        if self._error:
            return []
        start_s = self._clock()
        tokens = list(self._matcher.compute_ff_tokens())
        self._spent_s += self._clock() - start_s
        self._bound_cost()
        return tokens

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may come next, one after the other; 0 if the grammar cannot be followed."""
        known = list(itertools.takewhile(lambda token: 0 <= token < self._vocab_size, tokens))
        if not known or self._error:
            return 0
        start_s = self._clock()
        count = self._matcher.validate_tokens(known)
        self._spent_s += self._clock() - start_s
        self._bound_cost()
        return count

    def _bound_cost(self) -> None:
        if self._spent_s > MASK_GRACE_S + MASK_S_PER_TOKEN * len(self._tokens):
            self._error = f"it took {self._spent_s:.1f} s of processor time for {len(self._tokens)} tokens"

    def _bits(self) -> npt.NDArray[np.uint32]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: -(-self._vocab_size // 32)].copy()
        if self._vocab_size % 32:
            bits[-1] &= np.uint32((1 << self._vocab_size % 32) - 1)
        return bits

    def _is_renewed(self) -> bool:
        """Return whether a new matcher takes all tokens. One that fails may only have met too many texts: the states of
        all answers of a grammar count, also of those that a mask looked at."""
        if self._renew is None:
            return False
        self._matcher = self._renew()
        return bool(self._matcher.consume_tokens(self._tokens))


class CompiledGrammar:
    def __init__(self, template: LLMatcher, vocab_size: int, compile_again: Callable[[], LLMatcher]) -> None:
        self._template = template
        self._vocab_size = vocab_size
        self._compile_again = compile_again

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of an answer."""
        return Matcher(self._template.deep_copy(), self._vocab_size, renew=self._renewed)

    def guessing_matcher(self) -> Matcher:
        """Return one whose answer goes on without it: where it meets a limit, it allows nothing any more, and nothing
        is compiled again for it."""
        return Matcher(self._template.deep_copy(), self._vocab_size)

    def _renewed(self) -> LLMatcher:
        self._template = self._compile_again()
        return self._template.deep_copy()


class GrammarCompiler:
    """Compiler for one tokenizer. `vocab_size`: the model's, which may be above or below the tokenizer's. Creating one
    takes a second if the vocabulary is large. Raises InvalidRequest if the model has no eos."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        eos = [token for token in tokenizer.eos_token_ids if token < min(vocab_size, tokenizer.vocab_size)]
        if not eos:
            raise InvalidRequest("this model has no eos token, so that no answer could end where a grammar does")
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer  # 7 MB, only if needed

        self._engine = LLMatcher
        self._limits = LLParserLimits(**LIMITS, verbose_errors=False)
        self._vocab_size = vocab_size
        self._tokens = LLTokenizer(tokenizer.to_json(), n_vocab=max(vocab_size, tokenizer.vocab_size), eos_token=eos)
        self._added = tokenizer.added_token_ids
        self._eos = frozenset(eos)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar. Raise InvalidRequest if its text is invalid, is not supported, or costs too much. If a
        JSON schema in it is at fault, `param` is the schema's index and the place within it: `0.properties.a`."""
        try:
            source = self._source(grammar)
            if grammar.reasoning is not None:
                source = behind_reasoning(source, grammar.reasoning, self._added, self._eos)
            matcher = self._matcher(source)
        except (ValueError, TypeError, AttributeError, LookupError, msgspec.DecodeError, RecursionError) as error:
            if isinstance(error, (TypeError, AttributeError, LookupError)):
                self._raise_fault(grammar)  # the engine says better why a schema is none
            raise InvalidRequest(f"{grammar.kind}: {_in_one_line(str(error))}") from error
        if not matcher.is_error():
            # The first mask is the costliest, and shows that the grammar permits any token at all.
            compiled = CompiledGrammar(matcher, self._vocab_size, lambda: self._matcher(source))
            matcher.compute_bitmask()
            if not matcher.is_error():
                compiled.matcher().mask()
                return compiled
        self._raise_place(grammar)
        raise InvalidRequest(f"{grammar.kind}: {_in_one_line(matcher.get_error())}")

    def _raise_place(self, grammar: Grammar) -> None:
        """Raise InvalidRequest with the place that is at fault, if one is found."""
        if grammar.kind == "tool_calls":
            calls, places = _calls_decoder.decode(grammar.text), list[tuple[str, str]]()
            tool_calls_lark(calls, self._added, _JSON_OPTIONS, "", places)
            end_s = time.thread_time() + FAULT_S
            for place, terminal in places:
                problem = self._fault(self._engine.grammar_from_lark(f"start: T\nT: {terminal}\n"), draws=True)
                if problem and time.thread_time() < end_s:
                    raise InvalidRequest(f"it cannot be enforced: {problem}", place)
        self._raise_fault(grammar)

    def _raise_fault(self, grammar: Grammar) -> None:
        """Raise InvalidRequest with the place if one of the grammar's schemas would be refused by itself."""
        end_s = time.thread_time() + FAULT_S
        for index, schema in enumerate(_schemas_of(grammar)):
            fault = find_fault(schema, self._problem_of, lambda: time.thread_time() < end_s)
            if fault is not None:
                raise InvalidRequest(in_plain_words(fault.problem), f"{index}{fault.path}")

    def _checked_answer(self, answer: Grammar, index: int) -> str:
        """Return the source of an answer's grammar. If it is at fault by itself, raise InvalidRequest with the index
        that a schema would have there, and the place."""
        try:
            self.compile(answer)
            return self._source(answer)
        except InvalidRequest as error:
            place = (error.param or "0").partition(".")
            raise InvalidRequest(error.message, f"{index}{place[1]}{place[2]}") from None

    def _matcher(self, source: str) -> LLMatcher:
        return self._engine(self._tokens, source, log_level=0, limits=self._limits)

    def _fault(self, source: str, draws: bool = False) -> str:
        """Return why a grammar would be refused; empty if it would not. `draws`: also if it has no first token."""
        matcher = self._matcher(source)
        if draws and not matcher.is_error():
            matcher.compute_bitmask()
        return _in_one_line(matcher.get_error()) if matcher.is_error() else ""

    def _problem_of(self, schema: Any) -> str:
        """Return why this schema alone would be refused; empty if it would not."""
        source = self._engine.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)
        return self._fault(source)

    def _source(self, grammar: Grammar) -> str:
        text = grammar.text
        if grammar.kind == "json_object":
            text = '{"type":"object"}'
        if grammar.kind in ("json_object", "json_schema"):
            text = json.dumps(enforceable(json.loads(text)))
            return self._engine.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
        if grammar.kind == "regex":
            return self._engine.grammar_from_regex(_with_ascii_classes(text))
        if grammar.kind == "choice":
            choices = msgspec.json.decode(text, type=list[str])
            return self._engine.grammar_from_regex("|".join(map(_literally, choices)))
        if grammar.kind == "tool_calls":
            return self._source_of_calls(_calls_decoder.decode(text))
        if grammar.kind == "lark" and "::=" in text:
            text = _lark_of_gbnf(text)
        return self._engine.grammar_from_lark(text)

    def _source_of_calls(self, calls: ToolCalls) -> str:
        if calls.answer is None:
            return self._engine.grammar_from_lark(tool_calls_lark(calls, self._added, _JSON_OPTIONS))
        rule, others = self._answer(calls, calls.answer)
        lark = tool_calls_lark(calls, self._added, _JSON_OPTIONS, rule)
        return json.dumps({"grammars": [{"lark_grammar": lark}, *others]})

    def _answer(self, calls: ToolCalls, answer: Grammar) -> tuple[str, list[dict[str, Any]]]:
        """Return an answer without calls as a rule, and further grammars that it needs. The engine takes the first of
        two that begin alike, so raise InvalidRequest if such an answer may begin as a call does."""
        index = len(calls.calls)
        source = self._checked_answer(answer, index)
        is_text = calls.trigger not in self._added and not calls.text_begin
        if answer.kind in ("regex", "choice"):
            part = json.loads(source)["grammars"][0]["lark_grammar"].removeprefix("start: ")
            if is_text:
                part = f"({part}) & ~({quoted(calls.trigger)} /(?s:.*)/)"
                if self._fault(self._engine.grammar_from_lark(f"start: T\nT: {part}\n"), draws=True):
                    raise _begins_as_a_call(calls, index)
            return f"ANSWER: {part}", []
        if is_text and not (answer.kind != "lark" and begins_as_json(calls, self._added)):
            begun = self._tokens.tokenize_str(calls.trigger[:1])
            matcher = self._matcher(source)
            if matcher.try_consume_tokens(begun) == len(begun):
                raise _begins_as_a_call(calls, index)
        if answer.kind == "lark":
            return f"answer: @{OTHER_ANSWER}", [{"lark_grammar": source, "name": OTHER_ANSWER}]
        schema = {"type": "object"} if answer.kind == "json_object" else enforceable(json.loads(answer.text))
        return f"answer: {json_value(schema, _JSON_OPTIONS)}", []


def _begins_as_a_call(calls: ToolCalls, index: int) -> InvalidRequest:
    begun = f"such an answer may begin with {calls.trigger!r}, as calls of this model do"
    return InvalidRequest(f"{begun}; give the format without tools, or tools without it", f"{index}")


def _schemas_of(grammar: Grammar) -> list[Any]:
    """Return the JSON schemas that a grammar has, as they are enforced."""
    if grammar.kind == "tool_calls":
        calls = _calls_decoder.decode(grammar.text).calls
        return [enforceable(json.loads(bytes(call.schema))) for call in calls]
    return [enforceable(json.loads(grammar.text))] if grammar.kind == "json_schema" else []


def _lark_of_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    if len(text) > MAX_GBNF_CHARS:
        raise ValueError(f"{len(text)} characters of GBNF; at most {MAX_GBNF_CHARS} are accepted, and more in Lark")
    try:
        return any_to_lark(text)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(str(error)) from error


def _with_ascii_classes(regex: str) -> str:
    r"""Return a regular expression in which `\d`, `\w` and `\s` are ASCII, as other engines have it. A class may
    stand within another one, so it takes the place of its escape everywhere."""

    def ascii_class(found: re.Match[str]) -> str:
        known = _ASCII_CLASSES.get(found[1].lower(), found[0])
        return known.replace("[", "[^", 1) if found[1] in "DWS" else known

    return re.sub(r"\\(.)", ascii_class, regex, flags=re.DOTALL)


def _literally(text: str) -> str:
    """Return a regular expression that matches exactly this text."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _in_one_line(text: str) -> str:
    """Return an error of llguidance in one line. That of a regular expression has several, and its reason leads."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" ^~")]
    at = next((i for i, line in enumerate(lines) if line.startswith("error: ")), None)
    told = lines[:1] if at is None else [f"{lines[at].removeprefix('error: ')}:", *lines[:at]]
    return " ".join(told)[:ERROR_CHARS]
