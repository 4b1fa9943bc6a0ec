"""Names of files of checkpoint folders, and files that are no such files: Git LFS pointers. No torch."""

from __future__ import annotations

from pathlib import Path

from chitu.errors import ConfigError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a folder with a LoRA adapter, as PEFT writes it."""
TENSORS_MANIFEST = "chitu_tensors.json"
"""File of a folder whose tensors are in a trainer's memory (`models/trainer_tensors.py`)."""
LFS_MARK = b"version https://git-lfs.github.com/spec/"


def refuse_lfs_pointer(file: Path) -> None:
    """Raise ConfigError if the file is a Git LFS pointer: text that stands for a file that was not downloaded."""
    with file.open("rb") as stream:
        if stream.read(len(LFS_MARK)) == LFS_MARK:
            raise ConfigError(
                f"model.path: {file} is a Git LFS pointer, not the file itself: run `git lfs pull` in {file.parent}"
            )
