"""A checkpoint's tokenizer: encode, decode, chat template. Owned by the router; thread-safe.

Reads tokenizer.json with the `tokenizers` library and the small JSON files beside it; only a checkpoint without a
tokenizer.json goes through transformers, which converts it. Token ids are those of transformers' AutoTokenizer, with
one exception: a Llama-2 tokenizer.json is followed although transformers 5 builds its own (a text that begins with a
space gets one more, as SentencePiece does and as these models were trained).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from chitu.config.model_files import refuse_lfs_pointer
from chitu.errors import ConfigError, MissingDependency
from chitu.tokenizer.added_tokens import SPECIAL_TOKENS, follow_config, read_json, steps_of
from chitu.tokenizer.chat_template import ChatTemplate, find_templates
from chitu.tokenizer.detokenizer import Detokenizer, detokenizer_factory, token_bytes
from chitu.tokenizer.words import WordEncoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

SURE_BYTES = 4
"""UTF-8 bytes a token: about what English and Chinese have."""
SURVEY_CHARS = 32_768
"""Size of the pieces in which a long text is tokenised to count its tokens."""
SHORT_CHARS = 2048
"""Longest text of which `Tokenizer.exceeds` judges nothing."""
SURVEY_SLACK = 64
"""Extra tokens that such a piece may have because of its cuts."""
MOST_COMPOSED = 4
"""Most characters that NFC composes into one."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "*.tiktoken")
"""Files of which any makes a tokenizer; transformers converts all but the first."""
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json")
"""JSON files beside the tokenizer that `Tokenizer.load` reads, if they are there."""
CONVERSION_PROBES = ("a  b", "def f():\n    return 1\n", "internationalization", "é🙂\n\n 12")
"""Texts that a converted tokenizer must encode as SentencePiece does."""


class Tokenizer:
    """A checkpoint's tokenizer, made by `Tokenizer.load`."""

    def __init__(
        self,
        backend: Backend,
        chat_template: ChatTemplate,
        special_tokens: Mapping[str, str],
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self.special_tokens = dict(special_tokens)
        """Texts of the named special tokens (`bos_token`, `eos_token`, ...)."""
        self.eos_token_ids = eos_token_ids
        """All ids that end a text, from tokenizer_config.json, generation_config.json and config.json."""
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """One more than the largest token id; a model's logits row may be longer."""
        added = backend.get_added_tokens_decoder().items()
        self.special_token_ids = {token.content: token_id for token_id, token in added if token.special}
        """Ids, by text, of the tokens that a decoder leaves out if it skips special tokens."""
        longest_first = sorted(self.special_token_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._longest_chars = _longest_chars(backend)
        self._words = WordEncoder.of(backend)
        self.token_bytes = token_bytes(backend)
        """Bytes that a token adds to a text; None if no token has that id."""
        self._make_skipping = detokenizer_factory(backend, skip_special_tokens=True)
        self._make_keeping = detokenizer_factory(backend, skip_special_tokens=False)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a checkpoint folder. Raises ConfigError with the file that is missing or wrong."""
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(f"model.path: {folder} is not a folder")
        config = read_json(folder / "tokenizer_config.json")
        backend = _load_backend(folder, config)
        backend.no_truncation()
        backend.no_padding()
        special = _special_tokens(folder, config)
        return cls(
            backend=backend,
            chat_template=ChatTemplate(find_templates(folder, config), special),
            special_tokens=special,
            eos_token_ids=_eos_token_ids(folder, backend, special),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids. `add_special_tokens`: those around a text (bos); False for a rendered chat."""
        ids = None if self._words is None else self._words.encode(text, add_special_tokens)
        return self.encode_batch([text], add_special_tokens)[0] if ids is None else ids

    def exceeds(self, text: str, max_tokens: int, bytes_per_token: int = SURE_BYTES) -> bool:
        """Return whether the text certainly has more than `max_tokens` tokens. False for a short text. Tokenises at
        most about that many, and none for a text of up to `bytes_per_token` bytes for each of them. Tokenising takes
        some hundred bytes of memory a token and cannot be stopped."""
        if len(text) <= SHORT_CHARS:
            return False
        if self._longest_chars is not None and len(text) > max_tokens * self._longest_chars:
            return True
        num_bytes = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
        if num_bytes <= max(SURVEY_CHARS, max_tokens * bytes_per_token):
            return False
        num_tokens = 0
        for at in range(0, len(text), SURVEY_CHARS):
            piece = text[at : at + SURVEY_CHARS]
            num_tokens += max(0, len(self.encode_batch([piece], add_special_tokens=False)[0]) - SURVEY_SLACK)
            if num_tokens > max_tokens:
                return True
        return False

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encode many texts at once, on several threads."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def first_text(self, text: str, num_tokens: int) -> str:
        """Return the beginning of the text that has so many tokens (at least one), or all of it. Cuts no character, so
        there may be fewer."""
        offsets = self._backend.encode(text, add_special_tokens=False).offsets
        if len(offsets) <= num_tokens:
            return text
        return text[: min(offsets[num_tokens - 1][1], offsets[num_tokens][0])]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text. Leaves out unknown ids; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def special_tokens_in(self, texts: Sequence[str]) -> dict[str, int]:
        """Return the special tokens whose texts occur in these texts: ids by text."""
        return {found: self.special_token_ids[found] for text in texts for found in self._special.findall(text)}

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a new incremental decoder for one stream of tokens."""
        return self._make_skipping() if skip_special_tokens else self._make_keeping()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the prompt's text, special tokens included: encode it with `add_special_tokens=False`.

        `variables` are the template's own (`enable_thinking`). Raises InvalidRequest if the checkpoint has no template
        or the template refuses the messages.
        """
        return self._chat_template.render(messages, tools, add_generation_prompt, variables)

    def to_json(self) -> str:
        """Return the tokenizer as a tokenizer.json, with the additions of the files beside it."""
        return self._backend.to_str()

    @property
    def added_token_ids(self) -> dict[str, int]:
        """Ids, by text, of added tokens, special or not: texts are split at these before anything else."""
        return {token.content: token_id for token_id, token in self._backend.get_added_tokens_decoder().items()}

    @property
    def template_source(self) -> str:
        """The chat template's text; empty if there is none."""
        return self._chat_template.source

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template reads, from `variables` and from its other inputs."""
        return self._chat_template.variables


def _longest_chars(backend: Backend) -> int | None:
    """Return the most characters of a text that one token stands for, or None if there is no bound (unknown characters,
    tokens that strip spaces around them, a normalizer that drops characters)."""
    is_complete = "ByteLevel" in {step["type"] for step in steps_of(backend.pre_tokenizer)}
    is_complete = is_complete or getattr(backend.model, "byte_fallback", False)
    if not is_complete or any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    factor = 1
    for step in steps_of(backend.normalizer):
        pattern = step.get("pattern", {}).get("String")
        if step["type"] == "NFC":
            factor = MOST_COMPOSED
        elif step["type"] != "Prepend" and not (pattern and len(step["content"]) >= len(pattern)):
            return None
    return factor * max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)


def require_tokenizer(path: str | Path) -> None:
    """Raise ConfigError if a checkpoint folder has no tokenizer, a JSON file of it that is no JSON, or a chat template
    that does not compile."""
    folder = Path(path)
    if not any(next(folder.glob(name), None) for name in TOKENIZER_FILES):
        raise ConfigError(
            f"model.path: {folder} has no tokenizer.json (nor an older tokenizer: {', '.join(TOKENIZER_FILES[1:])}): "
            "copy the tokenizer's files there"
        )
    for name in TOKENIZER_FILES:
        for file in folder.glob(name):
            refuse_lfs_pointer(file)
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            msgspec.json.decode(file.read_bytes(), type=dict[str, msgspec.Raw])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"model.path: {file} is damaged: {error}; download it again") from error
    for name in CONFIG_FILES:
        read_json(folder / name)
    ChatTemplate(find_templates(folder, read_json(folder / "tokenizer_config.json")), {})


def _load_backend(folder: Path, config: Mapping[str, Any]) -> Backend:
    try:
        from tokenizers import Tokenizer as BackendTokenizer
    except ImportError as error:
        raise MissingDependency("the package `tokenizers` is not installed: pip install tokenizers") from error
    file = folder / "tokenizer.json"
    if file.is_file():
        refuse_lfs_pointer(file)
        try:
            backend = BackendTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file} cannot be read: {error}") from error
        follow_config(backend, folder, config)
        return backend
    return _convert(folder)


def _convert(folder: Path) -> Backend:
    """Return a tokenizer in an older format, converted by transformers."""
    require_tokenizer(folder)
    encode = _sentencepiece_encoder(folder / "tokenizer.model")
    try:
        from transformers import AutoTokenizer

        converted = AutoTokenizer.from_pretrained(str(folder))
    except ImportError as error:
        raise MissingDependency(f"{folder} has no tokenizer.json, and converting it needs: {error}") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder} has no tokenizer.json, and transformers cannot convert it: {error}") from error
    backend: Backend | None = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"{folder} has no tokenizer.json, and {type(converted).__name__} cannot be converted to one")
    if encode is not None:
        require_same_ids(backend, encode, folder)
    return backend


def _sentencepiece_encoder(file: Path) -> Callable[[str], list[int]] | None:
    """Return the encoder of a SentencePiece model, or None if the file is none (Llama 3's is tiktoken's text)."""
    if not file.is_file() or file.read_bytes()[:1] != b"\n":  # the first field of its protobuf
        return None
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise MissingDependency(
            f"{file.parent} has no tokenizer.json, and converting {file.name} needs: pip install sentencepiece protobuf"
        ) from error
    try:
        encode: Callable[[str], list[int]] = SentencePieceProcessor(model_file=str(file)).encode
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    return encode


def require_same_ids(backend: Backend, encode: Callable[[str], list[int]], folder: Path) -> None:
    """Raise ConfigError if the converted tokenizer encodes a text otherwise than `encode`, SentencePiece itself.

    Most versions of transformers 5 order merges by token id instead of by score, which breaks indented text.
    """
    for text in CONVERSION_PROBES:
        ids, wanted = backend.encode(text, add_special_tokens=False).ids, encode(text)
        if ids != wanted:
            raise ConfigError(
                f"{folder} has no tokenizer.json, and the installed transformers converts tokenizer.model to other "
                f"tokens than SentencePiece has ({text!r}: {ids} instead of {wanted}); make one with transformers "
                "4.57: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token` and so on as text. tokenizer_config.json overrides special_tokens_map.json."""
    older = read_json(folder / "special_tokens_map.json")
    found = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name) or older.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _eos_token_ids(folder: Path, backend: Backend, special: Mapping[str, str]) -> tuple[int, ...]:
    """Return the ids without duplicates, in the order of the files that `Tokenizer.eos_token_ids` names."""
    ids = [backend.token_to_id(special["eos_token"])] if "eos_token" in special else []
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(token_id for token_id in ids if isinstance(token_id, int)))
