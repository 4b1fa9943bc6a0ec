"""Parsing of a chat choice's text into its message, and detection of a model's formats. Pure; loop thread.

The text of the chat template tells the formats, because it writes them itself for earlier turns.
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
"""Texts in a chat template, and the parser of its calls. The first entry whose texts are all there applies."""


class MessageFormat(NamedTuple):
    """Message formats of one checkpoint."""

    calls: type[CallParser] | None
    """Parser of its tool calls. None: the model writes none, or in an unknown format."""
    reasoning: ReasoningMarks | None

    @classmethod
    def of(cls, template: str) -> MessageFormat:
        """Return the formats that the text of a chat template tells."""
        calls = next((parser for texts, parser in CALL_FORMATS if all(text in template for text in texts)), None)
        return cls(calls, next((marks for marks in MARKS if marks.close in template), None))


def takes_several_calls(render: Callable[[list[dict[str, Any]]], object]) -> bool:
    """Return whether an answer with several calls can be sent back: some templates (Llama 3's) accept only one."""
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
    """How the choices of one request are parsed."""

    reasoning: ReasoningMarks | None
    """Marks of the reasoning. None: it stays in the content."""
    is_reasoning: bool
    """The prompt ends within the reasoning."""
    shows_reasoning: bool
    calls: type[CallParser] | None
    """Parser of the tool calls. None: no tools are offered."""
    names: Collection[str]
    """Names of the tools."""
    is_parallel: bool
    is_enforced: bool = False
    """A grammar has calls follow schemas."""

    def marks(self) -> Iterable[str]:
        """Return the texts that the parser must see, even if they are special tokens."""
        return (*(self.calls.needed if self.calls is not None else ()), *(self.reasoning or ()))

    def reasoning_ahead(self, prompt: str) -> Reasoning | None:
        """Return the reasoning that may precede an answer to this prompt; None if none may, or the prompt has it."""
        if self.reasoning is None or prompt.rstrip().endswith(self.reasoning.close):
            return None
        return Reasoning(self.reasoning.open, self.reasoning.close, self.is_reasoning)

    def parser(self) -> MessageParser:
        """Return the parser of a new choice."""
        reasoning = ReasoningParser(self.reasoning, self.is_reasoning) if self.reasoning is not None else None
        calls = self.calls(self.names, self.is_parallel, self.is_enforced) if self.calls is not None else None
        return MessageParser(reasoning, calls, self.shows_reasoning)


class MessageParser:
    """Parser of one choice: `push` its text, then `finish`."""

    def __init__(self, reasoning: ReasoningParser | None, calls: CallParser | None, shows_reasoning: bool) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._shows_reasoning = shows_reasoning

    @property
    def may_reason(self) -> bool:
        """Whether further text may be reasoning."""
        return self._reasoning is not None

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._reasoning is not None and self._reasoning.is_inside

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    @property
    def is_complete(self) -> bool:
        """Whether the only call that is permitted is complete, so that nothing may follow."""
        return self._calls is not None and self._calls.is_complete

    def push(self, text: str) -> str | MessageDelta:
        """Return what can be emitted now. Plain text is content; empty: nothing."""
        if self._reasoning is None:
            return self._content(text, CallParser.push)
        reasoning, text = self._reasoning.push(text)
        if self._reasoning.is_over:
            self._reasoning = None
        return self._with_reasoning(reasoning, self._content(text, CallParser.push))

    def finish(self, is_whole: bool = True) -> str | MessageDelta:
        """Return the rest. No more text follows. Unless `is_whole`, the text was cut off."""
        reasoning, text = self._reasoning.finish() if self._reasoning is not None else ("", "")
        parts = [self._content(text, CallParser.push), self._content("", lambda calls, _: calls.finish(is_whole))]
        shown = joined(parts)
        return self._with_reasoning(reasoning, shown)

    def _content(self, text: str, read: Callable[[CallParser, str], list[str | CallDelta]]) -> str | MessageDelta:
        return text if self._calls is None else joined(read(self._calls, text))

    def _with_reasoning(self, reasoning: str, shown: str | MessageDelta) -> str | MessageDelta:
        if not reasoning or not self._shows_reasoning:
            return shown
        return joined([MessageDelta(reasoning=reasoning), shown])
