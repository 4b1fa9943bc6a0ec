"""`--model FILE.gguf`: a checkpoint folder as Hugging Face has them, made of a GGUF file once, in the user's cache.

config.json, the tokenizer and the chat template come from the file's header; the weights stay in the file, to which the
folder has links. So whatever reads a checkpoint reads this one. The folder's name has a digest of the headers: another
file has another folder, and the same file elsewhere has the same, with links to where it was given last.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chitu.errors import ConfigError
from chitu.models.gguf import MAGIC, SPLIT, SUFFIX, GgufHeader, read_headers, split_files
from chitu.models.gguf_config import config_of, generation_of
from chitu.tokenizer.gguf_tokenizer import tokenizer_files

VERSION = 1
"""Of what is written. Another one makes another folder."""
DIGEST_CHARS = 16
STEM_CHARS = 80
LINK = "model"
"""Stem of the links' names, which are in the hash of a model: the name of the file is not."""


def is_gguf(path: Path) -> bool:
    """Return whether this is a GGUF file, by its name or its first bytes (in caches the name is a digest)."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as stream:
            return path.suffix == SUFFIX or stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that is no checkpoint, the first if the model is split, or None if it has none.
    ConfigError if it has several models. Folders of GGUF files often have a config.json and no tokenizer."""
    is_whole = all((folder / name).is_file() for name in ("config.json", "tokenizer.json"))
    if is_whole or not folder.is_dir() or any(folder.glob("*.safetensors")):
        return None
    models = first_files(sorted(folder.glob(f"*{SUFFIX}")))
    if len(models) > 1:
        names = ", ".join(file.name for file in models)
        raise ConfigError(f"--model {folder} holds {len(models)} models: give the file of one of them ({names})")
    return models[0] if models else None


def first_files(files: Sequence[Path]) -> list[Path]:
    """Return the files of models alone: of a split one the first, and no parts for images."""
    others = [file for file in files if "mmproj" not in file.name]
    return [file for file in others if (found := SPLIT.fullmatch(file.name)) is None or int(found["number"]) == 1]


def folder_of(file: Path, cache: Path, say: Callable[[str], None]) -> Path:
    """Return the folder of a GGUF file, which is made if it is not there. Raises ConfigError for a file that is broken,
    UnsupportedModel for one that is not computed here, both naming what it is."""
    files = split_files(file)
    headers = read_headers(files)
    target = cache / f"{_stem(file)}-{_digest(headers)}-{VERSION}"
    try:
        if not all((target / name).is_file() for name in ("config.json", "tokenizer.json")):
            shutil.rmtree(target, ignore_errors=True)  # somebody removed a part of it
            say(f"reading the config and the tokenizer of {file.name}")
            _make(target, files, headers)
        for link, each in zip(_links(len(files)), files, strict=True):
            _point(target / link, each)
    except OSError as error:
        raise ConfigError(f"--model {file}: its folder {target} cannot be written: {error}") from error
    return target


def served_name(file: Path) -> str:
    """Return the name by which a model is served that was given as a file."""
    found = SPLIT.fullmatch(file.name)
    return found["stem"] if found is not None else file.stem


def _stem(file: Path) -> str:
    return re.sub(r"[^\w.-]", "_", served_name(file))[:STEM_CHARS]


def _digest(headers: Sequence[GgufHeader]) -> str:
    digest = hashlib.sha256()
    for header in headers:
        with header.file.open("rb") as stream:
            digest.update(stream.read(header.num_bytes))
    return digest.hexdigest()[:DIGEST_CHARS]


def _links(count: int) -> list[str]:
    if count == 1:
        return [f"{LINK}{SUFFIX}"]
    return [f"{LINK}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]


def _make(target: Path, files: Sequence[Path], headers: Sequence[GgufHeader]) -> None:
    """Write the folder elsewhere and move it to its place, so that it is whole or not there."""
    first = headers[0]
    texts = {
        "config.json": _json(config_of(headers)),
        "generation_config.json": _json(generation_of(first)),
        **tokenizer_files(first.metadata, f"model.path: {first.file}"),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=target.parent, prefix=".new-"))
    try:
        made.chmod(0o755)
        for name, text in texts.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_text(text, encoding="utf-8")
        for link, each in zip(_links(len(files)), files, strict=True):
            (made / link).symlink_to(each.absolute())
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # else another process made it at the same time
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False)


def _point(link: Path, file: Path) -> None:
    """Let a link lead to the file, wherever it led before."""
    if link.is_symlink() and Path(link.readlink()) == file.absolute():
        return
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(file.absolute())
    fresh.replace(link)
