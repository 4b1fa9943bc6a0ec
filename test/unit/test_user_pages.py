"""A store of pages of a user's own: what it does wrong costs cached pages, and no request."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from scheduler_world import prompt_of
from tiered_world import TIMEOUT_S, Stored

from chitu.config.load import load_topology
from chitu.config.topology_checks import problems
from chitu.errors import ConfigError
from chitu.kv_cache.tiers.pages import StoreError
from chitu.kv_cache.tiers.prefix_tiers import OFF_S
from chitu.kv_cache.tiers.user_pages import UserPages, load_store

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT_TOKENS = 41
CACHED = 40


class OwnStore:
    """The least that a store has."""

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.before: Callable[[str], None] = lambda call: None
        self.kept: list[Any] = []

    def store_put(self, keys: Sequence[bytes], records: Sequence[bytes]) -> None:
        self.before("put")
        self.kept += records
        self.pages |= dict(zip(keys, records, strict=True))

    def store_get(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> Any:
        self.before("get")
        self.kept += records
        found = [self.pages[key] for key in keys if key in self.pages]
        for record, page in zip(records, found, strict=False):
            record[:] = page
        return len(found)


def filled() -> tuple[OwnStore, Stored, list[int]]:
    """Return an instance that has forgotten a prompt, whose pages its store has."""
    own = OwnStore()
    instance = Stored({"store": UserPages("own:Store", own)})
    prompt = prompt_of(1, PROMPT_TOKENS)
    instance.ask(0, prompt)
    instance.evict()
    return own, instance, prompt


def test_two_methods_make_a_store() -> None:
    own, instance, prompt = filled()
    assert instance.ask(1, prompt) == CACHED and own.pages
    instance.tiers.flush()
    instance.pump()
    instance.check_empty()


@pytest.mark.parametrize("error", [ValueError("x"), KeyError(3), RecursionError(), SystemExit(1), MemoryError()])
@pytest.mark.parametrize("call", ["put", "get"])
def test_whatever_it_raises_turns_it_off_for_a_while(
    call: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    own, instance, prompt = filled()

    def fail(name: str) -> None:
        if name == call:
            raise error

    own.before = fail
    assert instance.ask(1, prompt if call == "get" else prompt_of(2, PROMPT_TOKENS)) == 0
    assert f"own:Store.store_{call}: {type(error).__name__}" in caplog.text
    own.before = lambda name: None
    instance.clock.advance(OFF_S)
    instance.evict()
    assert instance.ask(3, prompt) == CACHED
    instance.check_empty()


@pytest.mark.parametrize("count", [-1, 99, True, None, "2", 2.0])
def test_a_count_that_none_can_be_is_a_failure(count: object, caplog: pytest.LogCaptureFixture) -> None:
    own, instance, prompt = filled()
    own.store_get = lambda keys, records: count  # type: ignore[method-assign]
    assert instance.ask(1, prompt) == 0
    assert "store_get returned" in caplog.text
    instance.check_empty()


def test_wrong_bytes_are_found_by_their_checksum_and_computed() -> None:
    own, instance, prompt = filled()
    for key, page in own.pages.items():
        own.pages[key] = page[:-1] + bytes([page[-1] ^ 1])
    assert instance.ask(1, prompt) == 0
    assert instance.slow["store"].bad_pages > 0
    instance.check_empty()


def test_what_it_does_with_a_buffer_later_reaches_no_page() -> None:
    own, instance, prompt = filled()
    assert instance.ask(1, prompt) == CACHED
    for kept in own.kept:
        if isinstance(kept, memoryview):
            kept[:] = bytes(len(kept))
    assert any(isinstance(kept, memoryview) for kept in own.kept)
    assert instance.ask(2, prompt) == CACHED, "host memory or the pool has other bytes"
    instance.check_empty()


def test_a_slow_call_has_failed() -> None:
    own, instance, prompt = filled()
    own.before = lambda name: instance.clock.advance(TIMEOUT_S + 0.1)
    instance.ask(1, prompt)
    calls: list[str] = []
    own.before = calls.append
    instance.evict()
    instance.ask(2, prompt)
    assert calls == []
    instance.check_empty()


class _NoGet:
    def __init__(self, options: dict[str, object]) -> None:
        if "fails" in options:
            raise RuntimeError("no disk")

    def store_put(self, keys: object, records: object) -> None: ...


@pytest.mark.parametrize(
    ("plugin", "options", "says"),
    [
        ("no_such_module:Store", {}, "no_such_module"),
        (f"{__name__}:Missing", {}, "Missing"),
        (f"{__name__}:_NoGet", {}, "has no store_get"),
        (f"{__name__}:_NoGet", {"fails": 1}, "no disk"),
        ("unknown", {}, "no entry point of chitu.page_stores"),
    ],
)
def test_a_store_that_cannot_be_made_is_a_configuration_error(
    plugin: str, options: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=r"cache\.store\.plugin") as found:
        load_store(plugin, options)
    assert says in found.value.message


def test_an_entry_point_names_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "own_store-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-store\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[chitu.page_stores]\nsqlite = page_store:SQLitePages\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    store = load_store("sqlite", {"file": str(tmp_path / "pages")})
    store.store_put([b"k"], [memoryview(b"page")])
    records = [memoryview(bytearray(4)), memoryview(bytearray(4))]
    assert store.store_get([b"k", b"missing"], records) == 1 and bytes(records[0]) == b"page"
    store.forget(b"k")
    assert store.store_get([b"k"], records) == 0
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.store_get([b"k"], records)
    sys.modules.pop("page_store", None)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["cache.store.plugin=a:B"], "cache.store.plugin: pages go through host memory"),
        (["cache.store.plugin=a:B", "cache.store.master=h:1", "cache.host_bytes=100"], "in place of a Mooncake Store"),
        (["cache.store.options={file: x}"], "cache.store.options"),
    ],
)
def test_keys_that_mean_nothing_are_named(overrides: list[str], says: str) -> None:
    assert any(says in problem for problem in problems(load_topology(None, overrides), need_model=False))
