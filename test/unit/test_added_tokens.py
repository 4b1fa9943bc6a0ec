"""tokenizer_config.json beside tokenizer.json: either the token ids equal AutoTokenizer's, or the key is refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from chitu.errors import ConfigError
from chitu.tokenizer import Tokenizer
from chitu.tools.make_model import train_tokenizer

TEXTS = [
    "plain words, and more words.",
    "<|im_start|>user\nhi<|im_end|> <tool> x<tool>y <ENT> a<mask> <img>  <vid>b <eot>",
    "  <tool>  <ENT>  <mask>  <eot> ",
    "é🙂<|im_end|><tool>\n<img><vid>",
    "",
]
PLAIN = {"content": "<tool>", "lstrip": False, "rstrip": False, "normalized": True, "single_word": False}

CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "added_tokens_decoder": {
        "added_tokens_decoder": {
            "9001": {"content": "<ENT>", "special": True, "normalized": False},
            "9000": {**PLAIN, "special": False},
        }
    },
    "spaces taken by a token": {
        "added_tokens_decoder": {"9000": {**PLAIN, "lstrip": True, "rstrip": True, "special": True}}
    },
    "whole words only": {"added_tokens_decoder": {"9000": {**PLAIN, "single_word": True, "special": False}}},
    "another description of a token that is known": {
        "added_tokens_decoder": {"4": {"content": "<|im_end|>", "rstrip": True, "special": True}}
    },
    "a token that is in the vocabulary": {"added_tokens_decoder": {"60": {"content": "user", "special": True}}},
    "an unknown eos": {"eos_token": "<eot>"},
    "an unknown eos as an object": {"eos_token": {"__type": "AddedToken", "content": "<eot>", "lstrip": True}},
    "an eos that is declared": {
        "eos_token": "<eot>",
        "added_tokens_decoder": {"9000": {"content": "<eot>", "rstrip": True, "special": True}},
    },
    "special ones": {"mask_token": "<mask>", "pad_token": "<tool>", "unk_token": None},
    "additional ones": {"additional_special_tokens": ["<ENT>", "<tool>"]},
    "additional ones as objects": {
        "additional_special_tokens": [{"__type": "AddedToken", "content": "<ENT>", "rstrip": True}]
    },
    "extra ones": {"extra_special_tokens": ["<ENT>", "<|im_end|>", "<mask>"]},
    "extra ones with names": {"extra_special_tokens": {"image_token": "<img>", "video_token": "<vid>"}},
    "tokens of a name that only this model has": {"image_token": "<img>", "eos_token": "<|im_end|>"},
    "split": {"split_special_tokens": True, "eos_token": "<eot>"},
    "not split": {"split_special_tokens": False},
    "bos and eos around": {"add_bos_token": True, "add_eos_token": True, "bos_token": "<|im_start|>"},
    "a prefix space that nobody adds": {"add_prefix_space": True},
}
FILES: dict[str, dict[str, Any]] = {
    "special_tokens_map": {"eos_token": {"content": "<eot>", "lstrip": False}, "mask_token": "<mask>"},
    "added_tokens": {"<tool>": 9001, "<ENT>": 9000},
}


@cache
def byte_level() -> str:
    """Return a byte-level tokenizer.json."""
    return train_tokenizer(600).to_str()


def write_folder(folder: Path, config: dict[str, Any], backend: Backend | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(byte_level() if backend is None else backend.to_str(), encoding="utf-8")
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type":"llama"}', encoding="utf-8")
    return folder


def require_same(folder: Path) -> None:
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in TEXTS:
        for around in (True, False):
            want = theirs.encode(text, add_special_tokens=around)
            assert ours.encode(text, around) == want, text
            assert ours.encode_batch([text], around) == [want], text
            assert ours.decode(want) == theirs.decode(want, skip_special_tokens=True)
    if theirs.eos_token_id is not None:
        assert ours.eos_token_ids == (theirs.eos_token_id,)


@pytest.mark.parametrize("name", CONFIGS)
def test_token_ids_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    require_same(write_folder(tmp_path, CONFIGS[name]))


@pytest.mark.parametrize("names", [["special_tokens_map"], ["added_tokens"], ["special_tokens_map", "added_tokens"]])
@pytest.mark.parametrize("config", ["nothing", "added_tokens_decoder"])
def test_older_files_count_where_there_is_no_added_tokens_decoder(
    names: list[str], config: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path, CONFIGS[config])
    for name in names:
        (folder / f"{name}.json").write_text(json.dumps(FILES[name]), encoding="utf-8")
    require_same(folder)


def metaspace(scheme: str) -> Backend:
    vocab = {
        "<unk>": 0,
        "<s>": 1,
        "</s>": 2,
        **{f"<0x{b:02X}>": 3 + b for b in range(256)},
        "▁": 259,
        "a": 260,
        "▁a": 261,
    }
    backend = Backend(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return backend


@pytest.mark.parametrize(("scheme", "wanted"), [("first", True), ("never", False), ("first", None)])
def test_a_prefix_space_that_both_files_agree_on_is_followed(scheme: str, wanted: bool | None, tmp_path: Path) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": wanted, "legacy": False}
    folder = write_folder(tmp_path, config, metaspace(scheme))
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in ("a a", "a", "é a"):
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize(("scheme", "wanted"), [("first", False), ("always", False), ("never", True)])
def test_a_prefix_space_that_the_files_disagree_on_is_refused_by_name(
    scheme: str, wanted: bool, tmp_path: Path
) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": wanted}
    with pytest.raises(ConfigError, match="add_prefix_space"):
        Tokenizer.load(write_folder(tmp_path, config, metaspace(scheme)))


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"1": {"text": "a"}}},
        {"added_tokens_decoder": {"1": 5}},
        {"extra_special_tokens": [7]},
        {"extra_special_tokens": {"a_token": []}},
    ],
)
def test_what_is_no_token_is_a_configuration_error(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer_config"):
        Tokenizer.load(write_folder(tmp_path, config))
