"""A trainer with its tensors on a card, or on its twin: `python gpu_trainer.py cuda|twin BASE FOLDER`. Publishes them,
prints the folder, and for each line of stdin writes to the tensor of that name. Ends at end of file."""

from __future__ import annotations

import mmap
import os
import sys

import torch
from safetensors.torch import load_file

from chitu.tools.publish import CudaMemory, Place, Publisher

UUID = "ab" * 16
"""Of the twin."""


class TwinMemory:
    """Stands in for the memory of a card: one shared file, whose driver is a twin too."""

    def __init__(self, nbytes: int) -> None:
        from cuda_ipc_twin import FileDriver

        file = os.memfd_create("card")
        os.truncate(file, nbytes)
        self._whole = torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
        self._driver, self._used = FileDriver(), 0

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        first, self._used = self._used, self._used + -(-tensor.nbytes // 256) * 256
        found = self._whole[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return found.copy_(tensor)

    def has(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self._whole.data_ptr() < len(self._whole)

    def export(self, tensor: torch.Tensor) -> tuple[Place, int]:
        handle, offset, nbytes = self._driver.export(tensor.data_ptr())
        return {"kind": "cuda", "device": UUID, "handle": handle.hex(), "nbytes": nbytes}, offset


def main(kind: str, base: str, folder: str) -> None:
    loaded = load_file(f"{base}/model.safetensors")
    twin = TwinMemory(64 << 20) if kind == "twin" else None
    tensors = {name: twin.put(tensor) if twin else tensor.cuda() for name, tensor in loaded.items()}
    assert all((twin or CudaMemory()).has(tensor) for tensor in tensors.values())
    print(Publisher(folder, like=base, gpu=twin).publish(tensors), flush=True)
    for line in sys.stdin:
        tensors[line.strip()][-1] += 1
        if twin is None:
            torch.cuda.synchronize()
        print("written", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
