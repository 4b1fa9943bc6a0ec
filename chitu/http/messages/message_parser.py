"""From the text of a chat's choice to its message, and which formats a model has. Pure; loop thread.

The formats are told by the text of the chat template, which writes them itself for the turns that went before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from chitu.errors import InvalidRequest
from chitu.http.messages.call_parser import CallParser
from chitu.http.messages.delta import CallDelta, MessageDelta, joined
from chitu.http.messages.hermes import HermesParser
from chitu.http.messages.llama import LlamaParser
from chitu.http.messages.mistral import ARGS, MARK, MistralParser, NamedMistralParser
from chitu.http.messages.reasoning import MARKS, ReasoningMarks, ReasoningParser
from chitu.protocol import Reasoning

CALL_FORMATS: tuple[tuple[tuple[str, ...], type[CallParser]], ...] = (
    ((MARK, ARGS), NamedMistralParser),
    ((MARK,), MistralParser),
    (("<tool_call>", '"arguments"'), HermesParser),
    (("<|start_header_id|>", '"parameters"'), LlamaParser),
)
"""What a template has that writes calls so; the first one that has all of it."""


class MessageFormat(NamedTuple):
    """Of one checkpoint."""

    calls: type[CallParser] | None
    """None: it writes none, or in a way that is not known here."""
    reasoning: ReasoningMarks | None

    @classmethod
    def of(cls, template: str) -> MessageFormat:
        """By the text of its chat template."""
        calls = next((parser for texts, parser in CALL_FORMATS if all(text in template for text in texts)), None)
        return cls(calls, next((marks for marks in MARKS if marks.close in template), None))


def takes_several_calls(render: Callable[[list[dict[str, Any]]], object]) -> bool:
    """Whether an answer with several calls can be sent back: some templates (Llama 3's) take one call alone."""
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}

    def takes(count: int) -> bool:
        answer = {"role": "assistant", "content": "", "tool_calls": [call] * count}
        try:
            render([{"role": "user", "content": ""}, answer])
        except InvalidRequest:
            return False
        return True

    return takes(2) or not takes(1)


class MessagePlan(NamedTuple):
    """How the choices of one request are read."""

    reasoning: ReasoningMarks | None
    """None: it stays in the content."""
    is_reasoning: bool
    """The prompt ended within it."""
    shows_reasoning: bool
    calls: type[CallParser] | None
    """None: no tools are offered."""
    names: Collection[str]
    """Of the tools."""
    is_streamed: bool
    is_parallel: bool

    def marks(self) -> Iterable[str]:
        """What the text must have, be it special tokens or not."""
        return (*(self.calls.needed if self.calls is not None else ()), *(self.reasoning or ()))

    def reasoning_ahead(self, prompt: str) -> Reasoning | None:
        """What may come ahead of an answer to this prompt; None where nothing does, or the prompt has it already."""
        if self.reasoning is None or prompt.rstrip().endswith(self.reasoning.close):
            return None
        return Reasoning(self.reasoning.open, self.reasoning.close, self.is_reasoning)

    def parser(self) -> MessageParser:
        """Of a new choice."""
        reasoning = ReasoningParser(self.reasoning, self.is_reasoning) if self.reasoning is not None else None
        calls = self.calls(self.names, self.is_streamed, self.is_parallel) if self.calls is not None else None
        return MessageParser(reasoning, calls, self.shows_reasoning)


class MessageParser:
    """One per choice: `push` its text, then `finish`."""

    def __init__(self, reasoning: ReasoningParser | None, calls: CallParser | None, shows_reasoning: bool) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._shows_reasoning = shows_reasoning

    @property
    def may_reason(self) -> bool:
        """What comes may be reasoning."""
        return self._reasoning is not None

    @property
    def is_reasoning(self) -> bool:
        """What comes next is reasoning, as far as can be said."""
        return self._reasoning is not None and self._reasoning.is_inside

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    @property
    def is_complete(self) -> bool:
        """Nothing may follow: the one call that may be made was made."""
        return self._calls is not None and self._calls.is_complete

    def push(self, text: str) -> str | MessageDelta:
        """What can be shown now: text alone is content. Empty: nothing."""
        if self._reasoning is None:
            return self._content(text, CallParser.push)
        reasoning, text = self._reasoning.push(text)
        if self._reasoning.is_over:
            self._reasoning = None
        return self._with_reasoning(reasoning, self._content(text, CallParser.push))

    def finish(self) -> str | MessageDelta:
        """The rest: no more text will come."""
        reasoning, text = self._reasoning.finish() if self._reasoning is not None else ("", "")
        shown = joined([self._content(text, CallParser.push), self._content("", lambda calls, _: calls.finish())])
        return self._with_reasoning(reasoning, shown)

    def _content(self, text: str, read: Callable[[CallParser, str], list[str | CallDelta]]) -> str | MessageDelta:
        return text if self._calls is None else joined(read(self._calls, text))

    def _with_reasoning(self, reasoning: str, shown: str | MessageDelta) -> str | MessageDelta:
        if not reasoning or not self._shows_reasoning:
            return shown
        return joined([MessageDelta(reasoning=reasoning), shown])
