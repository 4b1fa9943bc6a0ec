"""Parsing of a chat choice's text into its message: the reasoning that some models write first, content and tool calls.
Pure; loop thread. The text of the chat template determines the formats, because it writes them itself for earlier
turns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from chitu.http.messages.array_calls import (
    ActionParser,
    ApertusParser,
    CommandParser,
    CommandTextParser,
    FunctionCallParser,
    FunctoolsParser,
    GraniteParser,
    LinesParser,
    NemotronParser,
    PhiParser,
    ToolCallsParser,
)
from chitu.http.messages.call_formats import (
    ARGS,
    MARK,
    ArgumentsParser,
    HermesParser,
    Llama4Parser,
    LlamaParser,
    MistralParser,
    NamedMistralParser,
)
from chitu.http.messages.call_objects import MessageDelta, Piece, joined
from chitu.http.messages.call_parser import CallParser
from chitu.http.messages.code_calls import LfmParser, ToolCodeParser
from chitu.http.messages.dsml_calls import DSML, DSMLParser, DSMLToolsParser
from chitu.http.messages.gemma_calls import FunctionGemmaParser, GemmaParser
from chitu.http.messages.harmony import ANALYSIS, CHANNEL, END, FINAL, NEXT, HarmonyParser
from chitu.http.messages.open_calls import OpenCalls
from chitu.http.messages.pythonic_calls import PythonicParser
from chitu.http.messages.section_calls import (
    DEEPSEEK_BEGIN,
    KIMI_BEGIN,
    DeepSeekParser,
    FencedDeepSeekParser,
    KimiParser,
)
from chitu.http.messages.seed_calls import SeedParser
from chitu.http.messages.tagged_calls import CompactGLMParser, GLMParser, MiniMaxParser, QwenCoderParser
from chitu.protocol import Reasoning
from chitu.tokenizer.stop import end_before_mark

MAX_SPACE_CHARS = 64
"""The mark that opens the reasoning has fewer characters of space before it."""
CALL_FORMATS: tuple[tuple[tuple[str, ...], type[CallParser]], ...] = (
    ((CHANNEL, "functions."), HarmonyParser),
    ((DSML, "function_calls"), DSMLParser),
    ((DSML, "tool_calls"), DSMLToolsParser),
    (("<seed:tool_call>", "<function="), SeedParser),
    (("<|tool_call>", "call:"), GemmaParser),
    (("<start_function_call>", "call:"), FunctionGemmaParser),
    (("<|START_ACTION|>", "<|START_TEXT|>"), CommandTextParser),
    (("<|START_ACTION|>",), CommandParser),
    (("<|tools_prefix|>",), ApertusParser),
    (("<|tool_call_start|>",), LfmParser),
    (("<|tool_list_start|>",), LfmParser),
    (("List of tools: [", "<|im_start|>"), LfmParser),
    (("<|tool_call|>", "<|/tool_call|>"), PhiParser),
    (("<|tool|>", "message['tools']"), PhiParser),
    (("functools[",), FunctoolsParser),
    (("<|start_of_role|>", "<|tool_call|>"), GraniteParser),
    (("<TOOLCALL>",), NemotronParser),
    (("<start_of_turn>", "```tool_code"), ToolCodeParser),
    (("<start_of_turn>", "name + '('"), PythonicParser),
    (("<tool_call>", "<function="), QwenCoderParser),
    (("<minimax:tool_call>", "<invoke name="), MiniMaxParser),
    (("<tool_call>", "</arg_key><arg_value>"), CompactGLMParser),
    (("<tool_call>", "<arg_key>"), GLMParser),
    ((KIMI_BEGIN,), KimiParser),
    ((DEEPSEEK_BEGIN, "```json"), FencedDeepSeekParser),
    ((DEEPSEEK_BEGIN,), DeepSeekParser),
    ((MARK, ARGS), NamedMistralParser),
    ((MARK,), MistralParser),
    (("<tool_call>", '"arguments"'), HermesParser),
    (("<|start_header_id|>", "name + '('"), PythonicParser),
    (("<|header_start|>", "name + '('"), PythonicParser),
    (("<|start_header_id|>", '"parameters"'), LlamaParser),
    (("<|header_start|>", '"parameters"'), Llama4Parser),
    (("<start_of_turn>", '"parameters"'), LlamaParser),
    (("<start_of_turn>", '"arguments"'), ArgumentsParser),
    (("<tool_calls>[",), ToolCallsParser),
    (("<tool_calls>", "</tool_calls>"), LinesParser),
    (("<function_call>", "'arguments'"), FunctionCallParser),
    (("Action:", '"tool_name"'), ActionParser),
)
"""Texts in a chat template, and the parser of its calls. The first entry whose texts are all there applies."""


class ReasoningMarks(NamedTuple):
    open: str
    close: str
    behind: str = ""
    """What follows `close`."""
    head: str = ""
    """What then precedes an answer that is no call."""


MARKS = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<|channel>thought", "<channel|>"),
    ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarks("<|inner_prefix|>", "<|inner_suffix|>"),
)
HARMONY = ReasoningMarks(ANALYSIS, END, NEXT, FINAL)
"""Of a grammar only: `HarmonyParser` reads it."""


class ReasoningParser:
    """Splits a text into the reasoning between the marks at its beginning, and the rest. Drops the line ends at the
    marks, because templates write them again."""

    def __init__(self, marks: ReasoningMarks, is_open: bool) -> None:
        """`is_open`: the prompt ends within the reasoning."""
        self._open = marks.open
        self._closes = (marks.close, f"\n{marks.close}")
        self._starts = frozenset(mark[0] for mark in self._closes)
        self._held = ""
        self._state = self._inside if is_open else self._ahead
        self._trims = is_open
        """The next line ends are dropped."""

    @property
    def is_inside(self) -> bool:
        return self._state == self._inside

    @property
    def is_behind(self) -> bool:
        """Whether there is no more reasoning."""
        return self._state == self._behind

    @property
    def is_over(self) -> bool:
        """Whether all further text is content."""
        return self._state == self._behind and not self._trims

    def push(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that can be emitted now."""
        text, self._held = self._held + text, ""
        return self._state(text) if text else ("", "")

    def finish(self) -> tuple[str, str]:
        """Return the rest. No more text follows."""
        held, self._held = self._held, ""
        return (held, "") if self._state == self._inside else ("", held)

    def _ahead(self, text: str) -> tuple[str, str]:
        rest = text.lstrip()
        has_room = len(text) - len(rest) < MAX_SPACE_CHARS
        if has_room and rest.startswith(self._open):
            self._state, self._trims = self._inside, True
            rest = rest[len(self._open) :]
            return self._inside(rest) if rest else ("", "")
        if has_room and self._open.startswith(rest):
            self._held = text
            return "", ""
        self._state = self._behind
        return "", text

    def _inside(self, text: str) -> tuple[str, str]:
        text = self._trimmed(text)
        found = [at for mark in self._closes if (at := text.find(mark)) >= 0]
        if not found:
            end = end_before_mark(text, self._closes, self._starts, len(self._closes[1]))
            self._held = text[end:]
            return text[:end], ""
        at = min(found)
        rest = text[at:].removeprefix("\n")[len(self._closes[0]) :]
        self._state, self._trims = self._behind, True
        return text[:at], self._trimmed(rest)

    def _behind(self, text: str) -> tuple[str, str]:
        return "", self._trimmed(text)

    def _trimmed(self, text: str) -> str:
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        return text


class MessageFormat(NamedTuple):
    """Message formats of one checkpoint."""

    calls: type[CallParser] | None
    """Parser of its tool calls. None: the model writes none, or in an unknown format."""
    reasoning: ReasoningMarks | None

    @classmethod
    def of(cls, template: str) -> MessageFormat:
        """Return the formats that a chat template writes."""
        calls = next((parser for texts, parser in CALL_FORMATS if all(text in template for text in texts)), None)
        if calls is HarmonyParser:
            return cls(calls, HARMONY)
        return cls(calls, next((marks for marks in MARKS if marks.close in template), None))


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
    """Names of the tools, each with its parameters if the format needs them (`tagged_calls.py`)."""
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
        marks = self.reasoning
        return Reasoning(marks.open, marks.close, self.is_reasoning, marks.behind, marks.head)

    def parser(self) -> MessageParser:
        """Return the parser of a new choice."""
        if self.calls is HarmonyParser:
            split = self.reasoning is not None
            channels = HarmonyParser(self.names, self.is_parallel, self.is_enforced, split, self.shows_reasoning)
            return MessageParser(None, channels, self.shows_reasoning)
        reasoning = ReasoningParser(self.reasoning, self.is_reasoning) if self.reasoning is not None else None
        if self.calls is None:
            return MessageParser(reasoning, None, self.shows_reasoning)
        calls = self.calls(self.names, self.is_parallel, self.is_enforced)
        make = functools.partial(self.calls, self.names, True)
        open_calls = OpenCalls(make, self.calls.marks) if reasoning is not None else None
        return MessageParser(reasoning, calls, self.shows_reasoning, open_calls)


class MessageParser:
    """Parser of one choice: `push` its text, then `finish`."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        calls: CallParser | None,
        shows_reasoning: bool,
        open_calls: OpenCalls | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._open_calls = open_calls
        self._shows_reasoning = shows_reasoning

    @property
    def may_reason(self) -> bool:
        """Whether further text may be reasoning."""
        return self._reasoning is not None or isinstance(self._calls, HarmonyParser)

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        if self._reasoning is not None:
            return self._reasoning.is_inside
        return self._calls is not None and self._calls.is_reasoning

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
        if self._open_calls is not None:
            reasoning = self._open_calls.push(reasoning)
            if self._reasoning.is_behind:
                reasoning += self._open_calls.close()
                self._open_calls = None
        if self._reasoning.is_over:
            self._reasoning = None
        return self._with_reasoning(reasoning, self._content(text, CallParser.push))

    def finish(self, is_whole: bool = True) -> str | MessageDelta:
        """Return the rest. No more text follows. Unless `is_whole`, the text was cut off."""
        reasoning, text = self._reasoning.finish() if self._reasoning is not None else ("", "")
        if self._open_calls is not None:
            before = self._open_calls.push(reasoning)
            behind, calls = self._open_calls.finish(is_whole)
            reasoning, text = before + behind, text or calls
        parts = [self._content(text, CallParser.push), self._content("", lambda calls, _: calls.finish(is_whole))]
        shown = joined(parts)
        return self._with_reasoning(reasoning, shown)

    def _content(self, text: str, read: Callable[[CallParser, str], list[Piece]]) -> str | MessageDelta:
        return text if self._calls is None else joined(read(self._calls, text))

    def _with_reasoning(self, reasoning: str, shown: str | MessageDelta) -> str | MessageDelta:
        if not reasoning or not self._shows_reasoning:
            return shown
        return joined([MessageDelta(reasoning=reasoning), shown])
