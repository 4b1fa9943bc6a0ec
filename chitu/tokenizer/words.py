"""Encodes ASCII text word by word, from a table. Used by `Tokenizer.encode` on the loop thread or any other.

A byte-level BPE tokenizer splits a text by a regular expression and encodes each piece on its own, so a piece that
occurred before need not be encoded again. That saves most of the cost of a prompt (the split and the merging take five
to ten times as long in the library). Invariant: the ids are exactly the library's. `WordEncoder.of` accepts only
tokenizers with a description listed here, and `encode` only texts for which it is exact; other texts go to the library.

Most texts are split at their spaces instead, which takes half the time: no piece of these expressions goes on over a
space that has no white space beside it.

Python's `re` has no `\\p{L}`, hence ASCII only, which NFC does not change either. A table is bounded: when it is full
it is cleared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from chitu.tokenizer.detokenizer import byte_of_character

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

MAX_TEXT_CHARS = 32_768
"""Longer texts go to the library, which releases the GIL."""
MAX_PIECES = 65_536
MAX_PIECE_CHARS = 32
"""Longer pieces are rarely words, so they are not cached."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The split that `ByteLevel` does itself if it has `use_regex`."""
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_KNOWN_SPLITS = frozenset({_GPT2, _LLAMA3, _QWEN2})


def _ascii_pattern(split: str) -> re.Pattern[str]:
    """Return the same split for ASCII text. None of the known splits leaves out a character."""
    inside = re.sub(r"\[[^\]]*\]", lambda found: _letters(found.group(), "a-zA-Z", "0-9"), split)
    return re.compile(_letters(inside, "[a-zA-Z]", "[0-9]"), re.ASCII)


def _letters(pattern: str, letters: str, digits: str) -> str:
    return pattern.replace(r"\p{L}", letters).replace(r"\p{N}", digits)


def _split_of(description: dict[str, Any]) -> str | None:
    """Return the regular expression of a pre-tokenizer that is a split plus bytes, or None for any other."""
    match description:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(split)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if split in _KNOWN_SPLITS:
            return split
    return None


class _Table(dict[str, tuple[int, ...]]):
    """Token ids of what occurred before."""

    def __init__(self, encode: Callable[[str], tuple[int, ...]]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, text: str) -> tuple[int, ...]:
        ids = self._encode(text)
        if len(text) <= MAX_PIECE_CHARS:
            if len(self) >= MAX_PIECES:
                self.clear()
            self[text] = ids
        return ids


class WordEncoder:
    """An encoder for one tokenizer, made by `of`."""

    def __init__(
        self,
        split: str,
        encode_piece: Callable[[str], tuple[int, ...]],
        plain: dict[str, int],
        odd: list[str],
        surroundings: tuple[list[int], list[int]],
    ) -> None:
        """`plain`: added tokens that match wherever they occur. `odd`: those with rules of their own (they strip spaces
        around them, or match only whole words); a text with one of them goes to the library. `surroundings`: ids that
        the tokenizer puts before and after a text."""
        self._pieces_of = _ascii_pattern(split).findall
        self._of_piece = _Table(encode_piece).__getitem__
        self._words = _Table(self._encode_word)
        self._of_word = self._words.__getitem__
        self._plain = plain
        self._added = _alternatives(list(plain))
        self._odd = _alternatives(odd)
        self._before, self._after = surroundings

    @classmethod
    def of(cls, backend: Backend) -> WordEncoder | None:
        """Return an encoder, or None for a tokenizer that it cannot follow exactly."""
        if backend.pre_tokenizer is None or backend.encode_special_tokens:
            return None
        split = _split_of(json.loads(backend.pre_tokenizer.__getstate__()))
        normalizer = None if backend.normalizer is None else json.loads(backend.normalizer.__getstate__())
        model = backend.model
        if split is None or normalizer not in (None, {"type": "NFC"}):
            return None
        if (
            type(model).__name__ != "BPE"
            or model.dropout
            or model.continuing_subword_prefix
            or model.end_of_word_suffix
        ):
            return None
        plain: dict[str, int] = {}
        odd: list[str] = []
        for token_id, token in backend.get_added_tokens_decoder().items():
            if token.normalized or token.single_word or token.lstrip or token.rstrip:
                odd.append(token.content)
            else:
                plain[token.content] = token_id
        surroundings = _surroundings(backend)
        if surroundings is None:
            return None
        characters = {byte: character for character, byte in byte_of_character().items()}

        def encode_piece(piece: str) -> tuple[int, ...]:
            return tuple([token.id for token in model.tokenize(piece.translate(characters))])

        return cls(split, encode_piece, plain, odd, surroundings)

    @property
    def num_words(self) -> int:
        """Number of words in their table."""
        return len(self._words)

    def encode(self, text: str, add_special_tokens: bool) -> list[int] | None:
        """Return token ids, or None if the library must encode this text."""
        if not text.isascii() or len(text) > MAX_TEXT_CHARS or (self._odd is not None and self._odd.search(text)):
            return None
        ids = self._before.copy() if add_special_tokens else []
        at = 0
        if self._added is not None:
            for found in self._added.finditer(text):
                self._append(ids, text[at : found.start()])
                ids.append(self._plain[found.group()])
                at = found.end()
        self._append(ids, text[at:] if at else text)
        if add_special_tokens:
            ids += self._after
        return ids

    def _append(self, ids: list[int], text: str) -> None:
        try:
            ids += self._encode_words(text)
        except KeyError:
            ids += self._encode_pieces(text)

    def _encode_words(self, text: str) -> list[int]:
        """Return the ids of a text. Raise KeyError if it has white space that may be one piece with a space."""
        first, *words = text.split(" ")
        if "   " in f"{text} " or first[-1:].isspace():
            raise KeyError(text)
        return [*self._encode_pieces(first), *chain.from_iterable(map(self._of_word, words))]

    def _encode_word(self, word: str) -> tuple[int, ...]:
        """Return the ids of a word after a space; an empty word is a space before another one, a piece by itself. Raise
        KeyError if the word begins or ends with other white space."""
        if word != word.strip():
            raise KeyError(word)
        return tuple(self._encode_pieces(f" {word}"))

    def _encode_pieces(self, text: str) -> Iterator[int]:
        return chain.from_iterable(map(self._of_piece, self._pieces_of(text)))


def _surroundings(backend: Backend) -> tuple[list[int], list[int]] | None:
    """Return the ids before and after a text, or None if they cannot be told from the text's own ids."""
    plain = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    places = [at for at in range(len(whole)) if plain and whole[at : at + len(plain)] == plain]
    if len(places) != 1:
        return None
    return whole[: places[0]], whole[places[0] + len(plain) :]


def _alternatives(texts: list[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches leftmost, then longest, as the library does for added tokens; None for no texts."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None
