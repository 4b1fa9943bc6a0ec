"""What an answer must follow: the record that travels to D with the sampling parameters. No engine is imported here."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from chitu.protocol.wire import Wire

MAX_GRAMMAR_CHARS = 1 << 16
"""Of `Grammar.text`: what the largest schemas of real APIs have several times over, and what compiles within bounds."""

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "tool_calls"]
"""What `Grammar.text` is:

* `json_object`: nothing; the answer is one JSON object, whatever is in it.
* `json_schema`: a JSON schema. The answer is one JSON value that it allows.
* `regex`: a regular expression. The whole answer matches it.
* `choice`: a JSON array of texts. The answer is one of them.
* `lark`: a context-free grammar in llguidance's Lark syntax, whose first rule is `start`; or a short one in GBNF.
* `tool_calls`: a `ToolCalls` in JSON. The answer is free text in which, or instead of which, calls follow schemas.
"""


class Reasoning(Wire, frozen=True):
    """What a model may write ahead of its answer, between two marks."""

    open: str
    close: str
    is_open: bool = False
    """The prompt ended within it."""


class Grammar(Wire, frozen=True):
    """The matcher that D makes of it allows at each place the tokens that may follow there, and an eos only where the
    answer may end. Special tokens are in no answer, unless a `ToolCalls` names one."""

    kind: GrammarKind
    text: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_CHARS)] = ""
    reasoning: Reasoning | None = None
    """Ahead of what follows the grammar, and of any text. None: the grammar holds from the first token on."""


class ToolCall(Wire, frozen=True):
    """One way to call: `begin`, then a JSON value of `schema`, then `end`. A format whose JSON holds the name of the
    tool puts it into `schema` (a `const`) or into `begin`."""

    begin: str
    """Starts with `ToolCalls.trigger`, such as `<tool_call>\\n{"name": "f", "arguments": `."""
    schema: msgspec.Raw
    end: str = ""


class ToolCalls(Wire, frozen=True):
    """`Grammar.text` of the kind `tool_calls`, encoded by `msgspec.json`."""

    calls: tuple[ToolCall, ...]
    """At least one; the ways that a call may go."""
    trigger: str
    """In free text these characters begin a call and nothing else: behind them comes what follows them in the `begin`
    of a call. The name of a special token of the tokenizer, such as `[TOOL_CALLS]`, is that token."""
    is_required: bool = False
    """True: no free text, the answer is a call (or several). False: free text, and calls in it."""
    is_parallel: bool = True
    """There may be several calls; False: one at most, and nothing behind it."""
    separator: str = ""
    """Between the calls where `is_required` or `is_leading`."""
    is_leading: bool = False
    """Calls are at the beginning or nowhere: an answer that begins with the trigger is calls alone, any other is free
    text, in which the trigger says nothing. Where not `is_required`."""
