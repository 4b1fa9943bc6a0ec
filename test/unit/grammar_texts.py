"""Compilers of grammars for tests, and what a compiled one allows."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from chitu.assets import TINY_MODEL_DIR
from chitu.grammars import CompiledGrammar, GrammarCompiler, Matcher
from chitu.http.messages.array_calls import ApertusParser, CommandParser, GraniteParser, PhiParser
from chitu.http.messages.call_parser import CallParser
from chitu.http.messages.code_calls import LfmParser
from chitu.http.messages.dsml_calls import DSMLParser
from chitu.http.messages.gemma_calls import GemmaParser
from chitu.http.messages.harmony import HarmonyParser
from chitu.http.messages.section_calls import DeepSeekParser, FencedDeepSeekParser, KimiParser
from chitu.protocol import Grammar
from chitu.tokenizer import Tokenizer

TINY = Tokenizer.load(TINY_MODEL_DIR)
COMPILER = GrammarCompiler(TINY, TINY.vocab_size)


def may_come(matcher: Matcher) -> list[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return [int(token) for token in np.nonzero(bits)[0]]


def drawn(compiled: CompiledGrammar, seed: int, eos: tuple[int, ...], most: int = 3000) -> list[int]:
    """Return random tokens that the grammar allows, until it ends."""
    matcher, rng, tokens = compiled.matcher(), random.Random(seed), []
    while len(tokens) < most:
        token = rng.choice(may_come(matcher))
        matcher.consume([token])
        if token in eos:
            return tokens
        tokens.append(token)
    raise AssertionError(f"no end after {most} tokens: {TINY.decode(tokens)[-100:]!r}")


def text_of(grammar: Grammar, seed: int) -> str:
    return TINY.decode(drawn(COMPILER.compile(grammar), seed, TINY.eos_token_ids), skip_special_tokens=False)


def allows(compiled: CompiledGrammar, text: str) -> bool:
    """Return whether the grammar allows `text` as a whole answer."""
    matcher = compiled.matcher()
    for token in TINY.encode(text, add_special_tokens=False):
        if token not in may_come(matcher):
            return False
        matcher.consume([token])
    return set(TINY.eos_token_ids) <= set(may_come(matcher))


FORMATS: list[type[CallParser]] = [
    *(KimiParser, DeepSeekParser, FencedDeepSeekParser, HarmonyParser),
    *(GraniteParser, PhiParser, ApertusParser, CommandParser, LfmParser, GemmaParser, DSMLParser),
]
ADDED = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[ARGS]"),
    *dict.fromkeys(mark for calls in FORMATS for mark in calls.needed),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


def with_marks() -> tuple[Backend, GrammarCompiler]:
    """Return a tokenizer like Qwen3's: its marks are added tokens that are not special. Any other token is a byte."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.add_tokens([AddedToken(mark, special=False) for mark in ADDED])
    added = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
    tokenizer = SimpleNamespace(
        eos_token_ids=(added["<eos>"],),
        vocab_size=backend.get_vocab_size(),
        to_json=backend.to_str,
        added_token_ids=added,
    )
    return backend, GrammarCompiler(cast(Tokenizer, tokenizer), tokenizer.vocab_size)


MARKED, MARKED_COMPILER = with_marks()


def is_answer(grammar: Grammar, text: str, is_spelled: bool) -> bool:
    """Return whether `text` may be the whole answer. `is_spelled`: marks are spelled in bytes, not written as
    tokens."""
    if is_spelled:
        letters = MARKED.pre_tokenizer.pre_tokenize_str(text)
        ids = [MARKED.token_to_id(letter) for word, _ in letters for letter in word]
    else:
        ids = MARKED.encode(text).ids
    matcher = MARKED_COMPILER.compile(grammar).matcher()
    for token in ids:
        if token not in may_come(matcher):
            return False
        matcher.consume([token])
    return MARKED.token_to_id("<eos>") in may_come(matcher)
