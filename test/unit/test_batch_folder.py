"""The folder of files and batches: what a look costs, that each byte counts once, who may have how much of it, and what
goes first when it is full."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.config.schema import BatchesConfig
from chitu.errors import DiskFull
from chitu.http.batch.batches import MAX_RUNS, next_tenant
from chitu.http.batch.index import BatchFacts, FileRecord, FolderIndex, FolderView
from chitu.http.batch.shares import Bounds, past_use, room_for, room_to_grow
from chitu.http.batch.store import ORPHAN_S, BatchRecord, FileStore, NewFile, new_id

MB = 1 << 20
SETTINGS: dict[str, Any] = {"max_mb": 8}


def batch_of(tenant: str, input_file_id: str, created_at: int = 0, **more: Any) -> BatchRecord:
    return BatchRecord(
        **{
            "id": new_id("batch_"),
            "tenant": tenant,
            "endpoint": "/v1/completions",
            "input_file_id": input_file_id,
            "completion_window": "24h",
            "output_max_age_s": 60.0,
            "created_at": created_at or int(time.time()),
            "expires_at": int(time.time()) + 60,
            "output_file_id": new_id("file-"),
            "error_file_id": new_id("file-"),
            **more,
        }
    )


def record_of(new: NewFile, num_bytes: int, **more: Any) -> FileRecord:
    now_s = int(time.time())
    return FileRecord(
        **{
            "id": new.id,
            "tenant": new.tenant,
            "filename": "a",
            "purpose": "batch",
            "num_bytes": num_bytes,
            "created_at": now_s,
            "expires_at": now_s + 600,
            **more,
        }
    )


def upload(store: FileStore, tenant: str, num_bytes: int, announced: int | None = None) -> str:
    new = store.create(tenant, num_bytes if announced is None else announced)
    try:
        for at in range(0, num_bytes, 65536):
            store.append(new, b"x" * min(65536, num_bytes - at))
        store.keep(new, record_of(new, num_bytes))
    except DiskFull:
        store.discard(new)
        raise
    return new.id


def bytes_of(folder: Path) -> int:
    """Return the size of everything in the folder; what has two names counts once."""
    return sum({facts.st_ino: facts.st_size for facts in map(os.stat, folder.iterdir())}.values())


def store_of(folder: Path, num_tenants: int = 1, **more: Any) -> FileStore:
    return FileStore(BatchesConfig(**SETTINGS | more), folder, num_tenants)


# ---------------------------------------------------------------------------------------------------------------- looks


OPENED: list[str] = []
sys.addaudithook(lambda event, found: OPENED.append(str(found[0])) if event == "open" and OPENED else None)


@contextmanager
def opened(folder: Path) -> Iterator[list[str]]:
    """Collect the names of the files of a folder that are opened."""
    OPENED[:] = ["begin"]
    names: list[str] = []
    try:
        yield names
    finally:
        names += [os.path.basename(path) for path in OPENED if path.startswith(str(folder) + "/")]
        OPENED.clear()


def test_a_list_opens_only_records_that_are_new_or_may_have_changed(tmp_path: Path) -> None:
    """Also those that another router wrote."""
    store, other = store_of(tmp_path), store_of(tmp_path)
    files = [upload(store, "ab"[i % 2], 10) for i in range(30)]
    batches = [batch_of("a", files[0], 1 + i, status="completed") for i in range(30)]
    running = batch_of("b", files[1])
    for batch in (*batches, running):
        store.add(batch)
    store.files(None)
    other.files(None)
    with opened(tmp_path) as names:
        for each in (store, other):
            assert [file.id for file in each.files("a")] == files[::2][::-1]
            assert len(each.batches("a")) == 30 and len(each.batches(None)) == 31
            each.remove_old(0.0)
    assert not names
    with opened(tmp_path) as names:
        assert other.open_batches(set()).by_tenant.keys() == {"b"}
    assert not names

    running.status = "completed"
    store.write(running)
    store.remove(files[0])
    new = upload(store, "a", 10)
    with opened(tmp_path) as names:
        assert [file.id for file in other.files("a")] == [new, *files[2::2][::-1]]
        assert not other.open_batches(set()).by_tenant
    assert sorted(names) == sorted([f"{new}.json", f"{running.id}.json"])


def test_a_batch_that_is_written_again_and_again_is_always_seen_as_it_is(tmp_path: Path) -> None:
    store, other = store_of(tmp_path), store_of(tmp_path)
    batch = batch_of("a", upload(store, "a", 10))
    store.add(batch)
    for status in ("in_progress", "finalizing", "in_progress", "finalizing", "completed"):
        batch.status = status  # type: ignore[assignment]
        store.write(batch)
        assert [each.status for each in other.batches("a")] == [status]


def test_a_damaged_record_is_no_file_and_is_read_once(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    name = upload(store, "a", 10)
    (tmp_path / f"{name}.json").write_bytes(b"{")
    assert store.files(None) == []
    with opened(tmp_path) as names:
        assert store.files(None) == []
    assert not names


# ---------------------------------------------------------------------------------------------------------------- bytes


def test_each_byte_of_the_folder_counts_once_for_its_tenant(tmp_path: Path) -> None:
    store, index = store_of(tmp_path), FolderIndex(tmp_path)
    sizes: list[dict[str | None, int]] = []

    def check() -> dict[str | None, int]:
        held = index.look().held_bytes
        assert held == FolderIndex(tmp_path).look().held_bytes, "as for one that begins now"
        assert held.total() == bytes_of(tmp_path), sorted(os.listdir(tmp_path))
        sizes.append({tenant: num_bytes for tenant, num_bytes in held.items() if num_bytes})
        return sizes[-1]

    name = upload(store, "a", 1000)
    batch, second = batch_of("a", name), batch_of("a", name)
    store.add(batch)
    assert 1000 < check()["a"] < 2000, "the input is another name of the file"
    store.add(second)
    store.remove(name)
    assert 1000 < check()["a"] < 3000, "its other names are left"
    store.remove(second.id)
    assert 1000 < check()["a"] < 2000
    store.reserve(batch.id)
    store.claim(batch.id)
    store.path(batch.output_file_id, "data").write_bytes(b"x" * 5000)
    assert check()["a"] > 100_000 and set(sizes[-1]) == {"a"}
    new = store.create("b", 70_000)
    store.append(new, b"x" * 10)
    assert check()["b"] == 70_000, "what is announced is taken at once"
    store.discard(new)
    (tmp_path / "notes.txt").write_bytes(b"x" * 300)
    (tmp_path / "batch_x.partial").write_bytes(b"x" * 30)
    assert check()[None] == 330 and "b" not in sizes[-1]
    store.remove(batch.id)
    store.remove(batch.output_file_id)
    assert set(check()) == {None}


@pytest.mark.parametrize("is_announced", [True, False])
def test_inputs_whose_file_was_deleted_and_uploads_count_towards_the_bound(tmp_path: Path, is_announced: bool) -> None:
    store = store_of(tmp_path)
    running: list[NewFile] = []
    with pytest.raises(DiskFull, match="max_mb"):
        for i in range(20):
            name = upload(store, "a", 900_000, None if is_announced else 0)
            store.add(batch_of("a", name))
            store.remove(name)
            if i % 2:
                running.append(store.create("a", 500_000 if is_announced else 0))
                store.append(running[-1], b"x" * 500_000)
            assert bytes_of(tmp_path) <= 8 * MB, i
    assert 6 * MB < bytes_of(tmp_path) <= 8 * MB
    for new in running:
        store.keep(new, record_of(new, 500_000))
    assert bytes_of(tmp_path) <= 8 * MB
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".upload"]


def test_what_a_killed_router_left_goes_when_it_is_old(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    left = store.create("a", 100)
    kept = batch_of("a", upload(store, "a", 10))
    store.add(kept)
    store.path(kept.output_file_id, "data").write_bytes(b"x")
    store.remove_old(time.time())
    assert left.path.exists()
    store.remove_old(time.time() + ORPHAN_S + 60)
    assert not left.path.exists() and store.path(kept.output_file_id, "data").exists()


# --------------------------------------------------------------------------------------------------------------- shares


def view_of(*held: tuple[str, int]) -> FolderView:
    """Return a view of files, given as their tenant and size."""
    view = FolderView()
    for i, (tenant, num_bytes) in enumerate(held):
        put(view, FileRecord(f"file-{i}", tenant, "a", "batch", num_bytes, i, 1 << 40), num_bytes)
    return view


def put(view: FolderView, record: FileRecord | BatchFacts, num_bytes: int) -> None:
    if isinstance(record, FileRecord):
        view.files[record.id] = record
    else:
        view.batches[record.id] = record
    view.num_bytes[record.id] = num_bytes
    view.held_files[record.tenant] += 1
    view.held_bytes[record.tenant] += num_bytes


@given(st.lists(st.integers(0, 14), max_size=300), st.integers(2, 16))
def test_whatever_the_others_take_the_last_tenant_finds_room(takers: list[int], num_tenants: int) -> None:
    bounds = Bounds(256, 256, num_tenants)
    taken: list[tuple[str, int]] = []
    for taker in takers:
        tenant = str(taker % (num_tenants - 1))
        if not room_for(view_of(*taken), bounds, tenant, 1, 1).refusal:
            taken.append((tenant, 1))
    counts = Counter(tenant for tenant, _ in taken)
    assert max(counts.values(), default=0) <= 256 // min(num_tenants, 4)
    assert not room_for(view_of(*taken), bounds, "last", 1, 1).refusal, counts


@pytest.mark.parametrize(("num_tenants", "shares"), [(1, [240]), (2, [120, 120]), (4, [60] * 4), (5, [60, 45, 33])])
def test_few_tenants_have_equal_parts_and_of_many_each_a_quarter_of_what_is_left(
    num_tenants: int, shares: list[int]
) -> None:
    bounds, taken = Bounds(1000, 240, num_tenants), list[tuple[str, int]]()
    for i, share in enumerate(shares):
        refused = room_for(view_of(*taken), bounds, str(i), 1, share + 1)
        assert "max_mb" in refused.refusal, refused
        assert not room_for(view_of(*taken), bounds, str(i), 1, share).refusal
        taken.append((str(i), share))
    assert "max_files" in room_for(view_of(), Bounds(8, 10, 2), "a", 5, 0).refusal


def test_outputs_may_grow_to_the_largest_share_whatever_others_take() -> None:
    bounds = Bounds(1000, 240, 8)
    crowd = [(str(i), 60) for i in range(3)]
    assert not room_to_grow(view_of(("a", 60), *crowd), bounds, "a").refusal
    assert room_for(view_of(("a", 60), *crowd), bounds, "a", 0, 0).refusal
    assert "max_mb" in room_to_grow(view_of(("a", 61)), bounds, "a").refusal


def view_of_batches(statuses: list[str], outputs: list[str]) -> FolderView:
    """Return a view of batches of one tenant. `outputs`: of each `none`, `read` or `unread`."""
    view = view_of()
    for i, (status, output) in enumerate(zip(statuses, outputs, strict=True)):
        out = f"file-{i}"
        put(view, BatchFacts(f"batch_{i}", "a", status, i, "", out, ""), 10)  # type: ignore[arg-type]
        if output != "none":
            put(view, FileRecord(out, "a", "o", "batch_output", 10, i, 1 << 40), 10)
        if output == "read":
            view.read.add(out)
    return view


def test_batches_that_are_over_make_room_the_oldest_first_and_results_that_nobody_has_read_stay() -> None:
    view = view_of_batches(
        ["completed", "in_progress", "failed", "completed", "expired"], ["unread", "none", "none", "read", "read"]
    )
    put(view, FileRecord("file-9", "a", "o", "batch_output", 10, 1, 1 << 40), 10)  # of a batch that was deleted
    view.read.add("file-9")
    groups = [["file-9"], ["batch_2"], ["batch_3", "file-3"], ["batch_4", "file-4"], ["batch_0"]]
    assert past_use(view, "a") == groups and past_use(view, "b") == []
    have = view.held_files.total()
    assert room_for(view, Bounds(have, 1000, 1), "a", 0, 0) == ([], "")
    assert room_for(view, Bounds(have, 1000, 1), "a", 3, 0) == (["file-9", "batch_2", "batch_3", "file-3"], "")
    assert room_for(view, Bounds(1000, 10 * have, 1), "a", 0, 65) == ([name for names in groups for name in names], "")
    refused = room_for(view, Bounds(1000, 10 * have, 1), "a", 0, 75)
    assert not refused.removed and refused.refusal, "nothing is lost for what cannot be done"
    assert room_for(view, Bounds(have, 1000, 1), "b", 1, 0).refusal, "of that tenant alone"


# ----------------------------------------------------------------------------------------------------------------- runs


def begun(waiting: dict[str, int], running: list[str]) -> list[str]:
    """Return the tenants whose batches run once all that may have begun."""
    left, running = dict(waiting), list(running)
    while (tenant := next_tenant([each for each, count in left.items() if count], running)) is not None:
        left[tenant] -= 1
        running.append(tenant)
    return sorted(running)


def test_a_tenant_alone_has_all_places_and_another_has_its_share_at_once() -> None:
    assert begun({"a": 9}, []) == ["a"] * MAX_RUNS
    assert begun({"a": 5, "b": 5}, []) == ["a", "a", "b", "b"], "in turn"
    assert begun({"a": 5, "b": 5}, ["a"] * 4) == ["a"] * 4 + ["b"] * 2
    assert begun({"e": 2}, ["a", "b", "c", "d"]) == ["a", "b", "c", "d", "e"]
    assert begun({"a": 5}, ["a", "a", "b", "b", "b"]) == ["a", "a", "b", "b", "b"]


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 9)), st.lists(st.sampled_from("abcdefgh")))
def test_no_tenant_waits_for_the_batches_of_others(waiting: dict[str, int], first: list[str]) -> None:
    running = begun(dict(Counter(first)), [])
    after = begun(waiting, running)
    assert set(waiting) <= set(after)
    assert len(after) <= max(len(running), 2 * MAX_RUNS + len({*waiting, *running}))


def test_the_record_of_a_batch_of_an_earlier_version_has_no_key(tmp_path: Path) -> None:
    batch = batch_of("a", "file-1")
    fields = msgspec.to_builtins(batch)
    del fields["key_name"]
    assert msgspec.convert(fields, BatchRecord).key_name == ""
