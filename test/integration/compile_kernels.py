"""Compiles every Triton kernel for an H100 (sm_90), without a GPU, as its launcher would for a bf16 Qwen3-0.6B.

Prints JSON, a record a variant: name, constants, shared memory, and stack, which is where registers spill to. For
tests and by hand. Without `--all` only as many variants as hold every choice (a constant, a type) of a kernel once,
which still is a second of a core each.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from chitu.ops.interface import TILE_ROWS
from chitu.ops.kernels import attention, blocks, gather, mla, moe, rope, rows, sampling, small_linear

TARGET = GPUTarget("cuda", 90, 32)
WIDE, INT, INT32, FLOAT, HALF, FP8 = "*fp32", "*i64", "*i32", "fp32", "*bf16", "*fp8e4nv"
HEADS, KV_HEADS, DIM, PAGE, WIDTH, INNER, VOCABULARY = 16, 8, 128, 16, 1024, 3072, 151936
EXPERTS = 128
VARIANTS = ((HALF, HALF), (HALF, FP8), ("*fp16", FP8))
"""Of queries and pages."""


@dataclass(frozen=True)
class Variant:
    kernel: Any
    types: dict[str, str]
    constants: dict[str, object]
    options: dict[str, int]

    @property
    def choices(self) -> set[tuple[object, ...]]:
        """What may make its code another than that of other variants of the kernel."""
        types = {name: kind for name, kind in self.types.items() if name in self.kernel.arg_names}
        return {(self.kernel.__name__, name, value) for name, value in (types | self.constants).items()}


def variant(kernel: Any, types: dict[str, str], constants: dict[str, object], **options: int) -> Variant:
    return Variant(kernel, types, dict(constants), options)


def covering(variants: list[Variant]) -> list[Variant]:
    """As few as hold every choice of every kernel once. From the end, where the large ones stand."""
    kept: list[Variant] = []
    seen: set[tuple[object, ...]] = set()
    for candidate in reversed(variants):
        if not candidate.choices <= seen:
            seen |= candidate.choices
            kept.append(candidate)
    return kept


def compiled(job: Variant) -> dict[str, object]:
    names = job.kernel.arg_names
    signature = {name: "constexpr" if name in job.constants else job.types.get(name, "i32") for name in names}
    constexprs = {(names.index(name),): value for name, value in job.constants.items()}
    # What a launch would find out by itself: tensors begin at, and strides are, multiples of 16.
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") or n.endswith("_stride")]
    source = ASTSource(job.kernel, signature, constexprs, {(i,): [["tt.divisibility", 16]] for i in aligned})
    result = triton.compile(source, target=TARGET, options=job.options)
    return {
        "name": job.kernel.__name__,
        "constants": job.constants,
        "shared_bytes": result.metadata.shared,
        "stack_bytes": stack_bytes(result.asm["cubin"]),
    }


def compiled_by_index(index: int) -> dict[str, object]:
    """In a forked process, which has the list: kernels cannot be sent."""
    return compiled(JOBS[index])


JOBS: list[Variant] = []


def stack_bytes(cubin: bytes) -> int:
    """Stack of a thread: none where nothing was spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(count) for count in re.findall(r"STACK:(\d+)", said))


def variants() -> list[Variant]:
    found = []
    tensors = {"q_ptr": HALF, "k_ptr": HALF, "v_ptr": HALF, "out_ptr": HALF, "table_ptr": INT, "slots_ptr": INT}
    tensors |= {"positions_ptr": INT, "partial_ptr": WIDE, "lse_ptr": WIDE, "scale": FLOAT, "tiles_ptr": INT}
    shape = {"DIM": DIM, "DIM_PAD": DIM, "PAGE": PAGE, "GROUP": HEADS // KV_HEADS}
    tiles = {"HEADS": HEADS, "ROWS": TILE_ROWS, "KEYS": attention.PREFILL_KEYS}
    for queries, pages in VARIANTS:
        here = tensors | {"q_ptr": queries, "out_ptr": queries, "k_ptr": pages, "v_ptr": pages}
        own = shape | {"IS_FP8": pages == FP8}
        for is_split in (False, True):
            split = {"KV_HEADS": KV_HEADS, "GROUP_PAD": 16, "BLOCK": attention.DECODE_BLOCK, "IS_SPLIT": is_split}
            found.append(variant(attention._decode_split, here, own | split, num_warps=4, num_stages=3))
        found.append(variant(attention._prefill_tiles, here, own | tiles, num_warps=4, num_stages=3))
        constants = {"HEADS": KV_HEADS, "VALUES": PAGE * DIM, "BLOCK": gather.VALUES_AT_ONCE, "DIM": DIM}
        here = here | {"pages_ptr": INT}
        found.append(variant(gather._gather_pages, here, constants | {"IS_FP8": pages == FP8}, num_warps=4))
    join = {"DIM": DIM, "DIM_PAD": DIM, "SPLITS_PAD": 32}
    found.append(variant(attention._join_splits, tensors, join, num_warps=4))
    append = tensors | {"qkv_ptr": HALF, "q_norm_ptr": HALF, "k_norm_ptr": HALF}
    append |= {"cos_ptr": WIDE, "sin_ptr": WIDE, "eps": FLOAT}
    for has_norm in (False, True):
        heads = {"HEADS": HEADS, "KV_HEADS": KV_HEADS, "DIM": DIM, "HALF_PAD": DIM // 2, "PAGE": PAGE}
        constants = heads | {"AT_ONCE": rope.HEADS_AT_ONCE, "HAS_NORM": has_norm}
        for pages in (HALF, FP8):
            here = append | {"k_ptr": pages, "v_ptr": pages}
            found.append(variant(rope._rope_append, here, constants | {"IS_FP8": pages == FP8}, num_warps=4))
    row = {"x_ptr": HALF, "weight_ptr": HALF, "out_ptr": HALF, "bias_ptr": HALF, "norm_ptr": HALF, "eps": FLOAT}
    found.append(variant(rows._rms_norm, row, {"WIDTH": WIDTH, "WIDTH_PAD": WIDTH}, num_warps=4))
    found.append(variant(rows._silu_mul, row, {"BLOCK": rows.SILU_BLOCK}, num_warps=4))
    for count in (1, 16, small_linear.MAX_ROWS):
        for is_gated in (False, True):
            tiles_of = small_linear.tiles_for(count, INNER)
            constants = {"WIDTH": WIDTH, "ROWS": tiles_of.rows, "OUT": tiles_of.out, "IN": tiles_of.width}
            constants |= {"HAS_NORM": is_gated, "HAS_BIAS": False, "IS_GATED": is_gated, "IS_ADDED": not is_gated}
            found.append(variant(small_linear._small_linear, row, constants, num_warps=tiles_of.warps))
    latent = tensors | {"kv_ptr": HALF, "norm_ptr": HALF, "pages_ptr": HALF, "cos_ptr": WIDE, "sin_ptr": WIDE}
    latent |= {"absorbed_ptr": HALF, "eps": FLOAT}
    sizes = {"LATENT": 512, "LATENT_PAD": 512, "HALF": 32, "HALF_PAD": 32}
    for pages in (HALF, FP8):
        constants = sizes | {"PAGE": PAGE, "IS_FP8": pages == FP8}
        found.append(variant(mla._latent_append, latent | {"pages_ptr": pages}, constants, num_warps=4))
    found.append(variant(mla._latent_query, latent, sizes | {"HEADS": 128, "NOPE": 128}, num_warps=1))
    sizes = {"LATENT": 512, "LATENT_PAD": 512, "ROPE": 64, "ROPE_PAD": 64, "PAGE": PAGE, "KEYS": mla.KEYS}
    for heads_here, pages in ((16, HALF), (128, HALF), (16, FP8), (128, FP8)):
        here = latent | {"pages_ptr": pages}
        for is_prefill, is_split in ((False, False), (False, True), (True, False)):
            queries = mla.MAX_QUERIES if is_prefill else mla.queries_for(heads_here)
            constants = sizes | {"HEADS": heads_here, "QUERIES": queries, "IS_PREFILL": is_prefill}
            constants |= {"IS_SPLIT": is_split, "IS_FP8": pages == FP8}
            found.append(variant(mla._latent_attend, here, constants, **mla.schedule(queries, pages == FP8)))
    experts = row | {"experts_ptr": INT, "order_ptr": INT32, "tiles_ptr": INT32, "y_ptr": HALF, "weights_ptr": WIDE}
    for tile_rows in (16, 64):
        sizes = {"EXPERTS": EXPERTS, "EXPERTS_PAD": 2 * EXPERTS, "ROWS": tile_rows, "TILES": 16}
        found.append(variant(moe._sort_pairs, experts, sizes | {"PAIRS": moe.PAIRS_AT_ONCE}, num_warps=4))
        for is_gated in (False, True):
            sizes = {"WIDTH": WIDTH, "ROWS": tile_rows, "OUT": moe.COLUMNS, "IN": 128 if tile_rows == 16 else 64}
            found.append(
                variant(moe._grouped_product, experts, sizes | {"IS_GATED": is_gated}, num_warps=4, num_stages=3)
            )
    found.append(variant(moe._weighted_sum, experts, {"BLOCK": 1024}, num_warps=4))
    for word_bytes in (8, 4, 1):
        constants = {"WORD_BYTES": word_bytes, "BLOCK": blocks.WORDS_AT_ONCE}
        found.append(variant(blocks._copy_pieces, {"pieces_ptr": INT}, constants, num_warps=4))
    tensors = {"logits_ptr": WIDE, "edited_ptr": WIDE, "rows_ptr": INT, "floats_ptr": "*fp64", "ints_ptr": INT}
    tensors |= dict.fromkeys(("peaks_ptr", "sums_ptr", "counts_ptr", "masses_ptr", "list_ptr", "tokens_ptr"), INT)
    tensors |= {"lows_ptr": WIDE, "found_ptr": "*i32"}
    for has_edited in (False, True):
        chunks = -(-VOCABULARY // sampling.CHUNK)
        sizes = {"CHUNKS": chunks, "CHUNK": sampling.CHUNK, "HAS_EDITED": has_edited}
        options = {"num_warps": 8, "enable_fp_fusion": False}
        found.append(variant(sampling._peaks, tensors, sizes, **options))
        sizes |= {"CHUNKS_PAD": triton.next_power_of_2(chunks)}
        found.append(variant(sampling._measure, tensors, sizes, **options))
        sizes |= {"CAPACITY": sampling.CAPACITY}
        found.append(variant(sampling._gather, tensors, sizes, **options))
        found.append(variant(sampling._finish, tensors, sizes, **options))
    return found


def main() -> None:
    JOBS.extend(variants() if "--all" in sys.argv else covering(variants()))
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        print(json.dumps(list(pool.map(compiled_by_index, range(len(JOBS))))))


if __name__ == "__main__":
    main()
