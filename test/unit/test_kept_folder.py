"""The folder of kept requests: which router takes a file, and what is left, put aside or removed. No sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from support.clock import FakeClock

from chitu.config.schema import KeptRequestsConfig
from chitu.errors import Capacity, InvalidRequest, NoInstance, UnknownRequest
from chitu.http.answer.choice import RunningAnswers
from chitu.http.answer.kept_folder import FILE_SUFFIX, UNNAMED_S, KeptFolder, NotKept
from chitu.http.answer.kept_requests import LOOK_S, KeptRequests
from chitu.http.ask.parsed import OutputOptions, ParsedRequest, Prompt
from chitu.http.ask.served_model import ModelLimits
from chitu.http.wire.events import EventNumbers, events_read
from chitu.protocol import ImagePart, InstanceInfo, KVLayout, RequestOptions, SamplingParams, image_key
from chitu.protocol.kept_request import DamagedFile, KeptRequest, pack, unpack, with_files, without_files
from chitu.protocol.receipt import ReceiptSampling, images_told
from chitu.router.candidates import Candidates
from chitu.router.generation import GenerateRequest

NOW_S = 1_000_000_000.0
SERVING = Candidates(unified=(cast(InstanceInfo, None),))


def record(**changes: Any) -> KeptRequest:
    sound = KeptRequest(
        kept=1,
        chitu="0.1.0",
        request_id="r",
        tenant="t",
        route="completion",
        body="{}",
        created_s=1,
        expires_s=NOW_S + 10,
        left_s=5.0,
        model_hash="h",
        dtype="float32",
        prompt_token_ids=[1, 2],
        sampling=ReceiptSampling(10),
        token_ids=[3],
        logprobs=[],
    )
    return msgspec.structs.replace(sound, **changes)


def folder(path: Path, **limits: Any) -> KeptFolder:
    return KeptFolder(KeptRequestsConfig(**limits), path / "kept")


def names(path: Path) -> list[str]:
    return sorted(each.name for each in (path / "kept").iterdir())


def found(of: KeptFolder, now_s: float = NOW_S) -> list[tuple[str, KeptRequest]]:
    return of.found(now_s, "h", "float32")


def test_of_two_routers_that_saw_a_file_one_takes_it(tmp_path: Path) -> None:
    one, other = folder(tmp_path), folder(tmp_path)
    one.write(record())
    (name, kept), *_ = found(one)
    assert kept == record() and found(other) == [(name, kept)]
    assert [one.take(name), other.take(name), one.take(name)] == [True, False, False]
    assert names(tmp_path) == []


def test_a_request_is_written_while_another_router_takes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next router may run before this one has ended."""
    mine, theirs, really_scan = folder(tmp_path), folder(tmp_path), os.scandir
    mine.write(record(request_id="r1"))
    ((name, _),) = found(theirs)

    @contextlib.contextmanager
    def scan_then_lose(path: Any) -> Iterator[Any]:
        with really_scan(path) as entries:
            listed = list(entries)
        assert theirs.take(name)
        yield iter(listed)

    with monkeypatch.context() as slow:
        slow.setattr(os, "scandir", scan_then_lose)
        mine.write(record(request_id="r2"))
    ((_, kept),) = found(theirs)
    assert kept.request_id == "r2"


def test_a_file_is_private_and_whole(tmp_path: Path) -> None:
    folder(tmp_path).write(record())
    (path,) = (tmp_path / "kept").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    data = path.read_bytes()
    for end in (0, 10, 64, 65, len(data) - 1):
        with pytest.raises(DamagedFile):
            unpack(data[:end])
    with pytest.raises(DamagedFile, match="kept"):
        unpack(pack(record(kept=2)))
    with pytest.raises(DamagedFile, match="logprobs of 2 of 1"):
        unpack(pack(record(logprobs=[b"a", b"b"])))


def test_what_a_killed_router_left_is_no_request_and_goes_when_it_is_old(tmp_path: Path) -> None:
    kept = folder(tmp_path, max_age_s=100.0)
    kept.write(record(expires_s=NOW_S + 1000))
    for name in ("a.partial", "b.request.damaged", "c.request.x.taken"):
        path = tmp_path / "kept" / name
        path.write_bytes(b"half")
        os.utime(path, (NOW_S - 99, NOW_S - 99))
    assert len(found(kept)) == 1 and len(names(tmp_path)) == 4
    assert len(found(kept, NOW_S + 2)) == 1 and len(names(tmp_path)) == 1


def test_an_old_request_is_removed_and_one_of_another_model_waits_for_its_own(tmp_path: Path) -> None:
    kept = folder(tmp_path)
    kept.write(record(expires_s=NOW_S - 1))
    kept.write(record(model_hash="other"))
    kept.write(record(dtype="fp8_e4m3"))
    assert found(kept) == [] and len(names(tmp_path)) == 2
    assert [each.model_hash for _, each in kept.found(NOW_S, "other", "float32")] == ["other"]


def test_what_is_not_ours_is_never_read(tmp_path: Path) -> None:
    kept = folder(tmp_path)
    kept.write(record())
    (sound,) = (tmp_path / "kept").iterdir()
    inside = tmp_path / "kept"
    (inside / "link.request").symlink_to(sound)
    os.mkfifo(inside / "pipe.request")
    (inside / "folder.request").mkdir()
    (inside / "open.request").write_bytes(sound.read_bytes())
    (inside / "open.request").chmod(0o666)
    (inside / "bad.request").touch(0o600)
    assert [name for name, _ in found(kept)] == [sound.name]
    assert (inside / "bad.request.damaged").exists()


def test_odd_entries_stop_nobody_and_count_for_nothing(tmp_path: Path) -> None:
    kept, inside = folder(tmp_path, max_requests=3, max_age_s=1.0), tmp_path / "kept"
    inside.mkdir(mode=0o700)
    for suffix in (".request", ".partial", ".damaged", ".taken"):
        (inside / f"folder{suffix}").mkdir()
        (inside / f"itself{suffix}").symlink_to(f"itself{suffix}")
        (inside / f"nothing{suffix}").symlink_to("nowhere")
        os.mkfifo(inside / f"pipe{suffix}")
    odd = names(tmp_path)
    kept.write(record())
    kept.write(record())
    (inside / "bad.request").touch(0o600)
    (inside / "bad.request.damaged").mkdir()
    taken = [name for name, _ in found(kept, NOW_S + 2)]
    assert len(taken) == 2 and all(map(kept.take, taken))
    assert not (inside / "bad.request").exists() and {*odd, "bad.request.damaged"} < {*names(tmp_path)}


def test_a_request_is_written_though_a_cleaner_is_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, really_rename, victims = folder(tmp_path), os.rename, [tmp_path / "kept"]

    def clean_and_rename(source: Any, target: Any) -> None:
        if victims:
            shutil.rmtree(victims.pop())
        really_rename(source, target)

    monkeypatch.setattr(os, "rename", clean_and_rename)
    kept.write(record())
    assert not victims and len(found(kept)) == 1


def test_the_folder_has_bounds(tmp_path: Path) -> None:
    few = folder(tmp_path, max_requests=1)
    few.write(record())
    with pytest.raises(NotKept, match="max_requests"):
        few.write(record())
    with pytest.raises(NotKept, match="max_mb"):
        folder(tmp_path, max_mb=1).write(record(body="x" * (1 << 20)))
    assert len(names(tmp_path)) == 1
    with pytest.raises(OSError):
        KeptFolder(KeptRequestsConfig(), Path("/proc/nowhere")).write(record())


def picture(seed: int, num_bytes: int = 300_000) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def with_pictures(*pictures: bytes, **changes: Any) -> KeptRequest:
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(each).decode()}"}}
        for each in pictures
    ]
    return record(body=json.dumps({"messages": [{"role": "user", "content": parts}], "note": "a" * 5001}), **changes)


def test_images_lie_beside_the_requests_each_once(tmp_path: Path) -> None:
    """Two requests with one picture fit where two copies of it would not."""
    kept, first, second = folder(tmp_path, max_mb=1), picture(1), picture(2)
    records = [with_pictures(first, second, first), with_pictures(second)]
    for each in records:
        kept.write(each)
    files = {path.name: path.stat() for path in (tmp_path / "kept").iterdir() if path.suffix == FILE_SUFFIX}
    assert {*files} == {hashlib.sha256(each).hexdigest() + FILE_SUFFIX for each in (first, second)}
    assert all(facts.st_mode & 0o777 == 0o600 for facts in files.values())
    assert all(path.stat().st_size < 10_000 for path in (tmp_path / "kept").iterdir() if path.suffix == ".request")
    whole = [kept.whole(each) for _, each in found(kept)]
    assert sorted(each.body for each in whole) == sorted(each.body for each in records)
    assert all(not each.files for each in whole)
    with pytest.raises(NotKept, match="max_mb"):
        kept.write(with_pictures(picture(3, 500_000)))
    assert len(names(tmp_path)) == 4


def test_files_go_when_no_request_names_them_any_more(tmp_path: Path) -> None:
    kept, shared, own, now_s = folder(tmp_path), picture(1), picture(2), time.time()
    kept.write(with_pictures(shared, own, expires_s=now_s + 1e6))
    kept.write(with_pictures(shared, model_hash="other", expires_s=now_s + 1e6))
    old_s = now_s + UNNAMED_S + 10
    ((name, _),) = found(kept, old_s)
    assert kept.take(name)
    assert found(kept, now_s) == [] and len(names(tmp_path)) == 3, "it may be of a request that is being written"
    found(kept, old_s)
    assert f"{hashlib.sha256(own).hexdigest()}{FILE_SUFFIX}" not in names(tmp_path) and len(names(tmp_path)) == 2
    ((name, _),) = kept.found(old_s, "other", "float32")
    for _ in range(5):
        kept.write(record(expires_s=now_s + 1e6))
    folder(tmp_path, max_requests=1).found(old_s, "h", "float32")
    assert sum(each.endswith(FILE_SUFFIX) for each in names(tmp_path)) == 1, "one that was not read may name it"
    assert kept.take(name)
    found(kept, old_s)
    assert {each.rpartition(".")[2] for each in names(tmp_path)} == {"request"}


def test_what_a_router_that_ends_writes_is_young_again(tmp_path: Path) -> None:
    """Else another router would remove the file just before its request is there."""
    kept, shared = folder(tmp_path), picture(1)
    kept.write(with_pictures(shared))
    (path,) = [each for each in (tmp_path / "kept").iterdir() if each.suffix == FILE_SUFFIX]
    os.utime(path, (NOW_S, NOW_S))
    kept.write(with_pictures(shared))
    assert path.stat().st_mtime > NOW_S + UNNAMED_S and len(names(tmp_path)) == 3


def test_a_file_that_another_router_removes_just_then_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, really_rename = folder(tmp_path), os.rename

    def remove_and_rename(source: Any, target: Any) -> None:
        if str(target).endswith(".request"):
            for path in (tmp_path / "kept").glob(f"*{FILE_SUFFIX}"):
                path.unlink()
        really_rename(source, target)

    monkeypatch.setattr(os, "rename", remove_and_rename)
    kept.write(with_pictures(picture(1)))
    ((_, each),) = found(kept)
    assert kept.whole(each) == with_pictures(picture(1))


@pytest.mark.parametrize("fault", ["changed", "gone", "foreign"])
def test_a_request_whose_image_is_not_what_it_was_is_not_read(tmp_path: Path, fault: str) -> None:
    kept = folder(tmp_path)
    kept.write(with_pictures(picture(1)))
    (path,) = [each for each in (tmp_path / "kept").iterdir() if each.suffix == FILE_SUFFIX]
    if fault == "changed":
        path.write_bytes(picture(2))
    elif fault == "gone":
        path.unlink()
    else:
        path.chmod(0o666)
    ((_, each),) = found(kept)
    with pytest.raises(DamagedFile, match="file " + path.stem):
        kept.whole(each)


def test_only_what_can_be_written_as_it_was_leaves_the_body() -> None:
    texts = [
        "=" * 5000,
        "A" * 4095,
        "A" * 4097,
        "A" * 4096 + "B=",
        "A" * 4096 + "B==",
        "A" * 4096 + "BA==",
        "A+/" * 2000,
    ]
    for text in texts:
        fetched = {"https://a/b.png": picture(1, 5)} if len(text) % 2 else {}
        whole = record(fetched=fetched, body=json.dumps({"prompt": text, "other": [text, f"data:x;base64,{text}"]}))
        bare, files = without_files(whole)
        assert with_files(bare, files) == whole
        assert not bare.fetched and [each.url for each in bare.files if each.url] == [*fetched]
        assert len(bare.files) - len(fetched) == 3 * (text in ("A" * 4096 + "BA==", "A+/" * 2000)), text[-10:]


def test_events_are_numbered_and_left_out_alike_however_they_come() -> None:
    events = [b"event: a\ndata: {}\n\n", b"data: 1\n\n", b"data: 2\n\ndata: 3\n\n"]
    whole = EventNumbers().apply(b"".join(events))
    parts = EventNumbers()
    assert b"".join(map(parts.apply, events)) == whole
    assert whole.startswith(b"id: 1\nevent: a\ndata: {}\n\nid: 2\n")
    for behind in range(6):
        rest = EventNumbers(behind)
        assert whole.endswith(b"".join(map(rest.apply, events)))
        assert EventNumbers(behind).apply(b"".join(events)).count(b"id: ") == max(0, 4 - behind)


@pytest.mark.parametrize(
    ("query", "last", "behind"), [(b"", None, 0), (b"", b"7", 7), (b"starting_after=3", b"7", 3), (b"", b"", 0)]
)
def test_where_a_client_goes_on(query: bytes, last: bytes | None, behind: int) -> None:
    headers = [] if last is None else [(b"last-event-id", last)]
    assert events_read({"query_string": query, "headers": headers}) == behind


@pytest.mark.parametrize(
    "query", [b"starting_after=-1", b"starting_after=", b"starting_after=1e3", b"starting_after=%C2%B2"]
)
def test_a_place_that_is_none_is_refused(query: bytes) -> None:
    with pytest.raises(InvalidRequest, match="starting_after"):
        events_read({"query_string": query, "headers": []})


class UnsteadyFolder(KeptFolder):
    """A folder on a file system that may lose its handle."""

    is_stale = False

    def found(self, now_s: float, model_hash: str, dtype: str) -> list[tuple[str, KeptRequest]]:
        if self.is_stale:
            raise OSError(errno.ESTALE, "Stale file handle")
        return super().found(now_s, model_hash, dtype)


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_request_stays_in_the_folder_if_the_last_instance_leaves_while_it_is_read(
    tmp_path: Path, leaves: bool
) -> None:
    """A request that this router will never serve is put aside. That no instance serves just now is no such reason."""
    of = UnsteadyFolder(KeptRequestsConfig(max_age_s=1e12), tmp_path / "kept")
    of.write(record(expires_s=1e12))
    limits, clock = [ModelLimits(2, 100), None] if leaves else [ModelLimits(2, 100)] * 4, FakeClock()
    model = SimpleNamespace(
        layout=KVLayout.uniform("h", 2, 2, 16, 16, "float32", 100), limits=lambda candidates: limits.pop(0)
    )
    router = SimpleNamespace(candidates=SERVING, why_unusable=lambda: "")
    routes = SimpleNamespace(running=RunningAnswers(lambda generation: None))

    async def parse_again(route: str, raw: bytearray, fetched: dict[str, bytes]) -> SimpleNamespace:
        return SimpleNamespace(why_not_kept="", asked=RequestOptions(priority=-1))

    def require_priority(tenant: str, priority: int) -> None:
        assert (tenant, priority) == ("t", -1)

    bodies = SimpleNamespace(parse_again=parse_again)
    kept = KeptRequests(of, model, router, bodies, routes, require_priority, clock)  # type: ignore[arg-type]
    kept.tick()
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
    assert [name.rpartition(".")[2] for name in names(tmp_path)] == ["request" if leaves else "refused"]
    if leaves:
        with pytest.raises(NoInstance):
            await kept.find("r", "t")
    else:
        asked = asyncio.ensure_future(kept.find("r", "t"))
        await asyncio.sleep(0)
        assert not asked.done(), "it may have been written just now"
        clock.advance(LOOK_S)
        kept.tick()
        with pytest.raises(UnknownRequest):
            await asked
        asked = asyncio.ensure_future(kept.find("r", "t"))
        clock.advance(LOOK_S)
        of.is_stale = True
        kept.tick()
        with pytest.raises(NoInstance, match="try again"):
            await asked
    await kept.write_all(1.0)
    with pytest.raises(NoInstance, match="the next one has the kept requests"):
        await kept.find("another that it has written", "t")


@pytest.mark.parametrize("known", [True, False])
async def test_a_request_goes_on_with_the_content_of_its_adapter_alone(tmp_path: Path, known: bool) -> None:
    """Another router may have another folder under the same name."""
    of = folder(tmp_path, max_age_s=1e12)
    of.write(record(expires_s=1e12, adapter_hash="ab"))
    adapters = (("sql", "ab" if known else "cd"),)
    layout = msgspec.structs.replace(KVLayout.uniform("h", 2, 2, 16, 16, "float32", 100), adapters=adapters)
    model = SimpleNamespace(
        layout=layout,
        limits=lambda candidates: ModelLimits(50, 100),
        require_known=lambda *given: None,
        ends_of=lambda sampling: frozenset(),
    )
    sent: list[GenerateRequest] = []

    def resume(request: GenerateRequest, tokens: list[int], wake: Callable[[], None]) -> None:
        sent.append(request)
        raise Capacity("full")  # it is tried again later

    router = SimpleNamespace(candidates=SERVING, why_unusable=lambda: "", resume=resume)
    decoder = SimpleNamespace(feed=lambda *given: None, finish_reason=None)
    routes = SimpleNamespace(running=RunningAnswers(lambda generation: None), decoder_of=lambda *given: decoder)

    options = OutputOptions(1, False, False, (), False, True, False)

    async def parse_again(route: str, raw: bytearray, fetched: dict[str, bytes]) -> ParsedRequest:
        return ParsedRequest([Prompt(b"", 0, "")], [SamplingParams(10)], options, asked=RequestOptions(adapter="sql"))

    bodies, none = SimpleNamespace(parse_again=parse_again), lambda *given: None
    kept = KeptRequests(of, model, router, bodies, routes, none, FakeClock())  # type: ignore[arg-type]
    kept.tick()
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
    assert [request.options.adapter for request in sent] == (["sql"] if known else [])
    assert [name.rpartition(".")[2] for name in names(tmp_path)] == ([] if known else ["refused"])


@pytest.mark.parametrize("change", ["", "processor", "file", "number"])
async def test_a_request_goes_on_with_its_own_images_alone(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What it has so far is of those. Their places are those of its tokens: a template may write another date now."""
    processor, image = b"p" * 16, picture(1)
    key = image_key(image, processor)
    parts = (ImagePart(key, ((1, 4, 0), (7, 2, 4)), (1, 2, 3)),)
    of = folder(tmp_path, max_age_s=1e12)
    told = images_told(parts, {key: image}, processor)
    ids = [*range(10)]
    of.write(with_pictures(image, expires_s=1e12, prompt_token_ids=ids, images=told, fetched={"https://a/b": b"file"}))
    now = b"q" * 16 if change == "processor" else processor
    seen = picture(2) if change == "file" else image
    found_now = ImagePart(image_key(seen, now), ((3, 4, 0), (9, 2, 4)), (1, 2, 3))
    images = () if change == "number" else (found_now,)
    model = SimpleNamespace(
        layout=KVLayout.uniform("h", 2, 2, 16, 16, "float32", 100),
        limits=lambda candidates: ModelLimits(50, 100),
        require_known=lambda *given: None,
        ends_of=lambda sampling: frozenset(),
    )
    sent: list[GenerateRequest] = []

    def resume(request: GenerateRequest, tokens: list[int], wake: Callable[[], None]) -> None:
        sent.append(request)
        raise Capacity("full")  # it is tried again later

    router = SimpleNamespace(candidates=SERVING, why_unusable=lambda: "", resume=resume)
    decoder = SimpleNamespace(feed=lambda *given: None, finish_reason=None)
    routes = SimpleNamespace(running=RunningAnswers(lambda generation: None), decoder_of=lambda *given: decoder)
    options = OutputOptions(1, False, False, (), False, True, False)

    async def parse_again(route: str, raw: bytearray, fetched: dict[str, bytes]) -> ParsedRequest:
        assert b64encode(image) in raw and fetched == {"https://a/b": b"file"}
        prompt, files = Prompt(b"", 0, "", images=images), {each.key: seen for each in images}
        return ParsedRequest([prompt], [SamplingParams(10)], options, files=files, image_fingerprint=now)

    bodies, none = SimpleNamespace(parse_again=parse_again), lambda *given: None
    kept = KeptRequests(of, model, router, bodies, routes, none, FakeClock())  # type: ignore[arg-type]
    kept.tick()
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
    says = {"processor": "another image processor", "file": "image 1 is another", "number": "were 1 images, and are 0"}
    if change:
        assert not sent and says[change] in caplog.text
    else:
        assert [(request.images, request.files) for request in sent] == [(parts, {key: image})]


async def test_a_clock_that_jumps_forward_removes_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, clock = folder(tmp_path), FakeClock()
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    layout = KVLayout.uniform("h", 2, 2, 16, 16, "float32", 100)
    model = SimpleNamespace(layout=layout, limits=lambda candidates: ModelLimits(2, 100))
    router = SimpleNamespace(candidates=SERVING, why_unusable=lambda: "")
    routes = SimpleNamespace(running=RunningAnswers(lambda generation: None))

    async def parse_again(route: str, raw: bytearray, fetched: dict[str, bytes]) -> SimpleNamespace:
        raise Capacity("the body processes are busy")  # the file stays for the next look

    bodies, none = SimpleNamespace(parse_again=parse_again), cast(Any, None)
    kept = KeptRequests(of, model, router, bodies, routes, none, clock)  # type: ignore[arg-type]
    of.write(record(expires_s=NOW_S + 10))
    taken = cast(Any, SimpleNamespace(record=record(expires_s=NOW_S + 10), source=object(), readers=[]))
    kept._taken.append(taken)

    async def look() -> list[str]:
        clock.advance(LOOK_S)
        kept.tick()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
        return [name.rpartition(".")[2] for name in names(tmp_path)]

    monkeypatch.setattr(time, "time", lambda: NOW_S + 10 * 86400)
    assert await look() == ["request"] and kept._taken == [taken]
    kept._taken.clear()  # dropping it needs a whole one
    clock.advance(10)
    assert await look() == [], "its time has passed"
