"""Time and peak memory of loading a checkpoint, as it is published in 16 bits and in block FP8.

    python -m benchmark.loading [--gib 4] [--forms bf16 fp8] [--dtype bfloat16] [--model MODEL]

Writes random Qwen3 checkpoints of the same layers, without transformers, and loads each in a process of its own with
the operations that keep weights as they are; or loads the model that is given. `--gib`: of the model in 16 bits. The
peak is that of the process over its memory before, less the model: what loading needs besides its result. Exits with
code 1 if that is more than one staging buffer, one piece that is dequantised and 64 MiB of the allocator.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from chitu.models.checkpoint import count_weights
from chitu.models.config import read_model_spec, weight_files
from chitu.tools.bench.model_argument import MODEL_HELP, model_folder

HIDDEN, INNER, VOCABULARY, BLOCK = 4096, 12288, 32768, 128
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * 1024 + 3 * HIDDEN * INNER
"""Numbers of a layer: 32 heads, 8 KV heads of 128."""
MIB = 1 << 20
LOAD = """
import sys, time, torch
from chitu.engine.build import load_model
from chitu.ops.torch_ops import TorchOps

def memory(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

torch.set_num_threads(1)  # on a machine with other work more of them would wait for each other at full speed
torch.zeros(1).float()
with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")  # the peak starts anew
before, began, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
model = load_model(sys.argv[1], sys.argv[2], max_model_len=1024, ops=TorchOps())
print(memory("VmHWM") - before, memory("VmRSS") - before, time.perf_counter() - began, time.process_time() - cpu)
"""


def tensors(num_layers: int, is_fp8: bool) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, dtype and shape."""
    yield "model.embed_tokens.weight", "BF16", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", "BF16", (HIDDEN,)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        for name, width in (("self_attn.q_norm", 128), ("self_attn.k_norm", 128)):
            yield f"{prefix}.{name}.weight", "BF16", (width,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", "BF16", (HIDDEN,)
        for name, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", 1024, HIDDEN),
            ("self_attn.v_proj", 1024, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            yield f"{prefix}.{name}.weight", "F8_E4M3" if is_fp8 else "BF16", (rows, columns)
            if is_fp8:
                yield f"{prefix}.{name}.weight_scale_inv", "F32", (rows // BLOCK, columns // BLOCK)


def write(folder: Path, num_layers: int, is_fp8: bool) -> int:
    """Write the checkpoint and return the bytes of its file."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": num_layers, "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 8, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 0,
    }  # fmt: skip
    if is_fp8:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    end = 0
    for name, dtype, shape in tensors(num_layers, is_fp8):
        begin, end = end, end + int(np.prod(shape)) * {"BF16": 2, "F8_E4M3": 1, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    small = np.random.default_rng(0).integers(0, 0x38, 16 * MIB, np.uint8).tobytes()  # finite in every dtype
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        left = end
        while left:
            left -= file.write(small[: min(left, len(small))])
    return end


def load(folder: Path, dtype: str) -> bool:
    """Load a checkpoint and print what it took. Return whether it took no more memory than is right."""
    stored = sum(file.stat().st_size for file in weight_files(folder))
    command = [sys.executable, "-c", LOAD, str(folder), dtype]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    peak, after, seconds, cpu = map(float, found.stdout.split())
    result = count_weights(folder, read_model_spec(folder).quantization) * (4 if dtype == "float32" else 2)
    beside = peak - result
    print(
        f"  loaded in {seconds:.1f} s ({cpu:.1f} s of CPU, {stored / seconds / 2**30:.2f} GiB/s of the file); the "
        f"model has {result / 2**30:.2f} GiB, the process then {after / 2**30:.2f}, its peak is "
        f"{peak / 2**30:.2f}: {beside / MIB:.0f} MiB besides"
    )
    return beside < 96 * MIB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--forms", nargs="+", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", type=model_folder, help=f"{MODEL_HELP}, in place of random ones")
    options = parser.parse_args()
    if options.model:
        return 0 if load(options.model, options.dtype) else 1
    num_layers = max(1, round((options.gib * 2**29 - VOCABULARY * HIDDEN) / LAYER))
    is_right = True
    for form in options.forms:
        with tempfile.TemporaryDirectory() as name:
            began = time.perf_counter()
            stored = write(Path(name), num_layers, form == "fp8")
            print(f"{form}: {stored / 2**30:.2f} GiB of weights, written in {time.perf_counter() - began:.0f} s")
            is_right &= load(Path(name), options.dtype)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
