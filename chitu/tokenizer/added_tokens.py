"""Applies a checkpoint's small JSON files beside tokenizer.json to its tokens, as transformers 5 does. Pure.

Used by `Tokenizer.load`. With a tokenizer.json, `add_bos_token` and `add_eos_token` have no effect, there as here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chitu.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend")
"""Classes of transformers that use tokenizer.json as it is; the rest rebuild parts from tokenizer_config.json."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if there is no file. Raises ConfigError if it is not a JSON object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return value


def steps_of(part: Any) -> list[dict[str, Any]]:
    """Return a normalizer, pre-tokenizer or decoder as the flat list of its steps; empty if there is none."""

    def flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
        if step["type"] != "Sequence":
            return [step]
        (inner,) = step.keys() - {"type"}  # `normalizers`, `pretokenizers` or `decoders`
        return [leaf for part in step[inner] for leaf in flatten(part)]

    return [] if part is None else flatten(json.loads(part.__getstate__()))


def follow_config(backend: Backend, folder: Path, config: Mapping[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json (or an older file beside it) has, and apply its other settings.
    Raises ConfigError, with the key, if that is impossible."""
    _require_same_prefix_space(backend, folder, config)
    known = backend.get_added_tokens_decoder().values()
    descriptions = {_describe(token) for token in known}
    contents = {token.content for token in known}
    declared = list(_declared(folder, config))
    added = [token for token in declared if _describe(token) not in descriptions]
    contents |= {token.content for token in added}
    for token in _named(folder, config, {token.content: token for token in declared}):
        if token.content not in contents:
            contents.add(token.content)
            added.append(token)
    if added:
        backend.add_tokens(added)
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))


def _describe(token: AddedToken) -> tuple[Any, ...]:
    return (token.content, *(getattr(token, flag) for flag in FLAGS))


def _token(value: Any, where: str, **more: Any) -> AddedToken:
    from tokenizers import AddedToken

    if isinstance(value, str):
        return AddedToken(value, **more)
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        raise ConfigError(f"{where}: {value!r} is no token")
    return AddedToken(value["content"], **{**{k: bool(value[k]) for k in FLAGS if k in value}, **more})


def _declared(folder: Path, config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yield the tokens of `added_tokens_decoder` in the order of its ids, else those of added_tokens.json."""
    given = config.get("added_tokens_decoder")
    if given is not None:
        where = f"{folder / 'tokenizer_config.json'}: added_tokens_decoder"
        try:
            numbered = sorted((int(key), value) for key, value in given.items())
        except (AttributeError, ValueError) as error:
            raise ConfigError(f"{where} is no map of token ids") from error
        except TypeError:  # an id that occurs twice
            raise ConfigError(f"{where} has an id twice") from None
        yield from (_token(value, where) for _, value in numbered)
        return
    special = {token.content for token in _named(folder, config, {})}
    older = read_json(folder / "added_tokens.json")
    for content, _ in sorted(older.items(), key=lambda item: item[1]):
        yield _token(content, "added_tokens.json", special=content in special, normalized=content not in special)


def _named(folder: Path, config: Mapping[str, Any], declared: Mapping[str, AddedToken]) -> Iterator[AddedToken]:
    """Yield the named special tokens and those of the list without names, as in `declared` if they are there."""
    where = f"{folder / 'tokenizer_config.json'}"
    given = dict(config)
    if config.get("added_tokens_decoder") is None:
        given |= read_json(folder / "special_tokens_map.json")
    own = {key: value for key, value in given.items() if key.endswith("_token") and isinstance(value, str | Mapping)}
    extra = given.get("extra_special_tokens") or given.get("additional_special_tokens") or []
    if isinstance(extra, Mapping):
        own |= extra
        extra = []
    standard = {name: own[name] for name in SPECIAL_TOKENS if name in own}
    for name, value in [*standard.items(), *((k, v) for k, v in own.items() if k not in standard)]:
        token = _token(value, f"{where}: {name}", special=True)
        yield declared.get(token.content, token)
    for value in extra:
        is_special = {"special": True} if isinstance(value, str) else {}
        yield _token(value, f"{where}: extra_special_tokens", **is_special)


def _require_same_prefix_space(backend: Backend, folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ConfigError if `add_prefix_space`, which overrides tokenizer.json in some classes, contradicts it."""
    wanted = config.get("add_prefix_space")
    if not isinstance(wanted, bool) or config.get("tokenizer_class", GENERIC_CLASSES[0]) in GENERIC_CLASSES:
        return
    for step in [*steps_of(backend.normalizer), *steps_of(backend.pre_tokenizer)]:
        kind = step["type"]
        has = step.get("prepend_scheme", "always") != "never" if kind == "Metaspace" else step.get("add_prefix_space")
        if kind == "Prepend":
            has = True
        if has is not None and has is not wanted:
            raise ConfigError(
                f"{folder / 'tokenizer_config.json'}: add_prefix_space is {str(wanted).lower()}, but tokenizer.json "
                f"({kind}) differs; make them agree"
            )
