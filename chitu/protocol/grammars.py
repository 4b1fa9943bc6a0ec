"""What an answer must follow: the record that D receives with the sampling parameters. No engine is imported here."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from chitu.protocol.wire import Wire

MAX_GRAMMAR_CHARS = 1 << 16
"""Longest `Grammar.text`: several times the largest schemas of real APIs, and short enough to compile within bounds."""

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "tool_calls"]
"""What `Grammar.text` is:

* `json_object`: empty; the answer is one JSON object with any content.
* `json_schema`: a JSON schema. The answer is one JSON value that it allows.
* `regex`: a regular expression. The whole answer matches it.
* `choice`: a JSON array of texts. The answer is one of them.
* `lark`: a context-free grammar in llguidance's Lark syntax, whose first rule is `start`; or a short one in GBNF.
* `tool_calls`: a `ToolCalls` in JSON. The answer is free text in which, or instead of which, calls follow schemas.
"""


class Reasoning(Wire, frozen=True):
    """What a model may write before its answer, between two marks."""

    open: str
    close: str
    is_open: bool = False
    """Whether the prompt ended within it."""
    behind: str = ""
    """Text that follows `close`."""
    head: str = ""
    """Text that precedes the answer, also if there is no reasoning."""


class Grammar(Wire, frozen=True):
    """What an answer must follow. The matcher that D makes of it allows, at each position, the tokens that may follow
    there, and an eos only where the answer may end. Special tokens are in no answer, unless a `ToolCalls` names one."""

    kind: GrammarKind
    text: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_CHARS)] = ""
    reasoning: Reasoning | None = None
    """Reasoning before what follows the grammar, and before any text. None: the grammar holds from the first token
    on."""


class ToolFields(Wire, frozen=True):
    """How a format writes arguments that are no JSON object: for each `begin`, its name, `middle`, its value and `end`.
    Strings are raw text that does not have `end`, or with `separator` JSON."""

    begin: str
    middle: str
    end: str
    separator: str = ""
    """Text between the arguments."""
    json_middle: str = ""
    """If not empty, this instead of `middle` ahead of a value that is JSON."""


class ToolCall(Wire, frozen=True):
    """One form of a call: `begin`, then a JSON value of `schema`, then `end`. A format whose JSON holds the tool's name
    puts it into `schema` (a `const`) or into `begin`."""

    begin: str
    """Starts with `ToolCalls.trigger`, such as `<tool_call>\\n{"name": "f", "arguments": `."""
    schema: msgspec.Raw
    end: str = ""
    fields: ToolFields | None = None
    """None: the arguments are a JSON value."""
    index_end: str = ""
    """If not empty, a number follows `begin`, and then this."""


class ToolCalls(Wire, frozen=True):
    """`Grammar.text` of the kind `tool_calls`, encoded by `msgspec.json`."""

    calls: tuple[ToolCall, ...]
    """Forms that a call may have; at least one."""
    trigger: str
    """In free text these characters begin a call and nothing else: after them comes what follows them in the `begin` of
    a call. The name of a special token of the tokenizer, such as `[TOOL_CALLS]`, is that token."""
    is_required: bool = False
    """True: no free text, the answer is a call (or several). False: free text, and calls in it."""
    is_parallel: bool = True
    """True: several calls are allowed. False: at most one, and nothing after it."""
    separator: str = ""
    """Text between the calls if `is_required` or `is_leading`."""
    is_leading: bool = False
    """Calls are at the beginning or nowhere: an answer that begins with the trigger consists of calls alone; any other
    is free text, in which the trigger has no meaning. Only if not `is_required`."""
    close: str = ""
    """If not empty, one trigger begins a section of calls, with `separator` between them, and this ends it: the
    trigger is only at the beginning of the first call."""
    text_begin: str = ""
    """If not empty, an answer is calls (or one), or free text with this ahead of it. Only if not `is_leading`."""
    answer: Grammar | None = None
    """What an answer without calls follows, of any other kind; such an answer has no calls in it, and calls stand alone
    as if they were required. None: it is free text. Only if not `is_required`."""
    open: str = ""
    """Of a section: text between the trigger and its first call. Each `ToolCall.begin` has it, too."""
