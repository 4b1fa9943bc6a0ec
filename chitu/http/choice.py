"""Decoding of one choice's tokens into text: incremental detokenising, stop strings, the hidden stop token. A chat's
text is also parsed into parts of a message if it is more than content. Pure; loop thread.

Invariant: the deltas concatenate to the text that decoding all tokens at once gives, including multi-byte characters
and stop strings. `token_ids` are exactly the tokens up to and including the one that ended the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from chitu.http.messages.delta import MessageDelta, joined
from chitu.http.messages.message_parser import MessageParser
from chitu.http.sampling_fields import OutputOptions
from chitu.tokenizer import Detokenizer


class Scanner(Protocol):
    @property
    def marks(self) -> Mapping[int, str]: ...

    def push(self, delta: str, /) -> tuple[str, bool]: ...

    def finish(self) -> str: ...


class Delta(msgspec.Struct, frozen=True):
    text: str | MessageDelta
    """Plain text is content."""
    token_ids: list[int]


class ChoiceDecoder:
    """Decoder of one choice. Feed tokens in order; it accepts no more once `finish_reason` is set."""

    __slots__ = (
        "_detokenizer",
        "_held",
        "_include_stop",
        "_num_parsed",
        "_parser",
        "_scanner",
        "_stop_ids",
        "_unshown",
        "finish_reason",
        "num_reasoning_tokens",
        "num_tokens",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        scanner: Scanner | None,
        options: OutputOptions,
        stop_ids: frozenset[int],
        parser: MessageParser | None = None,
    ) -> None:
        """`stop_ids`: eos and the request's stop ids; the one that ends the choice is not part of its text. `parser`:
        parses the text that stop strings leave; None if all of it is content."""
        self._parser = parser
        self._unshown: list[int] = []
        """Tokens whose text the parser holds."""
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._include_stop = options.include_stop
        self._stop_ids = stop_ids
        self._held: list[int] = []
        self.num_tokens = 0
        self._num_parsed = 0
        self.num_reasoning_tokens = 0
        """Tokens up to the end of the reasoning, with its marks; 0 if reasoning is not separated from content."""
        self.finish_reason: str | None = None

    def feed(self, tokens: list[int], reason: str | None) -> list[Delta]:
        """Return the deltas of these tokens, one per token that shows text. `reason` (from D), a stop string, or the
        last permitted call ends the choice: then `finish_reason` is set, and there is a last delta, which may be
        empty."""
        deltas: list[Delta] = []
        held, push, scanner = self._held, self._detokenizer.push, self._scanner
        hidden = reason == "stop" and bool(tokens) and self._is_hidden(tokens[-1])
        before = self.num_tokens
        self.num_tokens += len(tokens)
        for place, token in enumerate(tokens[:-1] if hidden else tokens, 1):
            held.append(token)
            text = push((token,))
            if scanner is not None and (text or token in scanner.marks):
                text, hit = scanner.push(text + scanner.marks.get(token, ""))
                if hit:
                    self.num_tokens = before + place
                    self.finish_reason = "stop"
                    deltas.append(Delta(text, held))
                    self._held = []
                    break
            if text:
                deltas.append(Delta(text, held))
                held = self._held = []
        else:
            if hidden:
                held.append(tokens[-1])
            if reason is not None:
                self._end(deltas, reason)
        return deltas if self._parser is None else self._parsed(self._parser, deltas, hidden)

    def whole(self, tokens: list[int], reason: str) -> Delta:
        """Decode all tokens of a finished choice at once. Return its text and the tokens up to its end."""
        if self._scanner is not None or (self._parser is not None and self._parser.may_reason):
            deltas = self.feed(tokens, reason)
            return Delta(joined([d.text for d in deltas]), [token for d in deltas for token in d.token_ids])
        self.num_tokens += len(tokens)
        self.finish_reason = reason
        hidden = reason == "stop" and bool(tokens) and self._is_hidden(tokens[-1])
        shown = tokens[:-1] if hidden else tokens
        whole = Delta(self._detokenizer.push(shown) + self._detokenizer.finish(), tokens)
        if self._parser is None:
            return whole
        return Delta(self._parsed(self._parser, [whole], hidden)[-1].text, tokens)

    def _parsed(self, parser: MessageParser, found: list[Delta], has_hidden: bool) -> list[Delta]:
        """Return the deltas after the parser. Tokens that show nothing join the next delta that shows something.
        `has_hidden`: the last of all tokens is not part of the text."""
        deltas: list[Delta] = []
        for place, delta in enumerate(found, 1):
            text, token_ids = delta.text, delta.token_ids
            assert isinstance(text, str)
            was_reasoning = parser.is_reasoning
            shown = parser.push(text)
            self._unshown += token_ids
            self._num_parsed += len(token_ids)
            if was_reasoning or parser.is_reasoning:
                self.num_reasoning_tokens = self._num_parsed - (has_hidden and place == len(found))
            if shown:
                deltas.append(Delta(shown, self._unshown))
                self._unshown = []
            if parser.is_complete:
                self.num_tokens -= len(self._held) + sum([len(later.token_ids) for later in found[place:]])
                self._held = []
                self.finish_reason = "stop"
                break
        if self.finish_reason is not None:
            newest = deltas.pop() if deltas and not self._unshown else Delta("", [])  # as in `_end`
            rest = parser.finish(self.finish_reason == "stop")
            deltas.append(Delta(joined([newest.text, rest]), newest.token_ids + self._unshown))
            if self.finish_reason == "stop" and parser.has_calls:
                self.finish_reason = "tool_calls"
        return deltas

    def _is_hidden(self, last_token: int) -> bool:
        return last_token in self._stop_ids and not self._include_stop

    def _end(self, deltas: list[Delta], reason: str) -> None:
        self.finish_reason = reason
        text = self._detokenizer.finish()
        if self._scanner is not None:
            text, hit = self._scanner.push(text) if text else ("", False)
            if hit:
                self.finish_reason = "stop"
            else:
                text += self._scanner.finish()
        if deltas and not self._held:
            # Merge the end into the last token's delta: one event fewer. Only into that of the very last token, so that
            # the number of events does not depend on which tokens came together (Last-Event-ID).
            newest = deltas.pop()
            assert isinstance(newest.text, str)
            deltas.append(Delta(newest.text + text, newest.token_ids))
        else:
            deltas.append(Delta(text, self._held))
        self._held = []
