"""Tensors of a checkpoint folder, taken by name, each exactly once, and read straight to their destination.

`WeightSource` reads safetensors files tensor by tensor, in the wanted dtype and to the wanted device, checks shapes and
reports progress in bytes. A model that leaves tensors unread would compute something else than its checkpoint, so
`finish` refuses leftovers by name. On the thread that builds the service.

Quantised weights are dequantised while they are read (`logical_tensors.py` has their names, `dequantize.py` the
arithmetic): whole or in part, in pieces that are small against the staging buffer, each with the scales of its blocks.

Tensors of a trainer's memory are read as those of files are (`byte_sources.py`), and compared with their digests.

Files are read, not mapped: touched pages of a mapping count as memory of this process until it ends, so a checkpoint
that is converted, split or moved to a device would be in memory twice. Here the overhead is one staging buffer, pinned
for a GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from chitu.config.model_files import TENSORS_MANIFEST
from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.byte_sources import ByteSource, Seal, read_sealed
from chitu.models.checkpoint import Entry, TensorEntry, open_bytes, read_entries
from chitu.models.config import weight_files
from chitu.models.dequantize import Quantized, dequantise, integers, kept_of, scales_of
from chitu.models.dtypes import DTYPES
from chitu.models.gguf import BLOCKS
from chitu.models.gguf_blocks import dequantise_blocks
from chitu.models.gguf_names import PLAIN, GgufTensor
from chitu.models.logical_tensors import PackedTensor, logical_tensors
from chitu.models.quantization import Quantization
from chitu.models.small_blocks import kept_of_ggml
from chitu.ops.kept import Form, KeptBlocks, Matrix, Weights, below

Keeps = Callable[[Form, int, int], bool]
"""`Ops.keeps`."""
STAGING_BYTES = 16 << 20
MIN_CUT_RUN = 32
"""Least inputs of a run that a cut makes shorter: scales would need more memory than they save."""
PIECE_NUMBERS = 1 << 18
"""Numbers that are dequantised at a time."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Location, dtype and shape of a tensor in a file, or in memory."""

    path: Path
    source: ByteSource
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: str = ""
    """ggml's type of blocks; the last dimension is then bytes."""
    seal: Seal | None = None


class Pieces(Protocol):
    """Another place for the bytes of the folder's files."""

    def read_into(self, buffer: memoryview, file: str, offset: int, ahead: int) -> int:
        """Fill the beginning of a buffer with bytes of the file of this name; return how many, 0 if it has none. The
        rest is read from the folder. `ahead`: bytes right behind these that are wanted next. Raises nothing."""
        ...

    def on_file_read(self, num_bytes: int, seconds: float) -> None:
        """Note that so many bytes were read from the folder, in this time."""
        ...

    def close(self) -> None: ...


OpenPieces = Callable[[str, str], Pieces]
"""Opens the other place for a folder and its `model_hash`."""


@contextmanager
def opened_pieces(opens: OpenPieces | None, path: str, model_hash: str) -> Iterator[Pieces | None]:
    """Open the other place for the time of a load, if there is one: folders with a manifest have tensors in places of
    their own, which may be anywhere in others of their hash."""
    is_plain = not (Path(path) / TENSORS_MANIFEST).exists()
    pieces = opens(path, model_hash) if opens is not None and is_plain else None
    try:
        yield pieces
    finally:
        if pieces is not None:
            pieces.close()


class TensorFiles:
    """Open files, with their tensors by name. `pieces`: asked for bytes before the files. Raises ConfigError as
    `read_entries` does."""

    def __init__(
        self,
        files: Sequence[Path],
        device: torch.device,
        staging_bytes: int = STAGING_BYTES,
        prefix: str = "",
        pieces: Pieces | None = None,
    ) -> None:
        self._device = device
        self._pieces = pieces
        self._staging_bytes = staging_bytes
        self._opened: dict[object, ByteSource] = {}
        self._staging: torch.Tensor | None = None
        self.tensors: dict[str, Stored] = {}
        for name, entry in read_entries(files, prefix).items():
            self.tensors[name] = _stored(entry, self._open(entry))

    def _open(self, entry: Entry) -> ByteSource:
        place = entry.file, entry.device if isinstance(entry, TensorEntry) else None
        if place not in self._opened:
            try:
                self._opened[place] = open_bytes(entry)
            except ConfigError:
                self.close()
                raise
        return self._opened[place]

    def close(self) -> None:
        while self._opened:
            self._opened.popitem()[1].close()
        self._staging = None

    def read(
        self,
        name: str,
        dtype: torch.dtype,
        rows: range | None = None,
        columns: range | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read the tensor, or these rows and columns of its first two dimensions, contiguous, to the device or `out`.

        Does not read other rows. Rows of which only some columns are wanted are read whole: one piece instead of many.
        """
        return self.read_stored(self.tensors[name], dtype, rows, columns, out)

    def read_stored(
        self,
        stored: Stored,
        dtype: torch.dtype,
        rows: range | None = None,
        columns: range | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read a tensor, or a part of it, by its place in a file: see `read`."""
        shape = stored.shape or (1,)
        rows, width = rows or range(shape[0]), shape[1:]
        if out is None:
            part = (len(columns), *width[1:]) if columns is not None else width
            out = torch.empty((len(rows), *part), dtype=dtype, device=self._device)
        row_bytes = math.prod(width) * stored.dtype.itemsize
        begin = stored.offset + rows.start * row_bytes
        if self._device.type == "cpu" and dtype == stored.dtype and columns is None:
            self._fill(out, stored, begin, 0)
            return out if stored.shape else out[0]
        at_once = max(1, self._staging_bytes // max(1, row_bytes))
        for first in range(0, len(rows), at_once):
            count = min(at_once, len(rows) - first)
            piece = self._stage(count * row_bytes).view(stored.dtype).view(count, *width)
            self._fill(piece, stored, begin + first * row_bytes, (len(rows) - first - count) * row_bytes)
            chosen = piece if columns is None else piece[:, columns.start : columns.stop]
            out[first : first + count].copy_(chosen)  # done when it returns, so the buffer is free again
        return out if stored.shape else out[0]

    def _fill(self, target: torch.Tensor, stored: Stored, offset: int, ahead: int) -> None:
        """Fill a contiguous tensor on the host with bytes from the file's `offset` on. `ahead`: as of `Pieces`."""
        buffer: memoryview = target.view(-1).view(torch.uint8).numpy().data
        if stored.seal is not None:
            read_sealed(stored.source, stored.seal, buffer, offset)
            return
        done = self._pieces.read_into(buffer, stored.path.name, offset, ahead) if self._pieces is not None else 0
        if done < len(buffer):
            begun_s = time.monotonic()
            stored.source.read_into(buffer[done:], offset + done)
            if self._pieces is not None:
                self._pieces.on_file_read(len(buffer) - done, time.monotonic() - begun_s)

    def _stage(self, nbytes: int) -> torch.Tensor:
        if self._staging is None or self._staging.numel() < nbytes:
            pinned = self._device.type == "cuda"
            self._staging = torch.empty(max(nbytes, self._staging_bytes), dtype=torch.uint8, pin_memory=pinned)
        return self._staging[:nbytes]


def _stored(entry: Entry, source: ByteSource) -> Stored:
    if not isinstance(entry, GgufTensor):
        return Stored(entry.file, source, entry.offset, DTYPES[entry.dtype], entry.shape, seal=entry.seal)
    if entry.dtype in PLAIN:
        return Stored(entry.file, source, entry.offset, DTYPES[entry.dtype], entry.shape)
    numbers, num_bytes = BLOCKS[entry.dtype]
    shape = (*entry.shape[:-1], entry.shape[-1] // numbers * num_bytes)
    return Stored(entry.file, source, entry.offset, torch.uint8, shape, entry.dtype)


def _groups(numbers: range, size: int) -> range:
    """Return the groups of `size` numbers that these numbers touch."""
    return range(numbers.start // size, -(-numbers.stop // size))


Progress = Callable[[int, int], None]
"""Callback `progress(bytes_done, bytes_total)`."""


class Rows(NamedTuple):
    """Rows of a tensor of `total` rows; `rows` is None for all of them."""

    name: str
    total: int
    rows: range | None = None


class WeightSource:
    """An open checkpoint, to be used as a context manager. Names and shapes are those of dequantised tensors."""

    def __init__(
        self,
        path: str | Path,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
        quantization: Quantization | None = None,
        piece_numbers: int = PIECE_NUMBERS,
        keeps: Keeps | None = None,
        prefix: str = "",
        pieces: Pieces | None = None,
    ) -> None:
        """Open the files. `keeps`: of the operations, which then get matrices as small as they are stored. `prefix`:
        as of `read_entries`. `pieces`: asked for bytes before the files. Raises ConfigError or UnsupportedModel if
        tensors do not fit `quantization`."""
        self._path, self._dtype, self._device, self._progress = path, dtype, device, progress
        self._done, self._piece_numbers, self._keeps = 0, piece_numbers, keeps
        files = weight_files(path)
        entries = read_entries(files, prefix)
        logical = logical_tensors(entries, quantization, f"model.path: {path}")
        self._packed, self._small, self._shapes = logical.packed, logical.kept, logical.shapes
        self._may_have_idle_biases = quantization is not None and quantization.method == "gptq"
        self._total = sum(entry.num_bytes for entry in entries.values())
        self._files = TensorFiles(files, device, prefix=prefix, pieces=pieces)
        self._left = set(self._shapes)

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    @property
    def names(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that are neither taken nor left out."""
        return {name: self._shapes[name] for name in sorted(self._left)}

    def take(
        self,
        name: str,
        *shape: int,
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return tensor `name`, of exactly this shape, or only those rows (columns) of it. Does not read other rows.

        `dtype`: overrides the model's.

        Raises ConfigError if it is missing, already taken or of another shape.
        """
        return self._read(name, shape, rows, columns, dtype or self._dtype)

    def take_rows(self, parts: Sequence[Rows], *rest: int) -> torch.Tensor:
        """Return the parts' rows stacked along the first dimension. `rest`: the other dimensions."""
        counts = [len(part.rows) if part.rows is not None else part.total for part in parts]
        stacked = torch.empty((sum(counts), *rest), dtype=self._dtype, device=self._device)
        first = 0
        for part, count in zip(parts, counts, strict=True):
            place = stacked[first : first + count]
            self._read(part.name, (part.total, *rest), part.rows, None, self._dtype, place)
            first += count
        return stacked

    def take_matrix(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> Matrix:
        """Return what `take` does, or the same kept small if the operations keep such and the weight is stored so."""
        kept = self._kept(name, shape, rows, columns)
        return kept if kept is not None else self.take(name, *shape, rows=rows, columns=columns)

    def take_matrices(self, parts: Sequence[Rows], inputs: int) -> Matrix:
        """Return what `take_rows` does, or the same kept small as `take_matrix` does if all parts can be."""
        if not all(self._run_kept(part.name, None) for part in parts):
            return self.take_rows(parts, inputs)
        return below([self.take_matrix(part.name, part.total, inputs, rows=part.rows) for part in parts])

    def take_stack(
        self,
        name: str,
        *shape: int,
        matrices: range,
        outputs: range | None = None,
        inputs: range | None = None,
        is_paired: bool = False,
    ) -> Weights:
        """Return these of the matrices of a tensor `[E, inputs, outputs]`, or a part of each, as `[outputs, inputs]`:
        kept small as `take_matrix` does, else one tensor. `is_paired`: outputs of gate and up are in turn; the result
        has those of gate first. At most one matrix is in memory twice."""
        self._check(name, shape)
        packed, outputs, inputs = self._packed.get(name), outputs or range(shape[2]), inputs or range(shape[1])
        order = (slice(0, None, 2), slice(1, None, 2)) if is_paired else (slice(None),)
        if packed is not None and self._run_kept(name, inputs):
            kept = [self._kept_of_stack(packed, index, outputs, inputs, order) for index in matrices]
            self._count(name)
            return kept
        stack_EOI = torch.empty((len(matrices), len(outputs), len(inputs)), dtype=self._dtype, device=self._device)
        columns = inputs if len(inputs) < shape[1] else None
        for place_OI, index in zip(stack_EOI, matrices, strict=True):
            one = range(index, index + 1)
            if packed is None:
                part_IO = self._files.read(name, self._dtype, one, columns)[0]
            else:
                part_IO = self._dequantised(packed, self._dtype, one, columns, None)[0]
            part_OI = part_IO[:, outputs.start : outputs.stop].t()
            first = 0
            for rows in order:
                chosen = part_OI[rows]
                place_OI[first : first + chosen.shape[0]].copy_(chosen)
                first += chosen.shape[0]
        self._count(name)
        return stack_EOI

    def _kept_of_stack(
        self, packed: PackedTensor, index: int, outputs: range, inputs: range, order: Sequence[slice]
    ) -> KeptBlocks:
        """Read a part of one matrix of a stack, whose file has a row an output, as small as it is."""
        if packed.code == "ggml":
            rows, size = outputs, packed.matrix
            if packed.pair:
                rows, size = range(outputs.start // 2, outputs.stop // 2), (size[0] // 2, size[1])
            found = [
                kept_of_ggml(dtype, blocks).part(inputs.start % BLOCKS[dtype][0], len(inputs))
                for blocks, dtype in (
                    self.blocks_of(name, index, size, rows, inputs) for name in (packed.data, packed.pair) if name
                )
            ]
            kept = below(found if packed.pair else [found[0].rows(rows) for rows in order])
        else:
            of_file = replace(packed, shape=(packed.shape[0], *packed.matrix), is_transposed=False)
            whole = kept_of(self._part(of_file, index, outputs, inputs), has_half_scales=False)
            assert whole is not None  # 4-bit floats always can be
            kept = below([whole.rows(rows) for rows in order])
        assert isinstance(kept, KeptBlocks)  # of one form, run and table
        return kept._replace(dtype=self._dtype)

    def _run_kept(self, name: str, columns: range | None) -> int:
        """Return the inputs of a run if these columns of a tensor are kept small; 0 if they are not. Columns that begin
        within a run of e4m3 have shorter runs: the first one begins with them."""
        kept = self._small.get(name)
        if self._keeps is None or kept is None:
            return 0
        first, inputs = (columns.start if columns is not None else 0), self._shapes[name][1]
        if not first or kept.run == inputs:
            return kept.run if self._keeps(kept.form, kept.run, inputs) else 0
        run = math.gcd(first, kept.run)
        if run < kept.run and (kept.form != "e4m3" or run < MIN_CUT_RUN):
            return 0
        return run if self._keeps(kept.form, run, inputs) else 0

    def _kept(self, name: str, shape: tuple[int, ...], rows: range | None, columns: range | None) -> KeptBlocks | None:
        """Read a part of a matrix as small as it is; None, with the tensor still to take, if it cannot be kept so."""
        run = self._run_kept(name, columns)
        if self._shapes.get(name) != shape or name not in self._left or not run:
            return None
        packed, rows, columns = self._packed[name], rows or range(shape[0]), columns or range(shape[1])
        if packed.code == "ggml":
            blocks, dtype = self.blocks_of(packed.data, 0, packed.matrix, rows, columns, packed.head_rows)
            self._count(name)
            own = kept_of_ggml(dtype, blocks).part(columns.start % BLOCKS[dtype][0], len(columns))
            return own._replace(dtype=self._dtype)
        skipped = columns.start % self._small[name].run if run < self._small[name].run else 0
        columns = range(columns.start - skipped, columns.stop)
        part = self._part(packed, 0, *((columns, rows) if packed.is_transposed else (rows, columns)))
        kept = kept_of(part, self._files.tensors[packed.scales].dtype == torch.float16)
        if kept is None:
            return None
        self._count(name)
        if run < self._small[name].run:
            kept = kept.in_runs_of(run).part(skipped, len(columns) - skipped)
        return kept._replace(dtype=self._dtype)

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None,
        columns: range | None,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._check(name, shape)
        packed = self._packed.get(name)
        if packed is None:
            tensor = self._files.read(name, dtype, rows, columns, out)
        else:
            tensor = self._dequantised(packed, dtype, rows, columns, out)
        self._count(name)
        return tensor

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ConfigError unless the tensor is there, not taken, and of this shape."""
        if name not in self._left:
            raise ConfigError(f"model.path: {self._path} has no tensor {name!r}")
        if self._shapes[name] != shape:
            packed = self._packed.get(name)
            stored = self._files.tensors[packed.data if packed is not None else name]
            raise ConfigError(
                f"model.path: {stored.path}: tensor {name!r} has shape {self._shapes[name]}, the config asks for "
                f"{shape}"
            )

    def _count(self, name: str) -> None:
        """Note that a tensor is taken. A rank that reads a part reports the same progress as one that reads all."""
        self._left.discard(name)
        packed = self._packed.get(name)
        for part in packed.parts if packed is not None else (name,):
            stored = self._files.tensors[part]
            self._done += math.prod(stored.shape) * stored.dtype.itemsize
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)

    def _dequantised(
        self,
        packed: PackedTensor,
        dtype: torch.dtype,
        rows: range | None,
        columns: range | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Read as `TensorFiles.read` does. Of a stack of matrices, rows are matrices and columns are rows of each."""
        *lead, num_rows, num_columns = (*packed.shape, 1) if packed.is_list else packed.shape
        cuts = (rows, columns) if not lead else (columns, None)
        row_part, column_part = cuts[0] or range(num_rows), cuts[1] or range(num_columns)
        matrices = range(math.prod(lead))
        if lead and rows is not None:
            inner = math.prod(lead[1:])
            matrices, lead = range(rows.start * inner, rows.stop * inner), [len(rows), *lead[1:]]
        if out is None:
            shape = (*lead, len(row_part), len(column_part))
            out = torch.empty(shape[:-1] if packed.is_list else shape, dtype=dtype, device=self._device)
        stack = out.view(len(matrices), len(row_part), len(column_part))
        for place, index in zip(stack, matrices, strict=True):
            self._fill_matrix(place, packed, index, row_part, column_part)
        return out

    def _fill_matrix(self, out: torch.Tensor, packed: PackedTensor, index: int, rows: range, columns: range) -> None:
        """Dequantise a part of matrix `index` into `out`, piece by piece along the rows of the file."""
        if packed.is_transposed:
            out, rows, columns = out.t(), columns, rows
        step = max(1, self._piece_numbers // len(columns))
        unit = max(packed.block[0], len(packed.lanes)) if packed.block[0] < packed.matrix[0] else len(packed.lanes)
        unit = max(unit, packed.head_rows)
        if unit:
            step = max(unit, step // unit * unit)
        first = rows.start
        while first < rows.stop:
            end = min(first - first % step + step, rows.stop)
            if packed.code == "ggml":
                piece = self._of_blocks(packed, index, range(first, end), columns)
            else:
                piece = dequantise(self._part(packed, index, range(first, end), columns))
                piece = piece.t() if packed.is_transposed else piece
            out[first - rows.start : end - rows.start].copy_(piece)
            first = end

    def _of_blocks(self, packed: PackedTensor, index: int, rows: range, columns: range) -> torch.Tensor:
        """Return a part of matrix `index` of a GGUF file, float32, in the orientation of the file."""
        whole, (num_rows, num_columns) = rows, packed.matrix
        if packed.pair:
            rows, num_rows = _groups(rows, 2), num_rows // 2
        found = [
            self._ggml_rows(name, index, (num_rows, num_columns), rows, columns, packed.head_rows)
            for name in (packed.data, packed.pair)
            if name
        ]
        numbers = found[0] if not packed.pair else torch.stack(found, dim=1).flatten(0, 1)
        numbers = numbers.narrow(0, whole.start - (rows.start * 2 if packed.pair else rows.start), len(whole))
        return numbers - packed.added if packed.added else numbers

    def _ggml_rows(
        self, name: str, index: int, size: tuple[int, int], rows: range, columns: range, head_rows: int
    ) -> torch.Tensor:
        """Return a part of matrix `index` of a tensor of this size, float32."""
        blocks, dtype = self.blocks_of(name, index, size, rows, columns, head_rows)
        if not dtype:
            return blocks.to(torch.float32)
        return dequantise_blocks(blocks, dtype).narrow(1, columns.start % BLOCKS[dtype][0], len(columns))

    def blocks_of(
        self, name: str, index: int, size: tuple[int, int], rows: range, columns: range, head_rows: int = 0
    ) -> tuple[torch.Tensor, str]:
        """Return rows of matrix `index` of a tensor of this size as the file holds them, in the order that a Hugging
        Face checkpoint has: uint8 `[rows, bytes]` with the blocks that the columns touch, and ggml's type; or numbers
        of their own dtype, and "". `head_rows` as in `PackedTensor`: heads are read whole."""
        stored, wanted = self._files.tensors[name], rows
        if head_rows:
            rows = range(rows.start // head_rows * head_rows, -(-rows.stop // head_rows) * head_rows)
        numbers, num_bytes = BLOCKS[stored.blocks] if stored.blocks else (1, 1)
        touched = _groups(columns, numbers)
        cut = range(touched.start * num_bytes, touched.stop * num_bytes)
        found = self._matrix(name, index, (size[0], size[1] // numbers * num_bytes), (rows, cut))
        if head_rows:
            found = found.view(-1, head_rows // 2, 2, len(cut)).transpose(1, 2).reshape(len(rows), len(cut))
        return found.narrow(0, wanted.start - rows.start, len(wanted)), stored.blocks

    def _part(self, packed: PackedTensor, index: int, rows: range, columns: range) -> Quantized:
        """Read a part of matrix `index`, in the orientation of the file, with the scales of its blocks."""
        total = packed.matrix
        per_word = {"number": 1, "e2m1": 2, "integer": len(packed.lanes)}[packed.code]
        words = [total[0], total[1]]
        words[packed.packed_dim] = math.ceil(words[packed.packed_dim] / per_word)
        cuts = [rows, columns]
        cut = cuts[packed.packed_dim]
        cuts[packed.packed_dim] = _groups(cut, per_word)
        data = self._matrix(packed.data, index, words, cuts)
        blocks = [_groups(rows, packed.block[0]), _groups(columns, packed.block[1])]
        order = None
        if packed.order:
            inputs = 0 if packed.is_transposed else 1
            part = (rows, columns)[inputs]
            order = self._files.read(packed.order, torch.int64, part)
            blocks[inputs] = range(math.ceil(total[inputs] / packed.block[inputs]))
        grid = [math.ceil(size / block) for size, block in zip(total, packed.block, strict=True)]
        factor = self._files.read(packed.factor, torch.float32).view(()) if packed.factor else None
        return Quantized(
            packed=packed,
            data=data,
            scales=scales_of(self._matrix(packed.scales, index, grid, blocks), None, False),
            zeros=self._zeros(packed, index, grid, blocks) if packed.zeros else None,
            shape=(len(rows), len(columns)),
            first=(rows.start % packed.block[0], columns.start % packed.block[1]),
            skipped=cut.start % per_word,
            order=order,
            factor=factor,
        )

    def _zeros(self, packed: PackedTensor, index: int, grid: list[int], blocks: list[range]) -> torch.Tensor:
        """Read the zero points of these blocks, float32."""
        if packed.code == "number":
            return self._matrix(packed.zeros, index, grid, blocks).float()
        dim, per_word = packed.zeros_dim, len(packed.lanes)
        words, cuts = list(grid), list(blocks)
        words[dim], cuts[dim] = math.ceil(words[dim] / per_word), _groups(blocks[dim], per_word)
        zeros = integers(self._matrix(packed.zeros, index, words, cuts), packed.bits, packed.lanes, dim)
        zeros = zeros.narrow(dim, blocks[dim].start % per_word, len(blocks[dim]))
        if packed.adds_one:
            zeros = (zeros + 1) & ((1 << packed.bits) - 1)
        return zeros.float()

    def _matrix(self, name: str, index: int, shape: Sequence[int], cuts: Sequence[range]) -> torch.Tensor:
        """Read a part of matrix `index` of a tensor that holds matrices of this shape, in its own dtype."""
        stored = self._files.tensors[name]
        size = math.prod(shape)
        offset = index * size * stored.dtype.itemsize if math.prod(stored.shape) > size else 0
        matrix = replace(stored, offset=stored.offset + offset, shape=tuple(shape))
        columns = cuts[1] if len(cuts[1]) < shape[1] else None
        return self._files.read_stored(matrix, stored.dtype, cuts[0], columns)

    def has(self, name: str) -> bool:
        return name in self._left

    def leave_out(self, names: Iterable[str]) -> None:
        """Leave out these tensors, of parts that are not computed."""
        self._left.difference_update(names)

    def ignore(self, *suffixes: str) -> None:
        """Leave out tensors with these name endings, which hold nothing that the model needs."""
        self._left = {name for name in self._left if not name.endswith(suffixes)}

    def ignore_layers(self, layers: range) -> None:
        """Leave out whole layers, which are not computed."""
        prefixes = tuple(f"model.layers.{layer}." for layer in layers)
        self._left = {name for name in self._left if not name.startswith(prefixes)}

    def finish(self) -> None:
        """Raise UnsupportedModel if tensors are left: they would have changed the result."""
        if self._may_have_idle_biases:  # GPTQ gives every layer a bias; all zeros if the model has none
            biases = [name for name in self._left if name.endswith(".bias")]
            self._left.difference_update(name for name in biases if not self._files.read(name, torch.float32).any())
        if self._left:
            names = ", ".join(sorted(self._left)[:4])
            raise UnsupportedModel(
                f"the checkpoint has {len(self._left)} tensors that this model does not use: {names}"
            )
        if self._progress is not None:
            self._progress(self._total, self._total)
