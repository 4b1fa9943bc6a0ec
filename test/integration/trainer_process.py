"""A trainer: `python trainer_process.py BASE FOLDER`. Holds the tensors of a checkpoint in memory and publishes them.

Takes a line on stdin for each of its steps, and answers with one: `train SEED` makes other numbers near those of the
checkpoint, in place; `publish` prints the folder; `save FOLDER` writes them as a checkpoint; `copy` and `share` choose
whether its tensors are in its own memory or in shared memory. Ends at end of file.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from chitu.tools.publish import Publisher

LEARNING_RATE = 0.03


def main(base: Path, folder: str) -> None:
    first = load_file(base / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in first.items()}
    publisher = Publisher(folder, like=base)
    shared = publisher.allocate(tensors)
    print("ready", flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        answer = "done"
        if word == "train":
            generator = torch.Generator().manual_seed(int(rest[0]))
            for name, tensor in tensors.items():
                torch.add(first[name], LEARNING_RATE * torch.randn(tensor.shape, generator=generator), out=tensor)
        elif word == "share":
            for name, tensor in tensors.items():
                shared[name].copy_(tensor)
            tensors = shared
        elif word == "copy":
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        elif word == "publish":
            answer = publisher.publish(tensors)
        elif word == "save":
            shutil.copytree(base, rest[0])
            save_file(tensors, Path(rest[0]) / "model.safetensors", {"format": "pt"})
        print(answer, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
