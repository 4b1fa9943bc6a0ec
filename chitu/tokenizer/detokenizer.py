"""Incremental detokenising: token ids in, final text out. One object a choice, owned by the router.

Invariant: the deltas of `push` and `finish` concatenate exactly to `Tokenizer.decode` of all ids, whatever the ids. So
text is held back while later tokens can change it: an incomplete UTF-8 sequence, and with byte-fallback tokenizers a
run of byte tokens (one bad byte turns the whole run into U+FFFD).

Three kinds, by the tokenizer's decoder: byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece style (Llama 2,
Mistral, Gemma) look up each token in a table that fills as ids occur; any other decodes its whole text at every push.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from chitu.tokenizer.added_tokens import steps_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that they make final, which may be empty."""
        ...

    def finish(self) -> str:
        """Return the rest of the text after the last token. Call it once."""
        ...


def detokenizer_factory(backend: Backend, skip_special_tokens: bool) -> Callable[[], Detokenizer]:
    """Return a function that makes detokenizers for this tokenizer. They all share its tables."""
    steps = steps_of(backend.decoder)
    kinds = [step["type"] for step in steps]
    skipped = (
        frozenset(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)
        if skip_special_tokens
        else frozenset()
    )
    if kinds == ["ByteLevel"]:
        byte_table = _WholeTextTable(_ByteLevelTable(backend, skipped))
        return lambda: ByteLevelDetokenizer(byte_table)
    rules = _PieceRules.of(steps)
    if rules is not None:
        piece_table = _PieceTable(backend, skipped, rules)
        return lambda: PieceDetokenizer(piece_table)
    return lambda: WholeTextDetokenizer(lambda ids: backend.decode(ids, skip_special_tokens=skip_special_tokens))


def token_bytes(backend: Backend) -> Callable[[int], bytes | None]:
    """Return a function from a token id to the bytes that the token adds to a text (a token may have part of a
    character), or to None if no token has that id. Special tokens add their text."""
    steps = steps_of(backend.decoder)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        bytes_of = _ByteLevelTable(backend, frozenset())
        return lambda token_id: None if backend.id_to_token(token_id) is None else bytes_of[token_id]
    rules = _PieceRules.of(steps)
    pieces = None if rules is None else _PieceTable(backend, frozenset(), rules)

    def of_piece(token_id: int) -> bytes | None:
        if backend.id_to_token(token_id) is None:
            return None
        piece = backend.decode([token_id], skip_special_tokens=False) if pieces is None else pieces[token_id]
        return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()

    return of_piece


def byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes are themselves, other bytes are the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class _ByteLevelTable(dict[int, bytes]):
    """Table of a token id's bytes; empty for a skipped or unknown id."""

    def __init__(self, backend: Backend, skipped: frozenset[int]) -> None:
        super().__init__()
        self._id_to_token = backend.id_to_token
        self._skipped = skipped
        self._alphabet = byte_of_character()

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._id_to_token(token_id)
        if token is None:
            value = b""
        elif all(character in self._alphabet for character in token):
            value = bytes(self._alphabet[character] for character in token)
        else:
            # An added token with characters outside the alphabet, a space for instance: it is text already.
            value = token.encode()
        self[token_id] = value
        return value


class _WholeTextTable(dict[int, "str | None"]):
    """Table of a token id's text, or None if its bytes are not whole characters."""

    def __init__(self, table: _ByteLevelTable) -> None:
        super().__init__()
        self.bytes_of = table

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self.bytes_of[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class ByteLevelDetokenizer:
    """A detokenizer for byte-level BPE: joins bytes and decodes complete characters."""

    __slots__ = ("_bytes_of", "_pending", "_text_of")

    def __init__(self, table: _WholeTextTable) -> None:
        self._text_of = table
        self._bytes_of = table.bytes_of.__getitem__
        self._pending = b""

    def push(self, tokens: Sequence[int]) -> str:
        if not self._pending and len(tokens) == 1 and (whole := self._text_of[tokens[0]]) is not None:
            return whole
        data = self._pending + b"".join(map(self._bytes_of, tokens))
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def finish(self) -> str:
        data, self._pending = self._pending, b""
        return utf_8_decode(data, "replace", True)[0]


class _PieceRules:
    """Rules by which a SentencePiece style decoder turns tokens into text."""

    def __init__(self) -> None:
        self.replacements: list[tuple[str, str]] = []
        self.byte_fallback = False
        self.strip_content = ""
        self.strip_count = 0
        """Most `strip_content` characters to remove from the start of the whole text."""
        self.dropped_in_first = ""
        """String of which every occurrence is removed from the first token (Metaspace)."""

    @classmethod
    def of(cls, steps: list[dict[str, Any]]) -> _PieceRules | None:
        """Return the rules, or None if `PieceDetokenizer` cannot follow these steps in this order exactly."""
        rules = cls()
        fused = False
        kinds = [step["type"] for step in steps]
        if not kinds or (("Metaspace" in kinds) and kinds != ["Metaspace"]):
            return None
        for step in steps:
            match step["type"]:
                case "Metaspace":
                    rules.replacements.append((step["replacement"], " "))
                    if step.get("prepend_scheme", "always") != "never":
                        rules.dropped_in_first = step["replacement"]
                case "Replace" if "String" in step["pattern"] and not (rules.byte_fallback or fused):
                    rules.replacements.append((step["pattern"]["String"], step["content"]))
                case "ByteFallback" if not fused:
                    rules.byte_fallback = True
                case "Fuse":
                    fused = True
                case "Strip" if fused and step["stop"] == 0 and not rules.strip_count:
                    rules.strip_content, rules.strip_count = step["content"], step["start"]
                case _:
                    return None
        return rules


class _PieceTable(dict[int, "str | int | None"]):
    """Table of a token id's text, or its byte (byte fallback), or None for a skipped or unknown id."""

    def __init__(self, backend: Backend, skipped: frozenset[int], rules: _PieceRules) -> None:
        super().__init__()
        self._id_to_token = backend.id_to_token
        self._skipped = skipped
        self.rules = rules

    def __missing__(self, token_id: int) -> str | int | None:
        token = None if token_id in self._skipped else self._id_to_token(token_id)
        value: str | int | None = token
        if token is not None:
            for old, new in self.rules.replacements:
                token = token.replace(old, new)
            value = token
            if self.rules.byte_fallback and len(token.encode()) == 6 and token[:3] == "<0x" and token[-1] == ">":
                try:
                    value = int(token[3:5], 16)
                except ValueError:
                    value = token
        self[token_id] = value
        return value

    def first(self, token_id: int) -> str | int | None:
        """Return the same for the first token of a text."""
        value = self[token_id]
        if isinstance(value, str) and self.rules.dropped_in_first:
            return (self._id_to_token(token_id) or "").replace(self.rules.dropped_in_first, "")
        return value


class PieceDetokenizer:
    """A detokenizer for SentencePiece style: joins pieces, and holds a run of byte tokens until its end."""

    __slots__ = ("_run", "_started", "_strip", "_table")

    def __init__(self, table: _PieceTable) -> None:
        self._table = table
        self._run = bytearray()
        self._started = False
        self._strip = table.rules.strip_count

    def push(self, tokens: Sequence[int]) -> str:
        out: list[str] = []
        for token_id in tokens:
            piece = self._table[token_id]
            if piece is None:
                continue
            if not self._started:
                self._started = True
                piece = self._table.first(token_id)
            if isinstance(piece, int):
                self._run.append(piece)
                continue
            if self._run:
                out.append(self._end_run())
            out.append(piece or "")
        return self._stripped("".join(out))

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        """Return the text without the characters that are still to be removed from the start of the whole text."""
        while self._strip and text:
            if text[0] != self._table.rules.strip_content:
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class WholeTextDetokenizer:
    """A detokenizer for any other decoder: decodes all ids at every push, so its cost grows with the text."""

    __slots__ = ("_decode", "_ids", "_sent")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._sent = ""

    def push(self, tokens: Sequence[int]) -> str:
        self._ids.extend(tokens)
        text = self._decode(self._ids).rstrip(REPLACEMENT)
        if not text.startswith(self._sent):
            return ""
        delta = text[len(self._sent) :]
        self._sent = text
        return delta

    def finish(self) -> str:
        return self._decode(self._ids)[len(self._sent) :]
