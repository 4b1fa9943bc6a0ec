"""Files and batches of a real router, by OpenAI's own client, and `chitu batch`: killed anywhere, cut off by a full
disk, shared by processes and routers, every line is answered once."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from nursery import forked_router
from support.router_process import RouterUnderTest, wait_until

from chitu.tools.make_model import make_model

pytestmark = pytest.mark.timeout(120)
WAIT_S = 60.0
OVER = ("completed", "failed", "expired", "cancelled")
KEYS = {"CHITU_API_KEYS": "key-of-one,key-of-two"}
MAX_NEW = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", layers=2)


@contextmanager
def running(
    folder: Path, model: Path, overrides: Sequence[str] = (), step_s: float = 0.0, **more: Any
) -> Iterator[RouterUnderTest]:
    folder.mkdir(exist_ok=True)
    settings = ["model.served_name=m", "dp_config.router.batches.max_in_flight=8", *overrides]
    with forked_router(folder, model, settings, **more) as router:
        router.start_worker("P0,D0", "--step-s", str(step_s))
        yield router


def client_of(router: RouterUnderTest, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=router.url + "/v1", api_key=key, max_retries=0)


def line(i: int, **body: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": "hello", "max_tokens": MAX_NEW, "ignore_eos": True} | body
    return {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}


def upload(client: openai.OpenAI, lines: Sequence[Any], **more: Any) -> str:
    data = "\n".join(map(json.dumps, lines)).encode()
    return client.files.create(file=("in.jsonl", data), purpose="batch", **more).id


def begin(client: openai.OpenAI, lines: Sequence[Any], window: str = "24h", **more: Any) -> str:
    create: Any = client.batches.create
    made = create(input_file_id=upload(client, lines), endpoint="/v1/completions", completion_window=window, **more)
    return str(made.id)


def ended(client: openai.OpenAI, name: str) -> Any:
    found: list[Any] = []

    def is_over() -> bool:
        found[:] = [client.batches.retrieve(name)]
        return found[0].status in OVER

    wait_until(is_over, WAIT_S, lambda: found)
    return found[0]


def answers(client: openai.OpenAI, batch: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the lines of the output file and of the error file."""
    names = (batch.output_file_id, batch.error_file_id)
    texts = [client.files.content(name).text if name else "" for name in names]
    output, errors = ([json.loads(raw) for raw in text.splitlines()] for text in texts)
    return output, errors


def counts_of(client: openai.OpenAI, name: str) -> int:
    counts = client.batches.retrieve(name).request_counts
    assert counts is not None
    return counts.completed


def ids(*parts: list[dict[str, Any]]) -> Counter[str]:
    return Counter(each["custom_id"] for part in parts for each in part)


def all_of(count: int) -> Counter[str]:
    return Counter(f"r{i}" for i in range(count))


def num_requests(router: RouterUnderTest) -> int:
    text = httpx.get(router.url + "/metrics", timeout=60.0).text
    found = re.search(r"^chitu_requests_total (\S+)", text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def test_the_official_client_gets_an_answer_for_each_line(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "batches"
    with running(tmp_path, model, [f"dp_config.router.batches.dir={folder}"], env=KEYS) as router:
        client = client_of(router, "key-of-one")
        lines = [line(i, model="m" if i % 5 else "other") for i in range(50)]
        chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        name = begin(client, lines, metadata={"a": "b"})
        batch = ended(client, name)
        assert (batch.status, batch.metadata, batch.errors) == ("completed", {"a": "b"}, None)
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (50, 40, 10)
        output, errors = answers(client, batch)
        assert ids(output, errors) == all_of(50) and len(output) == 40
        assert {each["response"]["body"]["usage"]["completion_tokens"] for each in output} == {MAX_NEW}
        assert {each["response"]["status_code"] for each in errors} == {404}
        assert errors[0]["response"]["body"]["error"]["code"] == "model_not_found"

        # Other routes, and what they refuse is in the error file, too.
        line_of_chat = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": chat}
        file = upload(client, [line_of_chat, line_of_chat | {"custom_id": "d", "body": {}}])
        made = client.batches.create(input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h")
        output, errors = answers(client, ended(client, made.id))
        assert output[0]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
        assert errors[0]["response"]["status_code"] == 400

        # Lists, pages, another key's view, deletion.
        assert [each.id for each in client.batches.list(limit=1)] == [made.id, name]
        assert {each.purpose for each in client.files.list()} == {"batch", "batch_output"}
        assert [each.id for each in client.files.list(purpose="batch", order="asc")][1] == file
        other = client_of(router, "key-of-two")
        assert not other.files.list().data and not other.batches.list().data
        for call in (other.files.retrieve, other.files.delete, other.files.content):
            with pytest.raises(openai.NotFoundError):
                call(file)
        with pytest.raises(openai.NotFoundError):
            other.batches.cancel(name)
        with pytest.raises(openai.NotFoundError):
            other.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h")
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(name)
        assert client.files.delete(file).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(file)
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_what_is_wrong_is_said_before_anything_is_kept(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "batches"
    limits = ["max_file_mb=1", "max_lines=20", "max_files=4"]
    overrides = [f"dp_config.router.batches.{each}" for each in (f"dir={folder}", *limits)]
    with running(tmp_path, model, overrides) as router:
        client = client_of(router)
        url = router.url + "/v1/files"
        with pytest.raises(openai.APIStatusError) as failure:  # 2 MiB
            client.files.create(file=("a", b"x" * (2 << 20)), purpose="batch")
        assert failure.value.status_code == 413 and "max_file_mb" in failure.value.message
        chunked = (b"x" * 65536 for _ in range(40))
        head = {"content-type": "multipart/form-data; boundary=b"}
        begun = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
        reply = httpx.post(url, content=(part for part in (begun, *chunked)), headers=head, timeout=60.0)
        assert reply.status_code == 413
        for form, says in (
            ({"files": {"file": ("a", b"x")}}, "purpose"),
            ({"files": {"file": ("a", b"x")}, "data": {"purpose": "fine-tune"}}, "fine-tune"),
            ({"files": {"file": ("a", b"")}, "data": {"purpose": "batch"}}, "empty"),
            ({"files": {"other": ("a", b"x")}, "data": {"purpose": "batch"}}, "other"),
            ({"files": {"file": ("a", b"x")}, "data": {"purpose": "batch", "expires_after[seconds]": "0"}}, "seconds"),
            ({"json": {}}, "multipart"),
            ({"content": b"--b\r\n", "headers": head}, "form is broken"),
        ):
            reply = httpx.post(url, **form)
            assert reply.status_code == 400 and says in reply.json()["error"]["message"], reply.text
        assert not list(folder.iterdir())

        for lines, code in (
            ([line(0), line(0)], "invalid_line"),
            ([line(i) for i in range(21)], "too_many_lines"),
            ([line(0) | {"url": "/v1/nothing"}], "invalid_line"),
        ):
            batch = ended(client, begin(client, lines))
            assert (batch.status, batch.errors.data[0].code) == ("failed", code)
            client.files.delete(batch.input_file_id)
        with pytest.raises(openai.BadRequestError, match="endpoint"):
            client.batches.create(input_file_id="file-1", endpoint="/v1/moderations", completion_window="24h")
        with pytest.raises(openai.NotFoundError):
            client.batches.create(input_file_id="../a", endpoint="/v1/completions", completion_window="24h")
        for _ in range(4):  # batches that are over make room
            upload(client, [line(0)])
        assert not client.batches.list().data
        with pytest.raises(openai.APIStatusError, match="max_files") as failure:
            upload(client, [line(0)])
        assert failure.value.status_code == 507
    with running(tmp_path / "none", model) as router, pytest.raises(openai.BadRequestError, match=r"batches\.dir"):
        client_of(router).batches.list()


def test_a_router_killed_in_the_middle_answers_each_line_once(tmp_path: Path, model: Path) -> None:
    """Also after a regular end, which waits for no line."""
    overrides = [f"dp_config.router.batches.dir={tmp_path / 'batches'}"]
    with running(tmp_path, model, overrides, step_s=0.01) as router:
        name = begin(client_of(router), [line(i) for i in range(240)])
        for number, part in ((signal.SIGKILL, 40), (signal.SIGTERM, 120)):

            def has_part(least: int = part) -> bool:
                return counts_of(client_of(router), name) >= least

            wait_until(has_part, WAIT_S, "some answers")
            os.kill(router.pid, number)
            router.process.wait()
            router.start()
            wait_until(lambda: {"P0", "D0"} <= router.members(), WAIT_S, "P and D to join again")
            assert client_of(router).batches.retrieve(name).status == "in_progress"
        client = client_of(router)
        batch = ended(client, name)
        output, errors = answers(client, batch)
        assert (ids(output), errors) == (all_of(240), [])
        assert batch.request_counts.completed == 240


def test_two_routers_with_one_folder_send_no_line_twice(tmp_path: Path, model: Path) -> None:
    shared = f"dp_config.router.batches.dir={tmp_path / 'batches'}"
    with ExitStack() as stack:
        routers = [stack.enter_context(running(tmp_path / str(i), model, [shared], 0.005)) for i in range(2)]
        client, other = map(client_of, routers)
        names = [begin(client, [line(i) for i in range(60)]) for _ in range(4)]
        for name in names:
            output, errors = answers(other, ended(other, name))
            assert (ids(output), errors) == (all_of(60), [])
        assert sum(map(num_requests, routers)) == 240


def test_a_batch_is_cancelled_expires_and_leaves_no_line_unanswered(tmp_path: Path, model: Path) -> None:
    overrides = [f"dp_config.router.batches.dir={tmp_path / 'batches'}"]
    with running(tmp_path, model, overrides, step_s=0.02) as router:
        client = client_of(router)
        endless = [line(i, max_tokens=2 if i < 8 else 2000) for i in range(30)]
        expiring, name = (
            begin(
                client,
                endless,
                "2s",
                output_expires_after={
                    "anchor": "created_at",
                    "seconds": 3600,
                },
            ),
            begin(client, endless),
        )
        wait_until(lambda: counts_of(client, name) >= 8, WAIT_S, "short lines")
        assert client.batches.cancel(name).status == "cancelling"
        for each, status in ((name, "cancelled"), (expiring, "expired")):
            batch = ended(client, each)
            output, errors = answers(client, batch)
            assert batch.status == status
            assert ids(output, errors) == all_of(30) and len(output) == batch.request_counts.completed == 8
            assert {each["error"]["code"] for each in errors} == {f"batch_{status}"}
        assert client.files.retrieve(batch.output_file_id).expires_at - batch.expired_at == 3600
        wait_until(
            lambda: httpx.get(router.url + "/health", timeout=60.0).json()["in_flight"] == 0,
            WAIT_S,
            "no request to run",
        )
        short = upload(client, [line(0)], expires_after={"anchor": "created_at", "seconds": 1})

        def is_gone() -> bool:
            return short not in [file.id for file in client.files.list()]

        wait_until(is_gone, WAIT_S, "the file to expire")


def test_slow_batches_of_some_keys_do_not_hold_up_those_of_another(tmp_path: Path, model: Path) -> None:
    """Neither their places nor their lines in flight: those are shared as soon as another key has a batch."""
    keys = [f"key-of-{i}" for i in range(5)]
    overrides = [f"dp_config.router.batches.dir={tmp_path / 'batches'}"]
    with running(tmp_path, model, overrides, 0.02, env={"CHITU_API_KEYS": ",".join(keys)}) as router:
        clients = [client_of(router, key) for key in keys]
        endless = [line(i, max_tokens=4000) for i in range(20)]
        slow = [(clients[0], begin(clients[0], endless)) for _ in range(5)]

        def wait_for_runs(count: int) -> None:
            def statuses() -> Counter[str]:
                return Counter(client.batches.retrieve(name).status for client, name in slow)

            wait_until(lambda: statuses()["in_progress"] == count, WAIT_S, statuses)

        wait_for_runs(4)  # one key alone has all places
        slow += [(client, begin(client, endless)) for client in clients[1:4]]
        wait_for_runs(7)
        batch = ended(clients[4], begin(clients[4], [line(i) for i in range(3)]))
        assert (batch.status, batch.request_counts.completed) == ("completed", 3)
        assert sum(counts_of(client, name) for client, name in slow) == 0, "no slow line had to end for it"
        assert clients[0].batches.retrieve(slow[4][1]).status == "validating", "it waits for its own key's batches"


def size_of(folder: Path) -> int:
    return sum({facts.st_ino: facts.st_size for facts in map(os.stat, folder.iterdir())}.values())


def test_no_key_takes_the_folder_and_every_byte_in_it_counts(tmp_path: Path, model: Path) -> None:
    """Without instances, so that all batches wait."""
    folder = tmp_path / "batches"
    tmp_path.mkdir(exist_ok=True)
    limits = [f"dp_config.router.batches.{each}" for each in (f"dir={folder}", "max_mb=8", "max_files=12")]
    with forked_router(tmp_path, model, ["model.served_name=m", *limits], env=KEYS) as router:
        one, two = (client_of(router, key) for key in ("key-of-one", "key-of-two"))
        with pytest.raises(openai.APIStatusError, match="max_mb") as failure:
            for _ in range(20):
                file = one.files.create(file=("in.jsonl", b"x" * 900_000), purpose="batch").id
                one.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h")
                one.files.delete(file)
        assert failure.value.status_code == 507 and size_of(folder) <= 4 << 20
        for _ in range(3):
            upload(two, [line(0, user="x" * 900_000)])
        assert size_of(folder) <= 8 << 20
        with pytest.raises(openai.APIStatusError, match="max_files"):
            for _ in range(20):
                upload(one, [line(0)])
        upload(two, [line(0)])


@pytest.mark.by_hand
def test_a_batch_whose_answers_have_no_room_waits_for_it(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "batches"
    overrides = [f"dp_config.router.batches.{each}" for each in (f"dir={folder}", "max_mb=2")]
    with running(tmp_path, model, overrides, 0.02) as router:
        client = client_of(router)
        file = upload(client, [line(i) for i in range(400)])
        reserve = 128 << 10
        fill = b"x" * ((2 << 20) - size_of(folder) - reserve - 40_000)  # the answers have some 140,000
        filling = client.files.create(file=("in.jsonl", fill), purpose="batch").id
        made = client.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h")
        wait_until(lambda: "wait for room" in router.log, WAIT_S, lambda: router.log)
        batch = client.batches.retrieve(made.id)
        assert batch.status == "in_progress" and 0 < batch.request_counts.completed < 400
        wait_until(
            lambda: httpx.get(router.url + "/health", timeout=60.0).json()["in_flight"] == 0,
            WAIT_S,
            "no line to be sent",
        )
        client.files.delete(filling)
        output, errors = answers(client, ended(client, made.id))
        assert (ids(output), errors) == (all_of(400), [])


def test_a_batch_that_is_over_can_be_deleted_and_makes_room(tmp_path: Path, model: Path) -> None:
    """Its results stay until they are deleted, or are read and have to make room."""
    folder = tmp_path / "batches"
    overrides = [f"dp_config.router.batches.{each}" for each in (f"dir={folder}", "max_files=12")]
    with running(tmp_path, model, overrides, 0.02, env=KEYS) as router:
        client, other = (client_of(router, key) for key in ("key-of-one", "key-of-two"))
        url, head = router.url + "/v1/batches/", {"authorization": "Bearer key-of-one"}
        name = begin(client, [line(0), line(1, max_tokens=4000)])
        wait_until(lambda: counts_of(client, name) == 1, WAIT_S, "the short line")
        reply = httpx.delete(url + name, headers=head, timeout=60.0)
        assert reply.status_code == 409 and "in_progress: cancel it" in reply.json()["error"]["message"]
        client.batches.cancel(name)
        batch = ended(client, name)
        assert httpx.delete(url + name, headers={"authorization": "Bearer key-of-two"}, timeout=60.0).status_code == 404
        reply = httpx.delete(url + name, headers=head, timeout=60.0)
        assert (reply.status_code, reply.json()) == (200, {"id": name, "object": "batch", "deleted": True})
        assert (
            httpx.delete(url + name, headers=head, timeout=60.0).status_code == 404 and not client.batches.list().data
        )
        output, errors = answers(client, batch)
        assert ids(output, errors) == all_of(2)

        def wait_until_noted(count: int) -> None:
            wait_until(lambda: len(list(folder.glob("*.read"))) == count, WAIT_S, lambda: sorted(os.listdir(folder)))

        wait_until_noted(2)
        left = {file.id for file in client.files.list()}
        assert left == {batch.input_file_id, batch.output_file_id, batch.error_file_id}

        unread = ended(client, begin(client, [line(0)]))  # 6 of 6
        client.files.delete(unread.input_file_id)
        for _ in range(4):  # 5 + 4: in place of both files that were read, and of the batch
            upload(client, [line(0)])
        left = {file.id for file in client.files.list()}
        assert unread.output_file_id in left and len(left) == 6
        assert not {batch.output_file_id, batch.error_file_id} & left and not client.batches.list().data
        with pytest.raises(openai.APIStatusError, match="max_files"):
            upload(client, [line(0)])
        assert client.files.content(unread.output_file_id).text.count("\n") == 1
        wait_until_noted(1)
        upload(client, [line(0)])
        upload(other, [line(0)])


def test_a_line_has_the_bounds_of_the_key_that_made_its_batch(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "batches"
    bounds = ["api_key_salts=[t, t]", "api_key_min_priorities=[-10, 0]", f"batches.dir={folder}"]
    with running(tmp_path, model, [f"dp_config.router.{each}" for each in bounds], env=KEYS) as router:
        for key, status in (("key-of-one", 200), ("key-of-two", 400)):
            client = client_of(router, key)
            output, errors = answers(client, ended(client, begin(client, [line(0, priority=-10)])))
            assert [each["response"]["status_code"] for each in (*output, *errors)] == [status]
    assert not any(b"key-of-" in path.read_bytes() for path in folder.iterdir())


def test_a_full_disk_fails_the_batch_and_not_the_router(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "batches"
    with running(tmp_path, model, [f"dp_config.router.batches.dir={folder}"]) as router:
        client = client_of(router)
        limits = resource.prlimit(router.pid, resource.RLIMIT_FSIZE)
        file = upload(client, [line(i) for i in range(1000)])  # 130 kB; its answers would be 350 kB
        resource.prlimit(router.pid, resource.RLIMIT_FSIZE, (200_000, limits[1]))
        made = client.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h")
        batch = ended(client, made.id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "disk_full")
        output, _ = answers(client, batch)
        assert len(output) == batch.request_counts.completed > 100
        with pytest.raises(openai.APIStatusError) as failure:
            client.files.create(file=("a", b"x" * 300_000), purpose="batch")
        assert failure.value.status_code == 507
        assert client.completions.create(model="m", prompt="hello", max_tokens=2).usage is not None
        resource.prlimit(router.pid, resource.RLIMIT_FSIZE, limits)
        assert ended(client, begin(client, [line(0)])).status == "completed"


def test_the_command_killed_in_the_middle_goes_on(tmp_path: Path, model: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(line(i, model="m" if i else "other")) for i in range(300)))

    def num_answered() -> int:
        return target.read_bytes().count(b"\n") if target.exists() else 0

    with running(tmp_path, model, step_s=0.02) as router:  # 6 s for all, if nothing stops them
        command = [sys.executable, "-m", "chitu.cli", "batch", str(source), str(target), "--url", router.url]
        command += ["--concurrency", "8"]
        for number in (signal.SIGKILL, signal.SIGTERM):
            least = num_answered() + 50  # of this process, which has its handlers then
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            wait_until(lambda: num_answered() >= least, WAIT_S, "some answers")  # noqa: B023
            if number == signal.SIGKILL:
                process.send_signal(signal.SIGSTOP)  # else it may be done before the other one has begun
                second = subprocess.run(command, capture_output=True, text=True)
                assert second.returncode == 2 and "another `chitu batch`" in second.stderr
            process.send_signal(number)
            process.communicate()
            assert process.returncode == (-number if number == signal.SIGKILL else 130)
        last = subprocess.run(command, capture_output=True, text=True)
        assert last.returncode == 1 and "300 lines: 299 completed, 1 failed" in last.stderr
        found = [json.loads(raw) for raw in target.read_bytes().splitlines()]
        assert ids(found) == all_of(300)
        assert {path.name for path in tmp_path.glob("out*")} == {"out.jsonl"}
        before = num_requests(router)
        assert subprocess.run(command, capture_output=True).returncode == 1
        assert num_requests(router) == before
