"""Process entry of instances with the real engine, which forget something when they sleep or wake: what the file
`forgets` in the model's folder names. `python -m forgetful_scheduler`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.schema import Topology
from chitu.config.topology import Instance
from chitu.models.tensors import tensors_of
from chitu.net.threads import end_process
from chitu.process.progress import ProgressWriter
from chitu.serve.factories import Factories, build_real_rank
from chitu.serve.scheduler import main

A_TENSOR, THE_CACHE = "a tensor", "the cache"


def build_rank(topology: Topology, instance: Instance, tp_rank: int, progress: ProgressWriter) -> Any:
    rank: Any = build_real_rank(topology, instance, tp_rank, progress)
    file, change, flush = Path(topology.model.path) / "forgets", rank.runner.change_model, PagedKVCacheManager.flush

    def forgets(what: str) -> bool:
        return file.exists() and file.read_text() == what

    def change_model(model: Any) -> None:
        if forgets(A_TENSOR):
            next(tensor for name, tensor in tensors_of(model) if "layers[1].attention.qkv" in name).zero_()
        change(model)

    def flush_unless(cache: PagedKVCacheManager) -> None:
        if not forgets(THE_CACHE):
            flush(cache)

    rank.runner.change_model = change_model
    PagedKVCacheManager.flush = flush_unless  # type: ignore[method-assign]
    return rank


if __name__ == "__main__":
    end_process(main(factories=Factories(build_rank)))
