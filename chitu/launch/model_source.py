"""`--model`: a checkpoint folder, a GGUF file, or the id of a repository on the Hugging Face hub.

Called by the command line before a topology is read; no other module uses the hub. A folder of that name takes
precedence, then the local cache of huggingface_hub (which transformers, vLLM and `hf download` fill, too), then, if the
command starts something, the hub itself, with huggingface_hub's progress bars on stderr.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chitu.errors import ConfigError
from chitu.launch.gguf_folder import folder_of, gguf_in, is_gguf, served_name
from chitu.models.config import weight_files
from chitu.tokenizer.core import TOKENIZER_FILES, require_tokenizer

REPOSITORY_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
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
        return ModelSource(str(folder_of(file, Path.home() / ".cache" / "chitu" / "gguf", say)), served_name(file))
    if folder.exists() or not REPOSITORY_ID.fullmatch(word):
        return ModelSource(str(folder))
    path, why_not = _in_cache(word)
    if path is not None:
        return ModelSource(path, word)
    if not may_download:
        raise ConfigError(
            f"--model {word}: there is no such folder, and {why_not}; `hf download {word}` puts it there, and so does "
            "chitu serve"
        )
    if reason := _why_no_hub():
        raise ConfigError(
            f"--model {word}: there is no such folder, {why_not}, and {reason}: give the folder of a checkpoint, or "
            f"`hf download {word}` where there is a network"
        )
    say(f"downloading {word} from the Hugging Face hub")
    return ModelSource(_download(word), word)


def _in_cache(repository: str) -> tuple[str | None, str]:
    """Return the path of its snapshot in the local cache, else None and why not, as a clause."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError as error:
        return None, f"huggingface_hub cannot be imported ({error})"
    try:
        path = snapshot_download(
            repository, local_files_only=True, allow_patterns=list(FILES), ignore_patterns=list(SECOND_COPIES)
        )
    except (OSError, ValueError):  # what the library raises if the cache has nothing
        return None, f"the cache {HF_HUB_CACHE} does not have it"
    try:
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


def _download(repository: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(repository, allow_patterns=list(FILES), ignore_patterns=list(SECOND_COPIES))
    except (OSError, ValueError) as error:  # its errors of HTTP are OSErrors
        text = " ".join(str(error).split())
        raise ConfigError(f"--model {repository} cannot be downloaded: {text}") from error
    return str(path)
