"""CPU time of a product with weights that are kept small, beside the same product in float32.

    python -m benchmark.kept_weights [--rows 1 8 64] [--seconds 0.3]

One thread. The forms of one shape and count of rows take turns, call by call, with so many weights that none is in the
cache, and the median of each counts: other work on the machine slows all of them. Exits with code 1 if a form is slower
than float32 at one row, or a sixth slower with more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from chitu.models.gguf import BLOCKS
from chitu.models.small_blocks import kept_of_ggml
from chitu.ops.kept import KeptBlocks, Matrix
from chitu.ops.native import NativeOps, PackedWeight, load_library, pack

SHAPES = ((1536, 576), (4096, 4096))
COLD_BYTES = 96 << 20
"""Of all weights of a form together."""
GGML = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")


def weight(form: str, out: int, inner: int) -> Matrix:
    """Return a random weight."""
    if form in GGML:
        nbytes, size = BLOCKS[form][1], BLOCKS[form][0]
        blocks = torch.randint(1, 60, (out, -(-inner // size) * nbytes), dtype=torch.uint8)  # scales are finite
        kept = kept_of_ggml(form, blocks)
        return kept.part(0, inner)
    if form == "e4m3":
        codes = torch.randint(0, 0x7F, (out, inner), dtype=torch.uint8)
        return KeptBlocks("e4m3", codes, torch.rand(out, -(-inner // 128)), 128)
    numbers = torch.randn(out, inner)
    return numbers.to(getattr(torch, form)).float()


def copies(form: str, out: int, inner: int) -> list[PackedWeight]:
    """Return packed weights that are not in the cache together."""
    one = pack(weight(form, out, inner), None, small=form != "float32")
    return [one, *(pack(weight(form, out, inner), None, small=form != "float32") for _ in range(few(one)))]


def few(one: PackedWeight) -> int:
    return max(1, COLD_BYTES // one.num_bytes)


def medians(ops: NativeOps, weights: dict[str, list[PackedWeight]], rows: int, seconds: float) -> dict[str, float]:
    """Return the microseconds of a product by form."""
    x = torch.randn(rows, next(iter(weights.values()))[0].in_features)
    found: dict[str, list[float]] = {form: [] for form in weights}
    end, turn = time.process_time() + seconds * len(weights), 0
    while time.process_time() < end or turn < 7:
        for form, each in weights.items():
            one = each[turn % len(each)]
            began = time.process_time()
            ops.linear(x, one)
            found[form].append((time.process_time() - began) * 1e6)
        turn += 1
    return {form: statistics.median(times) for form, times in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=0.3)
    options = parser.parse_args()
    library = load_library()
    if library is None or not NativeOps(library).keeps_small:
        print("no C compiler here, or a CPU whose kernels keep nothing small")
        return 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ops, forms, is_right = NativeOps(library), ("float32", "bfloat16", "float16", "e4m3", *GGML), True
    for out, inner in SHAPES:
        weights = {form: copies(form, out, inner) for form in forms}
        sizes = {form: each[0].num_bytes / (out * inner) for form, each in weights.items()}
        print(f"{out} x {inner}: bytes a weight " + ", ".join(f"{form} {size:.2f}" for form, size in sizes.items()))
        for rows in options.rows:
            took = medians(ops, weights, rows, options.seconds)
            gains = {form: took["float32"] / each for form, each in took.items()}
            is_right &= all(gain >= (1 if rows == 1 else 0.85) for gain in gains.values())
            print(f"  {rows} rows: " + ", ".join(f"{form} {took[form]:.0f} us ({gains[form]:.1f}x)" for form in forms))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
