"""The tokenizer of a GGUF file as the files of a Hugging Face folder, from the file's metadata. Pure.

Called once for a file, by `launch/gguf_folder.py`; `Tokenizer.load` then reads a tokenizer.json like any other. Owns
the translation: a vocabulary says which tokens there are, and `tokenizer.ggml.pre` how a text is split before. The aim
is the ids of the tokenizer.json that the file was made of. What is not known here is refused by name, since a wrong
split shows in few texts only: numbers, Chinese, Japanese.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from chitu.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

PREFIX = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
"""Types of tokens; the others are plain texts and bytes."""
MAX_CUTS = 1 << 28
"""Most characters of all parts of all tokens; Gemma's have 16 million."""
SPACE = "\u2581"
"""What SentencePiece writes for a space."""
_WORDS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
QWEN2 = rf"{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
GPT4O = (
    rf"{_WORDS}*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_ENDS}?|{_WORDS}+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_ENDS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
TEKKEN = (
    rf"{_WORDS}*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+|{_WORDS}+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
IDLE = re.compile(
    r"(fim_(pre|suf|mid|pad|rep|sep)|prefix|suffix|middle|eot|eom|cls|mask|seperator|separator)_token_id"
    r"|token_type_count|add_sep_token|remove_extra_whitespaces"
)
"""Keys of tokens for other uses, and of what these vocabularies have none of."""
TEMPLATE = "tokenizer.chat_template"
_NAME = re.compile(r"\w[\w-]*")


class TextSplit(NamedTuple):
    """How a text is split before its bytes are merged."""

    pattern: str = ""
    """Empty: as GPT-2 does."""
    splits_digits: bool = False
    is_composed: bool = False
    """Whether texts are normalised (NFC) first."""
    takes_whole_words: bool = False
    """Whether a piece that is a token stays whole, whatever the merges say."""
    adds_bos: bool = False
    """Whether bos is put before a text unless the metadata say otherwise."""


SPLITS: Mapping[str, TextSplit] = {
    "gpt-2": TextSplit(),
    "smollm": TextSplit(splits_digits=True),
    "starcoder": TextSplit(splits_digits=True),
    "refact": TextSplit(splits_digits=True),
    "llama-bpe": TextSplit(LLAMA3, takes_whole_words=True, adds_bos=True),
    "llama3": TextSplit(LLAMA3, takes_whole_words=True, adds_bos=True),
    "llama-v3": TextSplit(LLAMA3, takes_whole_words=True, adds_bos=True),
    "smaug-bpe": TextSplit(LLAMA3),
    "dbrx": TextSplit(LLAMA3),
    "qwen2": TextSplit(QWEN2, is_composed=True),
    "deepseek-r1-qwen": TextSplit(QWEN2, is_composed=True),
    "gpt-4o": TextSplit(GPT4O),
    "tekken": TextSplit(TEKKEN, takes_whole_words=True, adds_bos=True),
}
"""`tokenizer.ggml.pre` of byte-level vocabularies -> how they split."""


class _Keys:
    """The metadata of the tokenizer; `finish` refuses those that nothing asked for."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._all, self.where = metadata, where
        self._left = {key for key in metadata if key.startswith(PREFIX)}

    def has(self, key: str) -> bool:
        return PREFIX + key in self._all

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        self._left.discard(PREFIX + key)
        value = self._all.get(PREFIX + key, default)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise ConfigError(f"{self.where}: {PREFIX}{key} is no {kind.__name__}")
        return value

    def listed(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        values = self.take(key, list)
        if values is None:
            raise ConfigError(f"{self.where} lacks {PREFIX + key!r}")
        if not all(isinstance(value, kind) for value in values) or length not in (None, len(values)):
            wanted = f" of {length}" if length is not None else ""
            raise ConfigError(f"{self.where}: {PREFIX}{key} is no list{wanted} of {kind.__name__}")
        return list(values)

    def finish(self) -> None:
        left = sorted(key for key in self._left if not IDLE.fullmatch(key.removeprefix(PREFIX)))
        if left:
            raise UnsupportedModel(f"{self.where}: the key {left[0]!r} is not known here")


def tokenizer_files(metadata: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the texts of tokenizer.json, tokenizer_config.json and the chat templates by the files' names. Raises
    ConfigError for a vocabulary that contradicts itself, UnsupportedModel for one that is not read here."""
    keys = _Keys(metadata, where)
    model = keys.take("model", str)
    if model not in _MODELS:
        raise UnsupportedModel(
            f"{where}: the vocabulary {str(model)[:60]!r} (tokenizer.ggml.model) is not supported (known: "
            f"{', '.join(_MODELS)})"
        )
    tokens = keys.listed("tokens", str)
    types = keys.listed("token_type", int, len(tokens)) if keys.has("token_type") else [1] * len(tokens)
    special = {name: _text(keys, f"{key}_token_id", tokens) for name, key in SPECIAL.items()}
    architecture = str(metadata.get("general.architecture", ""))
    backend, adds_bos = _MODELS[model](keys, tokens, types, special, architecture)
    _add_special(backend, tokens, types)
    adds_bos = keys.take("add_bos_token", bool, adds_bos)
    adds_eos = keys.take("add_eos_token", bool, False)
    keys.finish()
    _surround(backend, special["bos_token"] if adds_bos else None, special["eos_token"] if adds_eos else None, where)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **{name: text for name, text in special.items() if text}}
    files = {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(config, indent=1)}
    return {**files, **_templates(metadata, where)}


def _text(keys: _Keys, key: str, tokens: list[str]) -> str | None:
    token: int | None = keys.take(key, int)
    if token is None:
        return None
    if not 0 <= token < len(tokens):
        if key.startswith(("padding", "unknown")):  # nothing is computed by them, and some files say -1
            return None
        raise ConfigError(f"{keys.where}: {PREFIX}{key} is {token}, and there are {len(tokens)} tokens")
    return tokens[token]


def _merges(keys: _Keys, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    found = []
    for text in keys.listed("merges", str):
        left, _, right = text.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ConfigError(f"{keys.where}: {PREFIX}merges has {text[:60]!r}, of which a part is no token")
        found.append((left, right))
    return found


def _vocabulary(keys: _Keys, tokens: list[str], left_out: set[int]) -> dict[str, int]:
    """Return the ids by text. ConfigError if a text is there twice."""
    found: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if index in left_out:
            continue
        if found.setdefault(token, index) != index:
            raise ConfigError(f"{keys.where}: {PREFIX}tokens has {token[:60]!r} twice, as {found[token]} and {index}")
    return found


def _byte_level(
    keys: _Keys, tokens: list[str], types: list[int], special: Mapping[str, str | None], architecture: str
) -> tuple[Backend, bool]:
    """Return a vocabulary of byte-level merges (GPT-2, Llama 3, Qwen, gpt-oss)."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    pre = keys.take("pre", str)
    if pre not in SPLITS:
        raise UnsupportedModel(
            f"{keys.where}: the way to split texts {str(pre)[:60]!r} (tokenizer.ggml.pre) is not supported (known: "
            f"{', '.join(SPLITS)})"
        )
    for key, kind in (("add_space_prefix", bool), ("scores", list)):  # of SentencePiece
        keys.take(key, kind)
    split = SPLITS[pre]
    vocabulary = _vocabulary(keys, tokens, {index for index, kind in enumerate(types) if kind == UNUSED})
    merges = _merges(keys, vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.takes_whole_words))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.splits_digits else []
    if split.pattern:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split.is_composed:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend, split.adds_bos


def _sentencepiece(
    keys: _Keys, tokens: list[str], types: list[int], special: Mapping[str, str | None], architecture: str
) -> tuple[Backend, bool]:
    """Return a vocabulary of SentencePiece (Llama 2, Mistral, Gemma), whose merges follow from it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    keys.take("pre", str)  # says "default"
    if architecture == "phi3":  # its special tokens take the spaces behind them, which the file does not say
        raise UnsupportedModel(f"{keys.where}: vocabularies of SentencePiece are not supported for {architecture!r}")
    is_gemma = architecture.startswith("gemma")
    scores = keys.listed("scores", float, len(tokens))
    if is_gemma:  # the file has the runs of spaces as they are in texts, and scores that are not the order of merges
        tokens = [SPACE * len(token) if len(token) > 1 and not token.strip(" ") else token for token in tokens]
        scores = [-float(index) for index in range(len(tokens))]
    has_prefix = keys.take("add_space_prefix", bool, not is_gemma)
    vocabulary = _vocabulary(keys, tokens, set())
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), special["unk_token"])
    if sum(len(token) ** 2 for token in tokens) > MAX_CUTS:
        raise ConfigError(f"{keys.where}: {PREFIX}tokens has too many long texts")
    merges = _merges(keys, vocabulary) if keys.has("merges") else _merges_of(vocabulary, scores)
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if has_prefix else replace
    if is_gemma:
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])
    return backend, True


_MODELS: Mapping[str, Callable[..., tuple[Backend, bool]]] = {"gpt2": _byte_level, "llama": _sentencepiece}
"""`tokenizer.ggml.model` -> what makes the tokenizer."""


def _merges_of(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return the merges that a vocabulary implies: each token of all pairs of tokens, those of the best score first."""
    found: list[tuple[float, int, str, str]] = []
    for token, index in vocabulary.items():
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        found += [(-scores[index], -len(a), a, b) for a, b in pairs if a in vocabulary and b in vocabulary]
    found.sort(key=lambda each: each[:2])
    return [(a, b) for _, _, a, b in found]


def _add_special(backend: Backend, tokens: list[str], types: list[int]) -> None:
    """Add the tokens at which texts are split before anything else. Those of users are not special: decoders keep
    them."""
    from tokenizers import AddedToken

    for wanted, is_special in ((CONTROL, True), (USER_DEFINED, False)):
        found = [token for token, kind in zip(tokens, types, strict=True) if kind == wanted and token]
        known = [token for token in found if backend.token_to_id(token) is not None]
        added = [AddedToken(token, normalized=False, special=is_special) for token in known]
        (backend.add_special_tokens if is_special else backend.add_tokens)(added)


def _surround(backend: Backend, bos: str | None, eos: str | None, where: str) -> None:
    """Let the tokenizer put bos before a text and eos behind it, if they are given."""
    from tokenizers.processors import TemplateProcessing

    if not bos and not eos:
        return
    special = [(text, backend.token_to_id(text)) for text in dict.fromkeys((bos, eos)) if text]
    first, second = ("$A", "$B:1")
    single = [*([bos] if bos else []), first, *([eos] if eos else [])]
    pair = [*single, *([f"{bos}:1"] if bos else []), second, *([f"{eos}:1"] if eos else [])]
    if any(index is None for _, index in special):
        raise ConfigError(f"{where}: its bos or eos is no token of the vocabulary")
    backend.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=special)


def _templates(metadata: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the chat templates by the names of their files."""
    found: dict[str, str] = {}
    for key, value in metadata.items():
        if key == TEMPLATE and isinstance(value, str):
            found["chat_template.jinja"] = value
        elif key.startswith(f"{TEMPLATE}.") and isinstance(value, str):
            name = key.removeprefix(f"{TEMPLATE}.")
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{where}: {key!r} is no name of a chat template")
            found[f"additional_chat_templates/{name}.jinja"] = value
    return found
