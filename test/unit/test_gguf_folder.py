"""The folder that is made of a GGUF file: once, whole, with the tokens of the checkpoint, or a sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.gguf_files import (
    Stored,
    Typed,
    convert,
    write_gguf,
)

from chitu.assets import TINY_MODEL_DIR
from chitu.errors import ConfigError
from chitu.launch.gguf_folder import folder_of, is_gguf
from chitu.models import gguf
from chitu.models.checkpoint import check_checkpoint
from chitu.models.config import model_hash, read_model_spec
from chitu.models.gguf import TYPES, read_header
from chitu.models.weights import WeightSource
from chitu.tokenizer.core import Tokenizer
from chitu.tokenizer.gguf_tokenizer import tokenizer_files


def source_of(folder: Path) -> WeightSource:
    return WeightSource(folder, torch.float32, torch.device("cpu"), None, piece_numbers=1000)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(TINY_MODEL_DIR, tmp_path_factory.mktemp("gguf") / "Tiny-Model.F32.gguf")


def quiet(_: str) -> None:
    return None


def test_a_folder_is_made_once_and_has_the_tokens_of_the_checkpoint(tiny: Path, tmp_path: Path) -> None:
    said: list[str] = []
    folder = folder_of(tiny, tmp_path / "cache", said.append)
    assert said == ["reading the config and the tokenizer of Tiny-Model.F32.gguf"]
    assert folder_of(tiny, tmp_path / "cache", said.append) == folder and len(said) == 1
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [folder.name], "nothing is left over"
    made, published = read_model_spec(folder), read_model_spec(TINY_MODEL_DIR)
    assert dataclasses.replace(made, dtype="bfloat16") == published
    ours, theirs = Tokenizer.load(folder), Tokenizer.load(TINY_MODEL_DIR)
    for written in ("What is the capital of France?", "  a\n\n\tb 12 345", "你好 🙂 e\u0301", "<|im_end|>x", "", " "):
        assert ours.encode(written) == theirs.encode(written)
    assert ours.template_source == theirs.template_source != ""
    assert ours.eos_token_ids == theirs.eos_token_ids and ours.special_tokens == theirs.special_tokens


def test_a_folder_that_lost_a_part_is_made_again(tiny: Path, tmp_path: Path) -> None:
    folder = folder_of(tiny, tmp_path / "cache", quiet)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    for name in ("config.json", "tokenizer.json", "model.gguf"):
        (folder / name).unlink()
        assert folder_of(tiny, tmp_path / "cache", quiet) == folder
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def merged(text: str, scores: Mapping[str, float]) -> list[str]:
    """Return a text's pieces as SentencePiece makes them: of all neighbours that are a token together, those with the
    best score, the first of equals, become one, until there are none."""
    pieces = list(text)
    while True:
        pairs = [(-scores[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores]
        if not pairs:
            return pieces
        _, at = min(pairs)
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]


@given(seed=st.integers(0, 1000), text=st.text("ab ", max_size=30))
def test_a_vocabulary_of_gemma_merges_in_the_order_of_its_tokens(seed: int, text: str) -> None:
    """Whatever the scores say; and the file has runs of spaces as they are in texts."""
    source = random.Random(seed)
    letters = ["a", "b", "\u2581"]
    longer = list({"".join(source.choice(letters) for _ in range(source.randint(2, 5))) for _ in range(25)})
    source.shuffle(longer)
    spelled = [token.replace("\u2581", " ") if set(token) == {"\u2581"} else token for token in longer]
    tokens = ["<unk>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), *spelled, *letters]
    metadata = {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [source.random() for _ in tokens],
        "tokenizer.ggml.token_type": [2, 3, *[6] * 256, *[1] * (len(tokens) - 258)],
        "tokenizer.ggml.bos_token_id": 1,
    }
    backend = tokenizers.Tokenizer.from_str(tokenizer_files(metadata, "")["tokenizer.json"])
    ranks = {token: -float(rank) for rank, token in enumerate(longer)}
    assert backend.encode(text).tokens == ["<bos>", *merged(text.replace(" ", "\u2581"), ranks)]
    assert backend.decode(backend.encode(text).ids) == text


@given(seed=st.integers(0, 1000), text=st.text("abc ", max_size=30))
def test_a_vocabulary_of_sentencepiece_has_its_tokens(seed: int, text: str) -> None:
    """The merges follow from the scores: the file has none."""
    source = random.Random(seed)
    letters = ["a", "b", "c", "\u2581"]
    longer = {"".join(source.choice(letters) for _ in range(source.randint(2, 5))) for _ in range(25)}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(longer), *letters]
    ranks = {token: -float(rank) for rank, token in enumerate(source.sample(sorted(longer), len(longer)))}
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [ranks.get(token, 0.0) for token in tokens],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    backend = tokenizers.Tokenizer.from_str(tokenizer_files(metadata, "")["tokenizer.json"])
    pieces = merged(("\u2581" + text).replace(" ", "\u2581"), ranks) if text else []
    assert backend.encode(text).tokens == ["<s>", *pieces]
    assert backend.decode(backend.encode(text + "\u00e9").ids) == text + "\u00e9", "by its bytes"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", "I|'|LL| pay| 1234| kg|\n\n | x|=|5| 中文"),
        ("smollm", "I|'|LL| pay| |1|2|3|4| kg|\n\n | x|=|5| 中文"),
        ("starcoder", "I|'|LL| pay| |1|2|3|4| kg|\n\n | x|=|5| 中文"),
        ("llama-bpe", "I|'LL| pay| |123|4| kg|\n\n| | x|=|5| 中文"),
        ("qwen2", "I|'LL| pay| |1|2|3|4| kg|\n\n| | x|=|5| 中文"),
        ("gpt-4o", "I'LL| pay| |123|4| kg|\n\n| | x|=|5| 中文"),
        ("tekken", "I|'LL| pay| |1|2|3|4| kg|\n\n| | x|=|5| 中文"),
    ],
)
def test_texts_are_split_as_the_vocabulary_was_learned(pre: str, pieces: str, tmp_path: Path) -> None:
    file = convert(TINY_MODEL_DIR, tmp_path / "x.gguf", **{"tokenizer.ggml.pre": pre})
    folder = folder_of(file, tmp_path / "cache", quiet)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    written = pieces.replace("|", "")
    assert backend.pre_tokenizer is not None
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(written)]
    assert "|".join(written[begin:end] for begin, end in spans) == pieces
    model = json.loads(backend.to_str())["model"]
    assert model["ignore_merges"] is (pre in ("llama-bpe", "tekken"))
    assert (backend.normalizer is not None) is (pre == "qwen2")


@pytest.mark.parametrize(
    ("pre", "said", "has_bos"),
    [
        ("qwen2", None, False),
        ("llama-bpe", None, True),
        ("tekken", None, True),
        ("llama-bpe", False, False),
        ("qwen2", True, True),
    ],
)
def test_bos_is_put_before_a_text_if_the_file_says_so_or_its_split_does(
    pre: str, said: bool | None, has_bos: bool, tmp_path: Path
) -> None:
    metadata = dict(read_header(convert(TINY_MODEL_DIR, tmp_path / "x.gguf")).metadata)
    metadata |= {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": said}
    given = {key: each for key, each in metadata.items() if each is not None}
    backend = tokenizers.Tokenizer.from_str(tokenizer_files(given, "")["tokenizer.json"])
    assert (backend.encode("x").tokens[0] == "<|begin|>") is has_bos


def test_a_file_that_moved_is_found_again_and_has_the_same_hash(tiny: Path, tmp_path: Path) -> None:
    there = tmp_path / "Tiny-Model.F32.gguf"
    there.write_bytes(tiny.read_bytes())
    folder = folder_of(there, tmp_path / "cache", quiet)
    before = model_hash(folder)
    elsewhere = tmp_path / "elsewhere" / there.name
    elsewhere.parent.mkdir()
    there.rename(elsewhere)
    assert folder_of(elsewhere, tmp_path / "cache", quiet) == folder
    assert model_hash(folder) == before and (folder / "model.gguf").resolve() == elsewhere
    renamed = elsewhere.rename(tmp_path / "other.gguf")
    assert model_hash(folder_of(renamed, tmp_path / "cache", quiet)) == before, "its name is not in it"


def split(file: Path, folder: Path, count: int, **more: Any) -> list[Path]:
    """Write a file's tensors into several, as gguf-split does."""
    header = read_header(file)
    numbers = {name: number for number, name in gguf.TYPES.items()}
    data = file.read_bytes()
    tensors = {
        name: Stored(numbers[each.dtype], each.shape, data[each.offset : each.offset + each.num_bytes])
        for name, each in header.tensors.items()
    }
    names, files = list(tensors), []
    for number in range(count):
        own = {name: tensors[name] for name in names[number::count]}
        marks = {"split.no": number, "split.count": count, "split.tensors.count": len(names), **more}
        metadata = {**(header.metadata if number == 0 else {}), **marks}
        files.append(write_gguf(folder / f"m-{number + 1:05}-of-{count:05}.gguf", metadata, own))
    return files


def test_a_file_of_a_cache_is_known_by_its_first_bytes(tiny: Path, tmp_path: Path) -> None:
    blob = tmp_path / "sha256-00ff"
    blob.symlink_to(tiny)
    assert is_gguf(blob) and is_gguf(tiny)
    (tmp_path / "text").write_text("no model")
    (tmp_path / "wrong.gguf").write_text("no model")
    assert not is_gguf(tmp_path / "text") and not is_gguf(tmp_path) and not is_gguf(tmp_path / "none.gguf")
    with pytest.raises(ConfigError, match="is no GGUF file"):
        folder_of(tmp_path / "wrong.gguf", tmp_path / "cache", quiet)


def test_split_files_are_one_model(tiny: Path, tmp_path: Path) -> None:
    files = split(tiny, tmp_path, 3)
    folder = folder_of(files[1], tmp_path / "cache", quiet)
    spec = read_model_spec(folder)
    with source_of(folder_of(tiny, tmp_path / "cache", quiet)) as whole, source_of(folder) as parts:
        assert check_checkpoint(folder, spec).numbers > 0
        for name, shape in whole.names.items():
            assert torch.equal(whole.take(name, *shape), parts.take(name, *shape))
    files[2].unlink()
    with pytest.raises(ConfigError, match=r"m-00003-of-00003\.gguf is missing"):
        folder_of(files[0], tmp_path / "cache", quiet)


def test_files_that_belong_to_other_models_are_refused(tiny: Path, tmp_path: Path) -> None:
    files = split(tiny, tmp_path, 2)
    files[1].write_bytes(files[0].read_bytes())
    with pytest.raises(ConfigError, match=r"is file 0 .* of 2 by its header, not file 1 of 2"):
        folder_of(files[0], tmp_path / "cache", quiet)
    split(tiny, tmp_path, 2, **{"split.tensors.count": 400})
    with pytest.raises(ConfigError, match="instead of 400"):
        folder_of(files[0], tmp_path / "cache", quiet)
    alone = files[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(ConfigError, match="by its header"):
        folder_of(alone, tmp_path / "cache", quiet)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"general.type": "mmproj"}, "mmproj"),
        ({"general.type": "adapter"}, "'adapter'"),
        ({"general.architecture": "clip"}, "mmproj"),
        ({"general.architecture": "rwkv7"}, r"'rwkv7' are not supported \(known: llama, "),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
        ({"tokenizer.ggml.pre": "new-split"}, "'new-split'"),
        ({"tokenizer.ggml.pre": "default"}, "'default'"),
        ({"tokenizer.ggml.bos_token_id": 1280}, "bos_token_id is 1280"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merges"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "token_type"),
        ({"tokenizer.ggml.scores_by_moon": [1.0]}, "scores_by_moon"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, "add_bos_token"),
        ({"tokenizer.chat_template.../x": "y"}, "no name of a chat template"),
    ],
)
def test_what_is_not_read_is_refused_by_name(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = convert(TINY_MODEL_DIR, tmp_path / "x.gguf", **more)
    with pytest.raises(ConfigError, match=words):
        folder_of(file, tmp_path / "cache", quiet)
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


ODD = [
    "", "x" * 3000, Typed(5, -1), Typed(10, (1 << 64) - 1), 1 << 31, 0, 1.5, float("nan"), float("inf"), -1.0, True,
    False, [], [1], [0.5], ["a"], [[1], [2]], [True] * 3, [7] * 3000,
]  # fmt: skip
MORE_KEYS = (
    "split.count", "split.no", "split.tensors.count", "general.type", "general.alignment", "tokenizer.chat_template",
    "tokenizer.chat_template.other", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.add_eos_token", "tokenizer.ggml.scores", "qwen3.rope.scaling.type", "qwen3.rope.scaling.factor",
    "qwen3.rope.scale_linear", "qwen3.rope.scaling.original_context_length", "qwen3.attention.causal",
    "qwen3.rope.dimension_count", "qwen3.expert_count", "qwen3.vocab_size",
)  # fmt: skip


@pytest.fixture(scope="module")
def parts(tiny: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    header, data = read_header(tiny), tiny.read_bytes()
    numbers = {name: number for number, name in TYPES.items()}
    tensors = {
        name: Stored(numbers[each.dtype], each.shape, data[each.offset : each.offset + each.num_bytes])
        for name, each in header.tensors.items()
    }
    return dict(header.metadata), tensors


@pytest.mark.parametrize("value_number", range(len(ODD)))
def test_no_value_of_any_key_is_more_than_a_sentence(
    value_number: int, parts: tuple[dict[str, Any], dict[str, Stored]], tmp_path: Path
) -> None:
    metadata, tensors = parts
    odd = ODD[value_number]
    small = {key: each for key, each in metadata.items() if not isinstance(each, list)}
    for key in (*metadata, *MORE_KEYS):
        base = metadata if key.startswith("tokenizer") else {**small, "tokenizer.ggml.tokens": ["a"]}
        file = write_gguf(tmp_path / "x.gguf", {**base, key: odd}, tensors)
        try:
            folder_of(file, tmp_path / "cache", quiet)
        except ConfigError as error:
            assert "\n" not in error.message and len(error.message) < 600, key
    for made in (tmp_path / "cache").glob("*") if (tmp_path / "cache").exists() else ():
        with contextlib.suppress(ConfigError):
            read_model_spec(made)
        with contextlib.suppress(ConfigError):
            Tokenizer.load(made)
