"""`chitu chat` without a network: events cut at any place, status lines, conversations, examples."""

from __future__ import annotations

import io
import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from chitu.errors import ConfigError, DecodeLost, Internal
from chitu.http.answer.formats import DONE, AnswerFormat, AnswerHead, Delta, UsageCount
from chitu.http.ask.parsed import OutputOptions
from chitu.http.dialects.openai.answers import ChatFormat, CompletionFormat
from chitu.launch.router_client import Answer, AnswerReader, RouterClient, Usage
from chitu.net.client import EventParser
from chitu.protocol import LoadReport, StepRates
from chitu.protocol.account import PrefillTimes, RequestSnapshot, StageTimes, attempt_stages
from chitu.protocol.first_prompt import first_prompt
from chitu.protocol.snapshot import ClusterSnapshot, InstanceSnapshot
from chitu.tools.chat import (
    ChatOptions,
    ChatTerminal,
    Conversation,
    data_url,
    is_right,
    printable,
    recall_example,
    shortened,
    verdict,
)
from chitu.tools.trace import (
    CLUSTER_COLUMNS,
    byte_text,
    cluster_line,
    cluster_rows,
    find_request,
    span_text,
    trace_lines,
)

# -------------------------------------------------------------------------------------------------------------- events


def parts_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(places)]


def test_events_are_those_of_the_standard() -> None:
    stream = (
        b": a comment\ndata: one\n\nevent: x\ndata:two\ndata:  three\nid: 7\n\n\n\ndata: four\r\n\r\ndata\n\ndata: cut"
    )
    assert EventParser().feed(stream) == ["one", "two\n three", "four", ""]


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1), min_size=1),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 10_000)),
)
def test_events_do_not_depend_on_where_the_bytes_are_cut(texts: list[str], end: bytes, cuts: list[int]) -> None:
    stream = b"".join(b"data: %b%b%b" % (text.encode(), end, end) for text in texts)
    parser = EventParser()
    assert [event for part in parts_of(stream, cuts) for event in parser.feed(part)] == texts


HEAD = AnswerHead("r", 0, "m")
OPTIONS = OutputOptions(1, True, True, (), False, True, False)


def streamed(form: AnswerFormat, texts: list[str]) -> bytes:
    """Return a response as the router writes it."""
    deltas = [form.delta(0, Delta(text, [])) for text in texts]
    end = [form.last(0, Delta("!", [], reason="stop")), form.usage(UsageCount(7, 3, 0)), DONE]
    return b"".join([form.opening(0), *deltas, *end])


@pytest.mark.parametrize("form", [ChatFormat, CompletionFormat])
@given(texts=st.lists(st.text(st.characters(codec="utf-8"))), cuts=st.lists(st.integers(0, 10_000)))
def test_an_answer_is_what_the_router_streamed(
    form: type[ChatFormat | CompletionFormat], texts: list[str], cuts: list[int]
) -> None:
    answer = Answer("r")
    reader = AnswerReader(answer)
    pieces = [reader.feed(part) for part in parts_of(streamed(form(HEAD, OPTIONS), texts), cuts)]
    assert answer.text == "".join(pieces) == "".join(texts) + "!"
    assert (answer.usage, answer.finish_reason, answer.is_complete) == (Usage(7, 3), "stop", True)
    assert answer.error is None


def test_an_error_in_the_middle_keeps_what_came() -> None:
    form = ChatFormat(HEAD, OPTIONS)
    answer = Answer("r")
    piece = AnswerReader(answer).feed(form.delta(0, Delta("half an", [])) + form.error(DecodeLost("D0 is gone")))
    assert piece == answer.text == "half an"
    assert isinstance(answer.error, DecodeLost)
    assert answer.error.message == "D0 is gone"
    assert answer.is_complete
    assert answer.usage is None


@pytest.mark.parametrize("data", ["{", "[]", '{"choices": 3}', '{"choices": [{"delta": {"content": 5}}]}'])
def test_an_event_that_is_no_answer_is_an_error_of_one_line(data: str) -> None:
    with pytest.raises(Internal, match="no part of an answer"):
        AnswerReader(Answer("r")).feed(f"data: {data}\n\n".encode())


# -------------------------------------------------------------------------------------------------------- status lines

STAGES = attempt_stages(
    100.0, 100.23, 100.4, StageTimes(PrefillTimes(0.0032, 0.21, 0.0031), 0.002, 0.22, 0.2195, 0.33), is_pair=True
)


def request(**fields: Any) -> RequestSnapshot:
    values: dict[str, Any] = {
        "room": "r",
        "request_id": "mine",
        "prefill": "P0",
        "decode": "D1",
        "state": "finished",
        "prompt_tokens": 1012,
        "output_tokens": 12,
        "created_at_s": 100.0,
        "first_token_at_s": 100.23,
        "ended_at_s": 100.4,
        "kv_bytes": 1_258_291,
        "stages": STAGES,
        "error": "",
    }
    return RequestSnapshot(**{**values, **fields})


def snapshot(*requests: RequestSnapshot, has_template: bool = True) -> ClusterSnapshot:
    busy = LoadReport(waiting=3, pages_total=512, pages_free=472, tokens=2024, bytes_moved=2_516_582)
    idle = LoadReport(pages_total=512, pages_free=512)
    return ClusterSnapshot(
        model="m",
        version="0",
        max_model_len=2048,
        page_size=16,
        transport="auto",
        time_s=101.0,
        router_incarnation="1",
        in_flight=0,
        instances=(
            InstanceSnapshot("P0", "prefill", "up", "127.0.0.1", 11, "1", busy),
            InstanceSnapshot("D0", "decode", "draining", "127.0.0.1", 12, "2", idle),
            InstanceSnapshot("D1", "decode", "down", "127.0.0.1", 0, "", None),
        ),
        requests=requests,
        first_prompt=first_prompt("m", has_template),
    )


def lines_of(shown: RequestSnapshot) -> list[str]:
    found = find_request(snapshot(request(request_id="other"), shown, request(request_id="later")), "mine")
    assert found is not None
    return trace_lines(found)


def test_a_finished_request_shows_where_it_ran_and_where_its_time_went() -> None:
    assert lines_of(request()) == [
        "P0 -> D1 · 1012 prompt + 12 output tokens · 1.2 MiB KV moved · 100 tokens/s",
        "admission 2.0 ms · queue 1.2 ms · compute 210 ms · transfer 3.1 ms · first step 3.7 ms · decode 110 ms · "
        "messages 70 ms · first token 230 ms · total 400 ms",
    ]


def test_what_was_cached_is_said_beside_what_was_moved() -> None:
    run = "P0 -> D1 · 1012 prompt + 12 output tokens · 960 cached · 1.2 MiB KV moved · 100 tokens/s"
    assert lines_of(request(cached_tokens=960))[0] == run


def test_drafts_are_said_by_source_where_there_were_any() -> None:
    run = lines_of(request(drafts=(("prediction", 10, 8), ("text", 3, 1))))[0]
    assert run == f"{lines_of(request())[0]} · drafts 8/10 prediction, 1/3 text"


def test_an_instance_that_drafts_shows_the_tokens_of_a_row() -> None:
    load = LoadReport(pages_total=512, pages_free=512, tokens=90, drafts={"text": (9, 7)})
    load = msgspec.structs.replace(load, rates=StepRates(tokens_a_row=2.14))
    drafting = InstanceSnapshot("D0", "decode", "up", "127.0.0.1", 12, "2", load)
    shown = msgspec.structs.replace(snapshot(), instances=(drafting,))
    assert cluster_line(shown) == "D0 up idle 0/512 pages ×2.1"
    assert dict(zip(CLUSTER_COLUMNS, cluster_rows(shown)[0], strict=True))["tokens"] == "90 ×2.1"


def test_a_unified_instance_moves_nothing() -> None:
    report = StageTimes(PrefillTimes(0.0012, 0.21), first_token_s=0.2112, total_s=0.3212)
    stages = attempt_stages(100.0, 100.23, 100.4, report, is_pair=False)
    assert lines_of(request(prefill=None, decode="U0", kv_bytes=0, stages=stages)) == [
        "U0 · 1012 prompt + 12 output tokens · 100 tokens/s",
        "queue 1.2 ms · compute 210 ms · first step 0.0 ms · decode 110 ms · messages 79 ms · first token 230 ms · "
        "total 400 ms",
    ]


def test_a_request_without_an_end_shows_what_is_known() -> None:
    running = {"stages": None, "kv_bytes": 0, "ended_at_s": None}
    assert lines_of(request(**running, state="decode")) == [
        "P0 -> D1 · 1012 prompt + 12 output tokens · decode",
        "first token 230 ms",
    ]
    assert lines_of(request(**running, state="prefill", first_token_at_s=None, output_tokens=0)) == [
        "P0 -> D1 · 1012 prompt + 0 output tokens · prefill"
    ]
    lost = request(state="failed", error="decode_lost", stages=None, kv_bytes=0, output_tokens=1)
    assert lines_of(lost) == [
        "P0 -> D1 · 1012 prompt + 1 output tokens · decode_lost",
        "first token 230 ms · total 400 ms",
    ]


def test_the_newest_request_of_an_id_counts_and_an_unknown_one_is_not_found() -> None:
    found = find_request(snapshot(request(decode="D0"), request(decode="D1")), "mine")
    assert found is not None
    assert found.decode == "D1"
    assert find_request(snapshot(request()), "somebody else") is None


def test_the_cluster_fits_a_line_and_a_table() -> None:
    assert cluster_line(snapshot()) == "P0 up 3 waiting 40/512 pages · D0 draining idle 0/512 pages · D1 down"
    rows = [dict(zip(CLUSTER_COLUMNS, row, strict=True)) for row in cluster_rows(snapshot())]
    assert [(row["instance"], row["status"], row["pages"]) for row in rows] == [
        ("P0", "up", "40/512"),
        ("D0", "draining", "0/512"),
        ("D1", "down", ""),
    ]
    assert (rows[0]["tokens"], rows[0]["moved"]) == ("2024", "2.4 MiB")


def test_an_instance_that_has_just_joined_shows_no_load_yet() -> None:
    joined = InstanceSnapshot("P0", "prefill", "up", "127.0.0.1", 11, "1", LoadReport())
    fresh = msgspec.structs.replace(snapshot(), instances=(joined,))
    assert cluster_line(fresh) == "P0 up"
    assert cluster_rows(fresh) == [("P0", "up", "127.0.0.1", "11", *[""] * 6)]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 51, "2048.0 TiB"),
    ],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert byte_text(count) == text


@pytest.mark.parametrize(
    ("span_s", "text"),
    [(0.00042, "0.4 ms"), (0.00996, "10 ms"), (0.0144, "14 ms"), (0.9996, "1.00 s"), (75, "75.00 s")],
)
def test_spans_for_people(span_s: float, text: str) -> None:
    assert span_text(span_s) == text


# ------------------------------------------------------------------------------------------------------- conversations


def test_a_question_carries_the_conversation_so_far() -> None:
    conversation = Conversation(ChatOptions("m", system="be brief", max_tokens=9, temperature=0.5))
    conversation.keep("one?", "1")
    conversation.keep("lost?", "")
    body = conversation.body("two?")
    assert [(m["role"], m["content"]) for m in body.pop("messages")] == [
        ("system", "be brief"),
        ("user", "one?"),
        ("assistant", "1"),
        ("user", "two?"),
    ]
    assert body == {"model": "m", "max_tokens": 9, "temperature": 0.5, "separate_reasoning": False}
    assert "max_tokens" not in Conversation(ChatOptions("m")).body("x")


def test_a_question_shows_its_images_and_so_does_the_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/image` is for the next question alone; a file that cannot be read ends no conversation."""
    files = [tmp_path / name for name in ("a b.png", "c.jpg", "none")]
    files[0].write_bytes(b"first")
    files[1].write_bytes(b"second")
    lines = iter(
        [f"/image {files[0]}", "what?", f"/image {tmp_path / 'nowhere.png'}", "/image", f"/image {files[1]}", "and?"]
    )
    bodies: list[dict[str, Any]] = []

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    def stream(path: str, body: dict[str, Any], write: Any) -> Answer:
        bodies.append(body)
        return Answer("id", "yes")

    monkeypatch.setattr("builtins.input", read)
    client = SimpleNamespace(url="http://a:1", cluster=lambda: snapshot(has_template=True), stream=stream)
    notes, conversation = io.StringIO(), Conversation(ChatOptions("m"), images=[data_url(str(files[1]))])
    terminal = ChatTerminal(cast(Any, client), conversation, io.StringIO(), Console(file=notes, width=1000))
    assert terminal.converse() == 0
    first, second = "data:image/png;base64,Zmlyc3Q=", "data:image/jpeg;base64,c2Vjb25k"

    def shown(text: str, *urls: str) -> list[dict[str, Any]]:
        return [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]

    asked = shown("what?", second, first)
    assert [body["messages"][-1]["content"] for body in bodies] == [asked, shown("and?", second)]
    assert bodies[1]["messages"][0]["content"] == asked
    assert "nowhere.png cannot be read: No such file" in notes.getvalue()
    assert not conversation.images
    files[2].touch()
    for path, says in ((files[2], "none is empty"), (tmp_path, "cannot be read: Is a directory")):
        with pytest.raises(ConfigError, match=says):
            data_url(str(path))


def test_an_example_is_shown_short_with_its_question_and_is_checked() -> None:
    example = recall_example(random.Random(1), 1000, 2048)
    text = shortened(example.prompt)
    assert len(text) < 300 < len(example.prompt)
    assert example.prompt.startswith(text.split(" ... ")[0])
    question = example.prompt.rpartition(". ")[2]
    assert text.endswith(f". {question}")
    sentences = example.prompt.count(". ") + 1
    assert f"... {sentences - 4} more sentences ..." in text
    assert is_right(example, example.answer)
    assert verdict(example, example.answer) == f"✓ {example.value} is right"
    assert not is_right(example, "I do not know.")
    assert verdict(example, "I do not know.") == f"✗ expected: {example.answer}"


def test_an_example_fits_the_context() -> None:
    def length(tokens: int, max_model_len: int | None) -> int:
        return len(recall_example(random.Random(1), tokens, max_model_len).prompt)

    assert length(2000, 300) < length(300, None) < length(2000, None)
    assert length(5, None) == length(2000, 10), "one fact is the least"


def test_a_short_list_is_shown_whole() -> None:
    prompt = "The red fox has number 1. The blue cat opens door 2. Which door does the blue cat open?"
    assert shortened(prompt) == prompt


@pytest.mark.parametrize("has_template", [True, False])
def test_a_question_is_suggested_if_the_model_can_chat(has_template: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    client = SimpleNamespace(url="http://a:1", cluster=lambda: snapshot(has_template=has_template))
    notes = io.StringIO()
    terminal = ChatTerminal(cast(Any, client), Conversation(ChatOptions("m")), io.StringIO(), Console(file=notes))
    assert terminal.converse() == 0
    assert ("for example: What is the capital of France?" in notes.getvalue()) is has_template


def test_an_answer_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x9bc\rd\te\nf é✓") == "a\ufffd[2Jb\ufffdc\ufffdd\te\nf é✓"


# -------------------------------------------------------------------------------------------------------------- client


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:21003", "http://127.0.0.1:21003"),
        ("http://127.0.0.1:21003/v1/", "http://127.0.0.1:21003"),
        ("https://example.org/chitu/v1", "https://example.org/chitu"),
    ],
)
def test_a_base_url_is_taken_with_and_without_v1(url: str, shown: str) -> None:
    assert RouterClient(url).url == shown


@pytest.mark.parametrize("url", ["127.0.0.1:21003", "ftp://host", "http://", "http://host:port", "localhost"])
def test_what_is_no_url_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match="no URL"):
        RouterClient(url)


@pytest.mark.parametrize("key", ["two\r\nlines", "clé"])
def test_a_key_that_no_header_can_carry_is_a_configuration_error(key: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        RouterClient("http://127.0.0.1:1", key)
