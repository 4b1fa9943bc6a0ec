"""Encoding word by word gives exactly the library's ids, and is used only if it can."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from chitu.launch.tiny_tokenizer import train_tokenizer
from chitu.tokenizer import words
from chitu.tokenizer.words import WordEncoder

QWEN = train_tokenizer(2000).to_str()
LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
ASCII = st.characters(max_codepoint=127)
PARTS = st.sampled_from(
    ["the", " and", "'s", "'LL", "12", "3456", "  ", "\r\n", "\t", "<|im_start|>", "<|im_end|>", "<|", "<odd>", "\x1c"]
)
TEXTS = st.lists(st.one_of(PARTS, ASCII), max_size=30).map("".join)


def qwen() -> Backend:
    return Backend.from_str(QWEN)


def llama3() -> Backend:
    backend = qwen()
    split = pre_tokenizers.Split(Regex(LLAMA_SPLIT), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.normalizer = None
    return backend


def gpt2() -> Backend:
    backend = qwen()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


@pytest.mark.parametrize("make", [qwen, llama3, gpt2])
def test_ids_are_the_librarys(make: Callable[[], Backend]) -> None:
    backend = make()
    backend.add_tokens([AddedToken("<odd>", lstrip=True)])
    encoder = WordEncoder.of(backend)
    assert encoder is not None

    @settings(max_examples=400, deadline=None)
    @given(TEXTS, st.booleans())
    def check(text: str, add_special_tokens: bool) -> None:
        assert encoder is not None
        ids = encoder.encode(text, add_special_tokens)
        if "<odd>" in text:
            assert ids is None
        else:
            assert ids == backend.encode(text, add_special_tokens=add_special_tokens).ids

    check()


def test_what_is_not_ascii_or_too_long_is_the_librarys() -> None:
    encoder = WordEncoder.of(qwen())
    assert encoder is not None
    assert encoder.encode("caf\u00e9", True) is None
    assert encoder.encode("a" * (words.MAX_TEXT_CHARS + 1), True) is None
    assert encoder.encode("a" * words.MAX_TEXT_CHARS, True) is not None


def test_ids_stay_right_when_the_table_is_full() -> None:
    backend = qwen()
    encoder = WordEncoder.of(backend)
    assert encoder is not None
    per_text = 4000
    for first in range(0, words.MAX_PIECES + 2 * per_text, per_text):
        pieces = [
            f" {chr(97 + n % 26)}{chr(97 + n // 26 % 26)}{chr(97 + n // 676 % 26)}{chr(97 + n // 17576)}"
            for n in range(first, first + per_text)
        ]
        ids = encoder.encode("".join(pieces), False)
    assert ids == backend.encode("".join(pieces), add_special_tokens=False).ids
    assert 0 < encoder.num_words <= words.MAX_PIECES


def other_split() -> Backend:
    backend = qwen()
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\s+"), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return backend


def prefix_space() -> Backend:
    backend = qwen()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return backend


def lower_case() -> Backend:
    backend = qwen()
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    return backend


def word_level() -> Backend:
    backend = Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def no_letters() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


@pytest.mark.parametrize("make", [other_split, prefix_space, lower_case, word_level, no_letters])
def test_any_other_tokenizer_is_left_to_the_library(make: Callable[[], Backend]) -> None:
    assert WordEncoder.of(make()) is None
