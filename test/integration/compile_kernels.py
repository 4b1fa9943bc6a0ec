"""Compile every Triton kernel without a GPU, as its launcher would for a Qwen3-0.6B: in bfloat16; attention and
products also in float32.

Prints JSON, a record per variant: name, types, constants, shared memory, stack (where registers spill to), and the
number of instructions of some kinds if `--count` asks for them, which takes as long as compiling. For tests and by
hand. `--arch 90` (H100, H200; the default) or `100` (B200). Without `--all` it compiles less of float32, and only as
many variants as contain every choice (a constant, a type) of a kernel once, which still takes a second of a core each.
For another Triton, set PYTHONPATH to a folder that `pip install --target` filled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from chitu.ops.kernels import (
    attention,
    blocks,
    codes,
    gather,
    greedy,
    mla,
    moe,
    rope,
    router,
    rows,
    sampling,
    small_linear,
    sums,
    widen,
)
from chitu.ops.scaled_weights import Scales

INSTRUCTIONS = ("BAR.SYNC", "LDG.E.128", "STG.E.128", "LDG.E.64", "STG.E.64")
WIDE, INT, INT32, FLOAT, HALF, FP8 = "*fp32", "*i64", "*i32", "fp32", "*bf16", "*fp8e4nv"
HEADS, KV_HEADS, DIM, PAGE, WIDTH, INNER, VOCABULARY = 16, 8, 128, 16, 1024, 3072, 151936
EXPERTS = 128
MORE = tuple({"WINDOW": window, "HAS_SINKS": has_sinks} for window, has_sinks in ((0, False), (0, True), (128, True)))
"""What layers add to causal attention."""
E2M1, INT4 = "*u8", "*i8"
PLAIN = (None, 0, 0, WIDE, "")
KEPT = (
    (FP8, 1, WIDTH, WIDE, ""),
    (FP8, WIDTH // 128, 128, WIDE, ""),
    (E2M1, WIDTH // 16, 16, "*fp16", "over"),
    (INT4, WIDTH // 128, 128, WIDE, "added"),
    (E2M1, WIDTH // 32, 32, WIDE, ""),
)
"""Of weights that stay small: type of the codes, runs of a row, inputs of a run, type of the scales, and what there is
beside them."""
VARIANTS = ((WIDE, WIDE), (HALF, HALF), (HALF, FP8), ("*fp16", FP8))
"""Types of queries and pages."""


@dataclass(frozen=True)
class Variant:
    kernel: Any
    types: dict[str, str]
    constants: dict[str, object]
    options: dict[str, int]

    @property
    def choices(self) -> set[tuple[object, ...]]:
        """Return the types and constants that may make its code differ from that of other variants of the kernel."""
        types = {name: kind for name, kind in self.types.items() if name in self.kernel.arg_names}
        return {(self.kernel.__name__, name, value) for name, value in (types | self.constants).items()}


def variant(kernel: Any, types: dict[str, str], constants: dict[str, object], **options: int) -> Variant:
    return Variant(kernel, types, dict(constants), options)


def covering(variants: list[Variant]) -> list[Variant]:
    """Return a small set that contains every choice of every kernel once. Starts at the end, where the large variants
    are."""
    kept: list[Variant] = []
    seen: set[tuple[object, ...]] = set()
    for candidate in reversed(variants):
        if not candidate.choices <= seen:
            seen |= candidate.choices
            kept.append(candidate)
    return kept


def compiled(job: Variant, arch: int, is_counted: bool) -> dict[str, object]:
    names = job.kernel.arg_names
    signature = {name: "constexpr" if name in job.constants else job.types.get(name, "i32") for name in names}
    constexprs = {(names.index(name),): value for name, value in job.constants.items()}
    # What a launch would find out by itself: tensor addresses and strides are multiples of 16.
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") or n.endswith("_stride")]
    source = ASTSource(job.kernel, signature, constexprs, {(i,): [["tt.divisibility", 16]] for i in aligned})
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=job.options)
    said = dumped(result.asm["cubin"], "-res-usage", *(["-sass"] if is_counted else []))
    return {
        "name": job.kernel.__name__,
        "types": {name: kind for name, kind in job.types.items() if name in names},
        "constants": job.constants,
        "shared_bytes": result.metadata.shared,
        "stack_bytes": max(int(count) for count in re.findall(r"STACK:(\d+)", said)),
        "instructions": {name: said.count(f" {name}") for name in INSTRUCTIONS} if is_counted else None,
    }


def compiled_by_index(index: int, arch: int, counted: str | None) -> dict[str, object]:
    """Compile one entry of the list in a forked process, which inherits the list: kernels cannot be pickled."""
    return compiled(JOBS[index], arch, counted is not None and counted in JOBS[index].kernel.__name__)


JOBS: list[Variant] = []


def dumped(cubin: bytes, *what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, *what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def variants(has_float32: bool, arch: int) -> list[Variant]:
    """Return all variants. Without float32, prefill attention still has it: its stack is the largest if its tiles are
    too large."""
    found = []
    kinds = (WIDE, HALF) if has_float32 else (HALF,)
    tensors = {"q_ptr": HALF, "k_ptr": HALF, "v_ptr": HALF, "out_ptr": HALF, "table_ptr": INT, "slots_ptr": INT}
    tensors |= {"positions_ptr": INT, "partial_ptr": WIDE, "lse_ptr": WIDE, "scale": FLOAT, "tiles_ptr": INT}
    tensors |= {"sinks_ptr": WIDE, "q_norm_ptr": HALF, "k_norm_ptr": HALF, "cos_ptr": WIDE, "sin_ptr": WIDE}
    tensors |= {"eps": FLOAT, "arrived_ptr": INT32}
    shape = {"DIM": DIM, "DIM_PAD": DIM, "PAGE": PAGE, "GROUP": HEADS // KV_HEADS}
    for queries, pages in VARIANTS:
        tile_rows, keys = attention.prefill_tile(queries == WIDE)
        tiles = {"HEADS": HEADS, "ROWS": tile_rows, "KEYS": keys}
        here = tensors | {"q_ptr": queries, "out_ptr": queries, "k_ptr": pages, "v_ptr": pages}
        stages = attention.prefill_stages(pages == FP8)
        for more in MORE[::-1] if queries == HALF else MORE[:1]:
            own = shape | {"IS_FP8": pages == FP8} | more
            found.append(variant(attention._prefill_tiles, here, own | tiles, num_warps=4, num_stages=stages))
        if queries == WIDE and not has_float32:
            continue
        for is_split, own_rows in itertools.product((False, True), (0, attention.OWN_ROWS)):
            split = {"KV_HEADS": KV_HEADS, "GROUP_PAD": 16, "BLOCK": attention.DECODE_BLOCK, "IS_SPLIT": is_split}
            split |= {"SPLITS_PAD": attention.MAX_SPLITS, "OWN_ROWS": own_rows, "HAS_NORM": own_rows > 0}
            for more in MORE[::-1] if queries == HALF else MORE[:1]:
                found.append(variant(attention._decode_split, here, own | split | more, num_warps=4, num_stages=3))
        constants = {"HEADS": KV_HEADS, "VALUES": PAGE * DIM, "BLOCK": gather.VALUES_AT_ONCE, "DIM": DIM}
        here = here | {"pages_ptr": INT}
        found.append(variant(gather._gather_pages, here, constants | {"IS_FP8": pages == FP8}, num_warps=4))
    join = {"DIM": 512, "DIM_PAD": 512, "SPLITS_PAD": attention.MAX_SPLITS}
    found.append(variant(mla._join_splits, tensors, join, num_warps=8))
    append = tensors | {"qkv_ptr": HALF}
    for has_norm in (False, True):
        heads = {"HEADS": HEADS, "KV_HEADS": KV_HEADS, "DIM": DIM, "HALF_PAD": DIM // 2, "PAGE": PAGE}
        constants = heads | {"AT_ONCE": rope.HEADS_AT_ONCE, "HAS_NORM": has_norm}
        for pages in (HALF, FP8):
            here = append | {"k_ptr": pages, "v_ptr": pages}
            found.append(variant(rope._rope_append, here, constants | {"IS_FP8": pages == FP8}, num_warps=4))
    row = {"x_ptr": HALF, "weight_ptr": HALF, "out_ptr": HALF, "bias_ptr": HALF, "norm_ptr": HALF, "eps": FLOAT}
    found.append(variant(rows._rms_norm, row, {"WIDTH": WIDTH, "WIDTH_PAD": WIDTH}, num_warps=4))
    found.append(variant(rows._silu_mul, row, {"BLOCK": rows.SILU_BLOCK}, num_warps=4))
    products = ((WIDTH, False, False), (4 * WIDTH, True, False), (INNER, True, True), (VOCABULARY, True, False))
    weights = {WIDE: (PLAIN, *KEPT[2:]), HALF: (PLAIN, *KEPT)}
    for count, product, kind in itertools.product((1, 16, 32, small_linear.MAX_ROWS), products, kinds):
        num_out, has_norm, is_gated = product
        here = row | dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr", "bias_ptr", "norm_ptr"), kind)
        if num_out == VOCABULARY:
            here["out_ptr"] = WIDE
        which = {"has_norm": has_norm, "is_gated": is_gated, "is_hopper": arch == 90}
        tiles_of = small_linear.tiles_for(count, num_out, kind == WIDE, **which)
        fused = {"HAS_NORM": has_norm, "HAS_BIAS": False, "IS_GATED": is_gated, "IS_ADDED": not has_norm}
        for kept in weights[kind]:
            tiles = tiles_of
            if kept is not PLAIN:
                which = small_linear.HOPPER_BYTES, is_gated, kept[0] in (E2M1, INT4)
                tiles = small_linear.scaled_tiles(tiles_of, Scales(torch.empty(1, kept[1]), kept[2]), *which)
            sizes = {"WIDTH": WIDTH, "ROWS": tiles.rows, "OUT": tiles.out, "IN": tiles.width}
            types, constants = of_weight(kept, kind, tiles.width)
            own, constants = here | types, sizes | fused | constants
            options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
            found.append(variant(small_linear._small_linear, own, constants, **options))
    for kept in KEPT:
        types, constants = of_weight(kept, HALF, widen.NUMBERS_AT_ONCE)
        constants |= {"WIDTH": WIDTH, "BLOCK": widen.NUMBERS_AT_ONCE, "IS_SCALED": not constants.pop("ON_SUMS")}
        found.append(variant(widen._widen, {"out_ptr": HALF} | types, constants, num_warps=4))
    latent = tensors | {"kv_ptr": HALF, "norm_ptr": HALF, "pages_ptr": HALF, "cos_ptr": WIDE, "sin_ptr": WIDE}
    latent |= {"absorbed_ptr": HALF, "eps": FLOAT}
    sizes = {"LATENT": 512, "LATENT_PAD": 512, "HALF": 32, "HALF_PAD": 32}
    for pages in (HALF, FP8):
        constants = sizes | {"PAGE": PAGE, "IS_FP8": pages == FP8}
        found.append(variant(mla._latent_append, latent | {"pages_ptr": pages}, constants, num_warps=4))
    found.append(variant(mla._latent_query, latent, sizes | {"HEADS": 128, "NOPE": 128}, num_warps=1))
    sizes = {"LATENT": 512, "LATENT_PAD": 512, "ROPE": 64, "ROPE_PAD": 64, "PAGE": PAGE}
    for heads_here, pages in (*((16, kind) for kind in kinds), (128, HALF), (16, FP8), (128, FP8)):
        here = latent | {"pages_ptr": pages}
        if pages == WIDE:
            here |= {"q_ptr": WIDE, "out_ptr": WIDE}
        for is_prefill, is_split in ((False, False), (False, True), (True, False)):
            narrow = pages == WIDE
            queries = mla.MAX_QUERIES if is_prefill and not narrow else mla.queries_for(heads_here, narrow)
            constants = sizes | {"HEADS": heads_here, "QUERIES": queries, "IS_PREFILL": is_prefill}
            constants |= {"IS_SPLIT": is_split, "IS_FP8": pages == FP8}
            constants["KEYS"] = mla.FLOAT32_KEYS if narrow else mla.KEYS
            schedule = mla.schedule(queries, pages == FP8)
            for first in (0, 1) if (heads_here, pages) == (128, HALF) else (0,):  # 1: of a layer that drafts
                found.append(variant(mla._latent_attend, here, constants | {"FIRST": first}, **schedule))
    row |= {"alpha": FLOAT, "limit": FLOAT}
    experts = row | {"experts_ptr": INT, "order_ptr": INT32, "tiles_ptr": INT32, "y_ptr": HALF, "weights_ptr": WIDE}
    for tile_rows in (16, 64, moe.LARGE_TILE):
        sizes = {"EXPERTS": EXPERTS, "EXPERTS_PAD": 2 * EXPERTS, "ROWS": tile_rows, "TILES": 16}
        found.append(variant(moe._sort_pairs, experts, sizes | {"PAIRS": moe.PAIRS_AT_ONCE}, num_warps=4))
        for is_gated in (False, True):
            sizes = {"WIDTH": WIDTH, "ROWS": tile_rows}
            sizes["OUT"] = moe.columns_for(INNER, tile_rows, EXPERTS, 132, is_gated=is_gated)
            for kind in kinds if tile_rows == 16 else (HALF,):
                here = experts | {"x_ptr": kind, "weight_ptr": kind, "out_ptr": kind}
                for kept in weights[kind] if tile_rows < moe.LARGE_TILE else (PLAIN,):
                    scales = Scales(torch.empty(1, kept[1]), kept[2]) if kept is not PLAIN else None
                    width = moe.product_width(tile_rows, scales, kept[0] in (E2M1, INT4), kind == WIDE)
                    types, constants = of_weight(kept, kind, width)
                    own, constants = here | types, constants | sizes | {"IN": width, "IS_GATED": is_gated}
                    constants |= {"HAS_BIAS": False, "IS_CLAMPED": False}
                    warps = moe.product_warps(tile_rows, is_gated, scales)
                    found.append(variant(moe._grouped_product, own, constants, num_warps=warps, num_stages=3))
                    if kind == HALF:
                        constants = constants | {"HAS_BIAS": True, "IS_CLAMPED": is_gated}
                        found.append(variant(moe._grouped_product, own, constants, num_warps=warps, num_stages=3))
    routed = {"x_ptr": HALF, "weight_ptr": WIDE, "logit_bias_ptr": WIDE, "choice_bias_ptr": WIDE, "logits_ptr": WIDE}
    routed |= {"arrived_ptr": INT32, "experts_ptr": INT, "weights_ptr": WIDE, "scale": FLOAT}
    for is_deepseek, count, has_logits in itertools.product((False, True), (1, 64), (False, True)):
        tile_rows, out, width = router.tile_for(count, 2 * EXPERTS, 132)
        constants = {"WIDTH": WIDTH, "EXPERTS": 2 * EXPERTS, "EXPERTS_PAD": 2 * EXPERTS, "TOP_K": 6, "TOP_PAD": 8}
        constants |= {"ROWS": 1 if has_logits else tile_rows, "OUT": out, "IN": width, "HAS_LOGITS": has_logits}
        constants |= {"GROUPS": 8, "TOP_GROUPS": 4} if is_deepseek else {"GROUPS": 1, "TOP_GROUPS": 1}
        constants |= {"GROUPS_PAD": constants["GROUPS"], "VOTES": 2 if is_deepseek else 1, "IS_SIGMOID": is_deepseek}
        constants |= {"IS_NORMALISED": is_deepseek, "HAS_LOGIT_BIAS": not is_deepseek, "HAS_CHOICE_BIAS": is_deepseek}
        found.append(variant(router._route, routed, constants, num_warps=4))
    found.append(variant(moe._weighted_sum, experts, {"BLOCK": 1024}, num_warps=4))
    for word_bytes in (8, 4, 1):
        constants = {"WORD_BYTES": word_bytes, "BLOCK": blocks.WORDS_AT_ONCE}
        found.append(variant(blocks._copy_pieces, {"pieces_ptr": INT}, constants, num_warps=4))
    summed = dict.fromkeys(("regions_ptr", "salts_ptr", "low_ptr", "high_ptr", "pages_ptr", "out_ptr"), INT)
    found.append(variant(sums._page_sums, summed, {"BLOCK": sums.WORDS_AT_ONCE}, num_warps=4))
    tensors = {"logits_ptr": WIDE, "edited_ptr": WIDE, "rows_ptr": INT, "floats_ptr": "*fp64", "ints_ptr": INT}
    tensors |= dict.fromkeys(("peaks_ptr", "sums_ptr", "counts_ptr", "masses_ptr", "list_ptr", "tokens_ptr"), INT)
    tensors |= {"lows_ptr": WIDE, "found_ptr": "*i32"}
    masked = {"work_ptr": WIDE, "rows_ptr": INT, "packed_ptr": INT32}
    found.append(variant(sampling._forbid, masked, {"CHUNK": sampling.CHUNK}, num_warps=8))
    tensors |= dict.fromkeys(("token_ids_ptr", "checksums_ptr", "headers_ptr"), INT)
    for has_edited, is_aux in ((False, False), (True, False), (False, True)):
        chunks, peaks = -(-VOCABULARY // sampling.CHUNK), -(-(VOCABULARY + is_aux) // sampling.CHUNK)
        sizes = {"CHUNKS": chunks, "CHUNK": sampling.CHUNK, "HAS_EDITED": has_edited}
        options = {"num_warps": 8, "enable_fp_fusion": False}
        found.append(variant(sampling._peaks, tensors, sizes, **options))
        sizes |= {"CHUNKS_PAD": triton.next_power_of_2(chunks), "PEAKS": peaks, "IS_AUX": is_aux}
        sizes |= {"PEAKS_PAD": triton.next_power_of_2(peaks)}
        found.append(variant(sampling._measure, tensors, sizes, **options))
        sizes |= {"CAPACITY": sampling.CAPACITY}
        found.append(variant(sampling._gather, tensors, sizes, **options))
        found.append(variant(sampling._finish, tensors, sizes | {"HEADER_NUMBERS": 8 * is_aux}, **options))
    greedily = {"words_ptr": INT32} | dict.fromkeys(
        ("index_ptr", "weights_ptr", "peaks_ptr", "sums_ptr", "numbers_ptr", "headers_ptr", "rows_ptr"), INT
    )
    greedily |= {"token_ids_ptr": INT, "tokens_ptr": INT, "collected_ptr": INT32}
    for is_aux in (False, True):
        chunks = -(-(VOCABULARY + is_aux) // greedy.CHUNK)
        sizes = {"CHUNKS": chunks, "IS_AUX": is_aux}
        found.append(variant(greedy._scan, greedily, sizes | {"CHUNK": greedy.CHUNK}, num_warps=8))
        padded = {"CHUNKS_PAD": triton.next_power_of_2(chunks), "HEADER_NUMBERS": 8}
        found.append(variant(greedy._append, greedily, sizes | padded, num_warps=4))
    return found


def of_weight(kept: tuple[Any, ...], kind: str, width: int) -> tuple[dict[str, str], dict[str, object]]:
    """Return the types and constants of a weight that is read in blocks of `width` inputs, by rows of type `kind`."""
    stored, runs, run, scale, beside = kept
    packed = stored in (E2M1, INT4)
    unit = codes.unit_of(Scales(torch.empty(1, runs), run), width) if packed else width
    types = {"weight_ptr": stored or kind, "scales_ptr": scale, "added_ptr": scale, "over_ptr": WIDE}
    constants = {"RUNS": runs, "RUN": run or WIDTH, "UNIT": unit, "HAS_ADDED": beside == "added"}
    constants["HAS_OVER"] = beside == "over"
    return types, constants | {"ON_SUMS": 0 if packed else runs}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--only", nargs="+", default=[""], help="kernels whose names have one of these in them")
    parser.add_argument("--count", metavar="KERNEL", help="count instructions where the name has this in it")
    options = parser.parse_args()
    found = variants(True, options.arch) if options.all else covering(variants(False, options.arch))
    JOBS.extend(job for job in found if any(part in job.kernel.__name__ for part in options.only))
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        given = itertools.repeat(options.arch), itertools.repeat(options.count)
        print(json.dumps(list(pool.map(compiled_by_index, range(len(JOBS)), *given))))


if __name__ == "__main__":
    main()
