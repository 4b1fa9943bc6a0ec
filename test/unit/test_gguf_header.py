"""Headers of GGUF files that somebody else wrote: whole, or an error that names what does not fit, before anything of
its size is made."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gguf_files import Typed, header_of, stored, text, value

from chitu.errors import ConfigError
from chitu.models.gguf import read_header

SMALL = header_of(
    {
        "general.architecture": "llama",
        "a.list": ["x", "yz"],
        "a.number": 7,
        "a.long": Typed(10, 1 << 40),
        "a.lists": [1.5, 2.5],
        "a.flag": True,
    },
    {"token_embd.weight": stored(np.zeros((2, 32)), "Q8_0"), "b": stored(np.ones(3))},
)
DATA = bytes(128)


def refused(data: bytes, folder: Path) -> str:
    file = folder / "x.gguf"
    file.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_header(file)
    assert str(file) in caught.value.message
    return caught.value.message


def test_a_header_is_whole_or_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    (tmp_path / "whole.gguf").write_bytes(SMALL + DATA)
    assert read_header(tmp_path / "whole.gguf").metadata["a.long"] == 1 << 40
    for length in range(len(SMALL) + 68 + 12):
        refused((SMALL + DATA)[:length], tmp_path)


@pytest.mark.parametrize("huge", [1 << 63, (1 << 64) - 1, 1 << 40, 1 << 31, 5_000_000])
def test_no_count_and_no_length_makes_anything_of_its_size(huge: int, tmp_path: Path) -> None:
    """Each place of eight bytes is a count, a length or an offset somewhere."""
    import tracemalloc

    tracemalloc.start()
    try:
        for at in range(8, len(SMALL) - 8):
            file = tmp_path / "x.gguf"
            file.write_bytes(SMALL[:at] + struct.pack("<Q", huge) + SMALL[at + 8 :] + DATA)
            with contextlib.suppress(ConfigError):
                read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


@given(at=st.integers(0, len(SMALL) - 1), new=st.binary(min_size=1, max_size=9))
def test_damaged_bytes_are_read_or_refused(at: int, new: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.gguf"
    file.write_bytes((SMALL[:at] + new + SMALL[at + len(new) :])[: len(SMALL)] + DATA)
    try:
        header = read_header(file)
    except ConfigError:
        return
    for place in header.tensors.values():
        assert place.offset > 0 and place.offset + place.num_bytes <= file.stat().st_size


def plain(*tensors: tuple[str, int, tuple[int, ...], int], version: int = 3, **metadata: Any) -> bytes:
    """Return a header whose tensors say what they like."""
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    parts += [text(key) + value(each) for key, each in metadata.items()]
    for name, kind, dims, offset in tensors:
        parts.append(text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
    return b"".join(parts).ljust(512, b"\0")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cut off"),
        (b"GGML" + bytes(60), "is no GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1 of GGUF"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big endian"),
        (plain(("a", 16, (256,), 0)), "IQ2_XXS"),
        (plain(("a", 99, (256,), 0)), "number 99"),
        (plain(("a", 8, (33,), 0)), "no whole blocks of 32"),
        (plain(("a", 0, (), 0)), "0 dimensions"),
        (plain(("a", 0, (1, 1, 1, 1, 1), 0)), "5 dimensions"),
        (plain(("a", 0, (0, 4), 0)), "no whole blocks"),
        (plain(("a", 0, (1 << 62, 1 << 62), 0)), "cut off"),
        (plain(("a", 0, (4,), 0), ("a", 0, (4,), 32)), "the tensor 'a' twice"),
        (plain(("a", 0, (16,), 0), ("b", 0, (4,), 32)), "the offset 32 of the tensor 'b'"),
        (plain(("a", 0, (4,), 7)), "the offset 7"),
        (plain(("a", 0, (4,), 0), **{"general.alignment": 24}), "general.alignment is 24"),
        (plain(("a", 0, (4,), 0), **{"general.alignment": 0}), "general.alignment is 0"),
        (plain(("a", 0, (4,), 0), **{"general.alignment": "much"}), "general.alignment"),
        (plain()[:20], "cut off"),
    ],
)
def test_each_fault_of_a_header_has_its_words(data: bytes, words: str, tmp_path: Path) -> None:
    assert words in refused(data, tmp_path)


def test_lists_in_lists_end_somewhere(tmp_path: Path) -> None:
    nested = b"".join(struct.pack("<IQ", 9, 1) for _ in range(1000))
    key = struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9) + nested
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key
    assert "a value of type 9" in refused(data.ljust(1 << 15, b"\0"), tmp_path)


def test_lists_have_no_more_values_than_any_vocabulary(tmp_path: Path) -> None:
    count = (4 << 20) // 2 + 1
    one = struct.pack("<IIQ", 9, 0, count) + bytes(count)
    keys = b"".join(struct.pack("<Q", 1) + name + one for name in (b"a", b"b"))
    assert "more than 4194304 values, with the key 'b'" in refused(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + keys + bytes(64), tmp_path
    )


def test_a_text_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    key = struct.pack("<Q", 1) + b"a" + struct.pack("<IQ", 8, 2) + b"\xff\xfe"
    assert "no UTF-8" in refused(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key.ljust(64, b"\0"), tmp_path)
