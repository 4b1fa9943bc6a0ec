"""`--model`: a checkpoint folder, or the id of a repository on the Hugging Face hub.

Called by the command line before a topology is read; nothing else knows of the hub. A folder of that name comes first,
then the local cache of huggingface_hub (which transformers, vLLM and `hf download` fill, too), then, where the command
starts something, the hub itself, with huggingface_hub's bars on stderr.
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
from chitu.models.config import weight_files
from chitu.tokenizer.core import TOKENIZER_FILES, require_tokenizer

REPOSITORY_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
FILES = ("*.json", "*.jinja", "*.safetensors", *TOKENIZER_FILES)
"""Of a repository: no weights in other formats, no pictures."""
REACH_S = 4.0
"""For the hub to take a connection. The library's own patience is minutes."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    path: str
    """Of the folder, absolute."""
    repository: str | None = None
    """The id, where one was given."""


def find_model(word: str, may_download: bool, say: Callable[[str], None]) -> ModelSource:
    """The folder that `--model` means. ConfigError where the repository is neither here nor to be had."""
    if not word:
        raise ConfigError("--model is empty: give the folder of a checkpoint, or leave it out")
    folder = Path(os.path.expanduser(word)).absolute()  # Path's raises for `~nobody`
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
    """Its snapshot in the local cache; else why not, as a clause."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError as error:
        return None, f"huggingface_hub cannot be imported ({error})"
    try:
        path = snapshot_download(repository, local_files_only=True, allow_patterns=list(FILES))
    except (OSError, ValueError):  # what the library raises where it has nothing
        return None, f"the cache {HF_HUB_CACHE} does not have it"
    try:
        weight_files(path)
        require_tokenizer(path)
    except ConfigError as error:
        return None, f"the cache has a part of it ({error.message})"
    return path, ""


def _why_no_hub() -> str:
    """Why the hub cannot be asked, as a clause; empty where it can."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids to ask the hub"
    url = urllib.parse.urlsplit(ENDPOINT)
    if url.scheme in urllib.request.getproxies():
        return ""  # the proxy knows; names need not resolve here
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    failures: list[str] = [f"no answer within {REACH_S:g} s"]

    def reach() -> None:
        try:
            socket.create_connection((host, port), timeout=REACH_S).close()
            failures.clear()
        except OSError as error:
            failures[:] = [error.strerror or str(error)]

    # A thread, as a resolver without a network may take its time, which nothing bounds.
    thread = threading.Thread(target=reach, daemon=True)
    thread.start()
    thread.join(REACH_S)
    return f"{host} cannot be reached ({failures[0]})" if failures else ""


def _download(repository: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(repository, allow_patterns=list(FILES))
    except (OSError, ValueError) as error:  # its errors of HTTP are OSErrors
        text = " ".join(str(error).split())
        raise ConfigError(f"--model {repository} cannot be downloaded: {text}") from error
    return str(path)
