"""Weights go from the file to their place without a second copy of the model in host memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from chitu.engine.build import RankEngine
from chitu.errors import ConfigError, Internal
from chitu.models.checkpoint import count_weights
from chitu.models.config import read_model_spec, weight_files, weights_digest, weights_stamp
from chitu.models.weights import STAGING_BYTES, TensorFiles
from chitu.tools.make_model import make_model

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
MIB = 1 << 20
LOAD = """
import sys
import torch
from chitu.engine.build import load_model
from chitu.ops.torch_ops import TorchOps

torch.zeros(1).float()
def memory(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")  # the peak starts anew
before = memory("VmRSS")
model = load_model(sys.argv[1], "float32", ops=TorchOps())
print(memory("VmHWM") - before)
"""


def test_the_peak_is_the_model_and_a_small_buffer(tmp_path):
    """A bfloat16 checkpoint of 74 MiB becomes 148 MiB of float32; neither the file nor a conversion adds to the
    peak."""
    sizes = {"hidden_size": 1024, "layers": 2, "vocab_size": 16384, "intermediate_size": 2048}
    folder = make_model(tmp_path / "m", "qwen3", tie=True, dtype="bfloat16", **sizes)
    weights = 2 * (folder / "model.safetensors").stat().st_size
    assert weights > 100 * MIB
    found = subprocess.run([sys.executable, "-c", LOAD, folder], capture_output=True, text=True, check=True)
    assert int(found.stdout) < weights + STAGING_BYTES + 24 * MIB


def test_dequantising_needs_only_pieces_beside_the_model(tmp_path):
    """Of 44 MiB in 8 bits come 174 MiB of float32."""
    sizes = {"hidden_size": 1024, "layers": 4, "vocab_size": 2048, "intermediate_size": 3072}
    folder = make_model(tmp_path / "m", "qwen3", tie=True, dtype="bfloat16", **sizes)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(-(-rows // 128), -(-columns // 128))
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = 4 * count_weights(folder, read_model_spec(folder).quantization)
    assert weights > 150 * MIB
    found = subprocess.run([sys.executable, "-c", LOAD, folder], capture_output=True, text=True, check=True)
    assert int(found.stdout) < weights + STAGING_BYTES + 48 * MIB


@pytest.fixture
def stored(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "half": torch.randn(13, 10).to(torch.bfloat16),
        "whole": torch.randn(12, 9),
        "cube": torch.randn(5, 4, 3, dtype=torch.float16),
        "vector": torch.arange(11),
        "number": torch.tensor(3.5),
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", tensors


@pytest.mark.parametrize("transfer_bytes", [1, 50, 1 << 20], ids=lambda n: f"{n} bytes")
def test_every_part_of_every_tensor_is_what_the_library_reads(stored, transfer_bytes):
    """Includes pieces smaller than a row."""
    path, tensors = stored
    files = TensorFiles([path], CPU, transfer_bytes)
    for name, tensor in tensors.items():
        for dtype in (tensor.dtype, torch.float32):
            assert torch.equal(files.read(name, dtype), tensor.to(dtype)), name
    for name in ("half", "whole", "cube"):
        for rows in (None, range(0, 2), range(3, 5)):
            for columns in (None, range(1, 3)):
                expected = tensors[name][rows.start : rows.stop] if rows else tensors[name]
                expected = expected[:, columns.start : columns.stop] if columns else expected
                found = files.read(name, torch.float32, rows, columns)
                assert torch.equal(found, expected.float()) and found.is_contiguous(), (name, rows, columns)
    assert torch.equal(files.read("vector", torch.int64, range(4, 7)), torch.arange(4, 7))
    files.close()


def test_of_other_rows_nothing_is_read(stored):
    path, _ = stored
    files = TensorFiles([path], CPU)

    def bytes_read() -> int:
        with open("/proc/self/io", encoding="ascii") as io:
            return int(io.readline().split()[1])

    own = -bytes_read() + bytes_read()  # bytes read by the question itself
    before = bytes_read()
    files.read("whole", torch.float32, range(4, 6))
    assert bytes_read() - before - own == 2 * 9 * 4
    files.close()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_keys_that_outlive_a_process_are_never_made_of_weights_that_came_later(tmp_path, is_replaced):
    folder = make_model(tmp_path / "model", family="llama")
    (file,) = weight_files(folder)
    nothing = (None,) * 4
    engine = RankEngine(
        *nothing, 1, str(folder), weights_stamp(folder), None, None, None, None
    )  # what is loaded follows
    assert engine.weights_digest() == weights_digest(folder)
    data = file.read_bytes()
    if is_replaced:
        (tmp_path / "new").write_bytes(data[:-1] + b"x")
        (tmp_path / "new").replace(file)
    else:
        file.write_bytes(data[:-1] + b"x")
    with pytest.raises(Internal, match="were replaced while they were loaded"):
        engine.weights_digest()


def test_a_file_that_shrinks_or_is_none_is_one_sentence(stored):
    path, _ = stored
    files = TensorFiles([path], CPU)
    path.write_bytes(path.read_bytes()[:-8])  # same inode: this truncates the open file
    with pytest.raises(ConfigError, match="became shorter"):
        for name in files.tensors:
            files.read(name, torch.float32)
    files.close()
    with pytest.raises(ConfigError, match="is cut off"):
        TensorFiles([path], CPU)
