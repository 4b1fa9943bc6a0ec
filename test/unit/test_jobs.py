"""From a body to a parsed request: what is refused before anything is sent, what is not tokenised, what is dropped."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.clock import FakeClock

from chitu.assets import TINY_MODEL_DIR
from chitu.config.schema import ModelConfig, RouterConfig
from chitu.errors import ChituError, ContextLengthExceeded, InvalidRequest, NoInstance
from chitu.http.answer.generate import GenerationRoutes
from chitu.http.ask.answer_size import ENTRY_BYTES, MAX_ANSWER_BYTES
from chitu.http.ask.bodies import LARGE_BODY_BYTES, MAX_TOKENS
from chitu.http.ask.parsed import ClusterFacts, ParsedRequest
from chitu.http.ask.reader import BodyReader, BodyTask, BodyWork, JudgeGrammar, ReadBody
from chitu.http.ask.served_model import ModelLimits, ServedModel
from chitu.http.table import READERS
from chitu.http.wire.exchange import Exchange
from chitu.net.http import ClientGone
from chitu.net.link import MAX_KEPT_BYTES
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, pack_logprobs, unpack_i32
from chitu.protocol.weights import Weights
from chitu.router.generation import GenerateRequest, Generation

MAX_LEN = 64


class Client:
    """A stand-in for an `Exchange`."""

    def __init__(self) -> None:
        self.is_client_gone = False
        self.scope: dict[str, Any] = {}
        self._on_gone: Callable[[], None] | None = None

    def call_when_gone(self, on_gone: Callable[[], None] | None) -> None:
        self._on_gone = on_gone

    def leave(self) -> None:
        self.is_client_gone = True
        if self._on_gone is not None:
            self._on_gone()

    @property
    def exchange(self) -> Exchange:
        return cast(Exchange, self)


class Away:
    """A body process that works at once, or waits for `may_end` if that is set."""

    def __init__(self, work: BodyWork) -> None:
        self._work = work
        self.tasks: list[BodyTask] = []
        self.clients: list[bytes] = []
        self.may_end: asyncio.Event | None = None
        self.num_unwanted = 0

    async def do(self, task: BodyTask, raw: bytes | bytearray, client: bytes = b"") -> Any:
        self.tasks.append(task)
        self.clients.append(client)
        try:
            if self.may_end is not None:
                await self.may_end.wait()
        except asyncio.CancelledError:
            self.num_unwanted += 1
            raise
        if isinstance(task, JudgeGrammar):
            self._work.judge(task)
            return None
        return self._work.read(task, raw, lambda: None)


class World:
    """A parser for a model with `vocab_size` embeddings, and a record of what it tokenised."""

    def __init__(
        self, vocab_size: int = 100_000, serving: bool = True, path: Path = TINY_MODEL_DIR, max_len: int = MAX_LEN
    ) -> None:
        self.model = ServedModel.load(ModelConfig(path=str(path), served_name="m"), 0)
        layout = SimpleNamespace(vocab_size=vocab_size)
        kinds: dict[str, Any] = {"layout": layout, "served_layout": layout, "weights": Weights(), "sees_images": True}
        instance = SimpleNamespace(max_model_len=max_len, **kinds)
        candidates = SimpleNamespace(serving=[instance] if serving else [], why_unusable=lambda: "nobody is there")
        self.rejected: list[ChituError] = []
        router = SimpleNamespace(candidates=candidates, rejected=lambda e: self.rejected.append(e) or e)
        self.work = BodyWork(self.model, False, READERS)
        self.away = Away(self.work)
        self.reader = BodyReader(
            *(self.model, cast(PDRequestRouter, router), self.away, False),
            *(lambda scope: bytes(scope.get("key", b"")), READERS),
        )
        self.client = Client()
        self.tokenized: list[str] = []
        self.on_tokenized: Callable[[], None] = lambda: None
        tokenizer = self.model.tokenizer
        encode_batch, encode = tokenizer.encode_batch, tokenizer.encode

        def counting_batch(texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
            self.tokenized += texts
            return encode_batch(texts, add_special_tokens)

        def counting(text: str, add_special_tokens: bool = True) -> list[int]:
            self.tokenized.append(text)
            ids = encode(text, add_special_tokens)
            self.on_tokenized()
            return ids

        tokenizer.encode_batch = counting_batch  # type: ignore[method-assign,assignment]
        tokenizer.encode = counting  # type: ignore[method-assign]

    def completion(self, prompt: Any, **fields: Any) -> ParsedRequest:
        raw = json.dumps({"model": "m", "prompt": prompt, **fields}).encode()
        return self.parsed("completion", raw)

    def chat(self, text: str, **fields: Any) -> ParsedRequest:
        messages = [{"role": "user", "content": text}]
        raw = json.dumps({"model": "m", "messages": messages, "max_tokens": 1, **fields}).encode()
        return self.parsed("chat", raw)

    def parsed(self, route: str, raw: bytes) -> ParsedRequest:
        return asyncio.run(self.reader.parse(route, bytearray(raw), self.client.exchange))


def test_a_token_that_the_model_has_no_embedding_for_is_refused_whoever_made_it() -> None:
    world = World()
    tokenizer = world.model.tokenizer
    last = max(tokenizer.encode("what does <|pad|> mean?<|im_end|>"))
    for enough in (World(last + 1), World(tokenizer.vocab_size)):
        assert enough.completion("what does <|pad|> mean?<|im_end|>").prompts
    too_small = World(last)
    for body, param in (
        (lambda: too_small.completion("what does <|pad|> mean?<|im_end|>"), "prompt"),
        (lambda: too_small.completion(["a fine one", "<|pad|><|im_end|>"]), "prompt"),
        (lambda: too_small.completion([1, last]), "prompt"),
        (lambda: too_small.completion([[1], [1, last]]), "prompt"),
        (lambda: too_small.completion([1, -1]), "prompt"),
        (lambda: too_small.chat("what does <|pad|> mean?<|im_end|>"), "messages"),
    ):
        with pytest.raises(InvalidRequest, match=f"0 to {last - 1}") as raised:
            body()
        assert raised.value.param == param


def test_what_cannot_fit_the_context_is_refused_before_it_is_tokenized() -> None:
    world = World()
    with pytest.raises(ContextLengthExceeded):
        world.completion("a" * 1_000_000)
    assert world.tokenized == []


def test_of_a_text_that_might_fit_no_more_is_tokenized_than_shows_that_it_does_not() -> None:
    world = World()
    world.model.tokenizer._longest_chars = None  # as for a tokenizer whose longest token is unknown
    with pytest.raises(ContextLengthExceeded):
        world.completion("1 " * 500_000)
    assert 0 < sum(map(len, world.tokenized)) < 50_000


def test_a_text_of_few_long_tokens_is_taken_however_many_bytes_it_has() -> None:
    world = World()
    ids = world.model.tokenizer.encode
    world.model.tokenizer._longest_chars = None
    text = "a" * 40_000
    length = len(ids(text))
    assert world.model.tokenizer.exceeds(text, length, bytes_per_token=1) is False
    assert world.model.tokenizer.exceeds(text, length // 2, bytes_per_token=1) is True


LARGE = 1 << 22
"""A context in which only the bound on the answer is in the way."""


@pytest.mark.parametrize(
    ("route", "fields", "copies", "param"),
    [
        # each fits alone, and `copies` times as much of the first field does not
        ("completion", {"prompt_logprobs": 20}, {"n": 128}, "n"),
        ("completion", {"prompt_logprobs": 20}, {"n": 64, "best_of": 128}, "n"),
        ("completion", {"prompt_logprobs": 20, "max_tokens": 40_000}, {"prompt": 44_300}, "prompt_logprobs"),
        ("completion", {"prompt_logprobs": 20}, {"prompts": 30}, "prompt"),
        ("completion", {"logprobs": 20, "echo": True}, {"n": 128}, "n"),
        ("completion", {"logprobs": 20, "echo": True, "stream": True}, {"n": 128}, "n"),
        ("completion", {"logprobs": 20, "echo": True}, {"prompt": 45_000}, "logprobs"),
        ("completion", {"logprobs": 20, "max_tokens": 2000}, {"n": 128}, "n"),
        ("completion", {"logprobs": 0, "max_tokens": 10_000, "stream": True}, {"n": 128}, "n"),
        ("completion", {"max_tokens": 10_000}, {"n": 1, "best_of": 128}, "best_of"),
        ("completion", {"logprobs": 20, "max_tokens": 2000}, {"prompts": 64}, "prompt"),
        ("completion", {"logprobs": 20}, {"max_tokens": 45_000}, "logprobs"),
        ("completion", {"echo": True}, {"n": 128, "prompt": "long " * 200_000}, "n"),
        ("completion", {"return_token_ids": True, "max_tokens": 50_000}, {"n": 128}, "n"),
        ("completion", {"max_tokens": 150_000}, {"n": 128}, "n"),
        ("chat", {"logprobs": True, "top_logprobs": 20, "max_tokens": 2000}, {"n": 128}, "n"),
        ("chat", {"logprobs": True, "top_logprobs": 20}, {"max_completion_tokens": 45_000}, "top_logprobs"),
        ("chat", {"logprobs": True, "max_tokens": 120_000}, {"n": 8}, "n"),
        ("completion", {"echo": True}, {"n": 128, "prompt": "\x01" * 100_000}, "n"),
        ("chat", {"prompt_logprobs": 20}, {"text": "a b c d " * 20_000}, "prompt_logprobs"),
    ],
)
def test_what_an_answer_may_become_is_bounded_and_the_refusal_names_the_fields(
    route: str, fields: dict[str, Any], copies: dict[str, Any], param: str
) -> None:
    world = World(max_len=LARGE)

    def read(more: dict[str, Any]) -> ParsedRequest:
        body = {"model": "m", "max_tokens": 1, **fields, **more}
        given, text = body.pop("prompt", 1900), body.pop("text", "a")
        prompt = given if isinstance(given, str) else [5] * given
        source = [{"role": "user", "content": text}] if route == "chat" else [prompt] * body.pop("prompts", 1)
        body["messages" if route == "chat" else "prompt"] = source
        return world.parsed(route, json.dumps(body).encode())

    assert read({}).prompts
    with pytest.raises(InvalidRequest, match=str(f"{MAX_ANSWER_BYTES:,}")) as refused:
        read(copies)
    assert refused.value.param == param
    assert f"({param})" in refused.value.message


def test_a_chat_is_never_refused_for_tokens_that_it_did_not_ask_for() -> None:
    world = World(max_len=LARGE)
    for fields in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 20}, {"logprobs": True, "n": 8}):
        [sampling] = world.chat("a", max_tokens=None, **fields).samplings
        assert 40_000 < sampling.max_tokens < LARGE or not fields
        assert world.chat("a", max_tokens=sampling.max_tokens, **fields).samplings[0].max_tokens == sampling.max_tokens


def test_the_logprobs_of_prompts_leave_room_on_a_link() -> None:
    """They wait there until the router has them, as what else was sent does."""
    assert 8 * MAX_ANSWER_BYTES * len(pack_logprobs(0.0, [(0, 0.0)] * 20)) < 21 * ENTRY_BYTES * MAX_KEPT_BYTES


def test_checksums_of_pages_come_with_the_proof_alone() -> None:
    world = World()
    assert world.completion([5], return_proof=True, return_page_sums=True).samplings[0].page_sums
    assert not world.completion([5], return_proof=True).samplings[0].page_sums
    with pytest.raises(InvalidRequest, match="return_proof") as caught:
        world.completion([5], return_page_sums=True)
    assert caught.value.param == "return_page_sums"


def test_without_an_instance_nothing_is_tokenized_and_a_wrong_body_is_still_wrong() -> None:
    world = World(serving=False)
    with pytest.raises(NoInstance, match="nobody is there"):
        world.completion(["a"] * 100)
    assert world.tokenized == [] and len(world.rejected) == 1
    with pytest.raises(InvalidRequest):
        world.completion("a", n=0)


def test_the_rest_of_the_prompts_of_a_client_that_left_is_not_tokenized() -> None:
    world = World()
    world.on_tokenized = world.client.leave

    def require_client() -> None:
        if world.client.is_client_gone:
            raise ClientGone

    raw = json.dumps({"prompt": ["a", "b", "c"]}).encode()
    with pytest.raises(ClientGone):
        world.work.read(ReadBody("completion", ClusterFacts(ModelLimits(MAX_LEN, 100_000), "", 0)), raw, require_client)
    assert world.tokenized == ["a"]


def body_of(num_bytes: int) -> bytes:
    head, tail = b'{"prompt":"a","seed":1', b"}"
    return head + b" " * (num_bytes - len(head) - len(tail)) + tail


def test_a_large_body_is_sent_away_with_what_it_needs_of_the_cluster_and_a_small_one_is_not() -> None:
    world = World()
    small, large = (world.parsed("completion", body_of(LARGE_BODY_BYTES + more)) for more in (0, 1))
    [task] = world.away.tasks
    assert task == ReadBody("completion", ClusterFacts(ModelLimits(MAX_LEN, 100_000), "", 100_000, adapters={}))
    assert small == large and small.prompts[0].num_tokens
    unusable = World(serving=False)
    with pytest.raises(NoInstance, match="nobody is there"):
        unusable.parsed("completion", body_of(LARGE_BODY_BYTES + 1))
    assert len(unusable.away.tasks) == len(unusable.rejected) == 1


def test_every_grammar_is_sent_away_once_and_its_error_names_the_field_of_each_request() -> None:
    world = World()
    for _ in range(2):
        assert world.completion("a", guided_regex="a+").grammar_param == "guided_regex"
    for fields, param in (
        ({"guided_regex": "(("}, "guided_regex"),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
    ):
        with pytest.raises(InvalidRequest) as raised:
            world.completion("a", **fields)
        assert raised.value.param == param and raised.value.message.startswith(f"{param}: regex: ")
    judged = [task.grammar.text for task in world.away.tasks if isinstance(task, JudgeGrammar)]
    assert judged == ["a+", "(("] and len(world.away.tasks) == 2


async def test_what_is_away_for_a_client_that_left_is_given_up_unless_it_is_a_grammar() -> None:
    world = World()

    async def leaves(raw: bytes, away: int) -> None:
        client = Client()
        asking = asyncio.ensure_future(world.reader.parse("completion", bytearray(raw), client.exchange))
        while len(world.away.tasks) < away:
            await asyncio.sleep(0)
        client.leave()
        with pytest.raises(ClientGone):
            await asking

    world.away.may_end = asyncio.Event()
    await leaves(body_of(LARGE_BODY_BYTES + 1), 1)
    assert world.away.num_unwanted == 1
    with_grammar = b'{"prompt":"a","guided_regex":"a+"}'
    await leaves(with_grammar, 2)
    assert world.away.num_unwanted == 1
    other = asyncio.ensure_future(world.reader.parse("completion", bytearray(with_grammar), Client().exchange))
    await asyncio.sleep(0)
    world.away.may_end.set()
    assert (await other).samplings[0].grammar is not None
    assert len(world.away.tasks) == 2, "the second waits for the same"


async def test_each_client_waits_in_its_own_turn_even_for_a_grammar_that_another_asked_for_before() -> None:
    world = World()
    world.away.may_end = asyncio.Event()
    asking = []
    for key, body in ((b"a", b'{"prompt":"a","guided_regex":"a+"}'), (b"b", b'{"prompt":"a","guided_regex":"a+"}')):
        client = Client()
        client.scope["key"] = key
        for raw in (body, body, body_of(LARGE_BODY_BYTES + 1)):
            asking.append(asyncio.ensure_future(world.reader.parse("completion", bytearray(raw), client.exchange)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sorted(world.away.clients) == [b"a", b"a", b"b", b"b"], "a grammar and a body of each"
    world.away.may_end.set()
    await asyncio.gather(*asking)


def test_a_stop_string_that_is_a_special_token_is_a_stop_id_also_if_eos_is_ignored() -> None:
    world = World()
    ids = [world.model.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("<|im_start|>", "<|im_end|>")]
    for fields, expected in (
        ({"stop": "<|im_start|>"}, ids[:1]),
        ({"stop": ["a", "<|im_end|>", "<|im_start|>"], "stop_token_ids": [7, ids[0]]}, [7, ids[0], ids[1]]),
        ({"stop": "<|im_end|>", "ignore_eos": True, "skip_special_tokens": False}, ids[1:]),
        ({"stop": ["\n<|im_end|>", "<|im_end"]}, []),
    ):
        for parsed in (world.completion("a", **fields), world.chat("a", **fields)):
            assert parsed.samplings[0].stop_token_ids == tuple(expected)
            assert set(expected) <= world.model.ends_of(parsed.samplings[0])
    assert World(vocab_size=ids[0]).completion([[1]], stop="<|im_start|>").samplings[0].stop_token_ids == ()


def ids_of(parsed: ParsedRequest) -> list[list[int]]:
    return [list(unpack_i32(prompt.token_ids)) for prompt in parsed.prompts]


def copy_of_tiny(folder: Path) -> Path:
    for path in TINY_MODEL_DIR.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copyfile(path, folder / path.name)
    return folder


def test_of_a_truncated_prompt_the_last_tokens_are_kept_and_bos() -> None:
    world = World()
    text = " ".join(str(i) for i in range(500))
    whole = world.model.tokenizer.encode(text, True)
    [bos, *plain] = whole
    assert len(whole) > 10 * MAX_LEN and world.model.tokenizer.encode("", True) == [bos]
    with pytest.raises(ContextLengthExceeded):
        world.completion(text)
    for kept in (1, 2, 9, MAX_LEN - 16, MAX_LEN):
        room = MAX_LEN - kept

        def truncated(prompt: Any, kept: int = kept, room: int = room, **fields: Any) -> list[list[int]]:
            return ids_of(
                world.completion(prompt, truncate_prompt_tokens=kept, **{"max_tokens": max(1, room), **fields})
            )

        if not room:  # the prompt fills the context, so no token could follow
            with pytest.raises(ContextLengthExceeded):
                truncated(text)
            continue
        expected = [bos, *plain[len(plain) - (kept - 1) :]] if kept > 1 else plain[-1:]
        assert truncated([text, "7"]) == [expected, world.model.tokenizer.encode("7", True)[-kept:]] or kept == 1
        assert truncated(text) == [expected]
        assert truncated(text, add_special_tokens=False) == [plain[-kept:]]
        assert truncated([[5] * 100 + whole, [9]]) == [whole[-kept:], [9]]
    # -1 keeps as many as leave room for the answer.
    assert len(ids_of(world.completion(text, truncate_prompt_tokens=-1, max_tokens=20))[0]) == MAX_LEN - 20
    assert len(ids_of(world.completion(text, truncate_prompt_tokens=-1))[0]) == MAX_LEN - 16
    assert ids_of(world.completion("7", truncate_prompt_tokens=-1)) == [world.model.tokenizer.encode("7", True)]
    echoed = world.completion(text, truncate_prompt_tokens=9, echo=True).prompts[0].echo
    assert echoed == world.model.tokenizer.decode([bos, *plain[-8:]], skip_special_tokens=True)
    chat = ids_of(world.chat("x " * 100, truncate_prompt_tokens=10))
    assert chat == [ids_of(world.chat("x " * 9))[0][-10:]]
    for wrong in (-2, 0, MAX_LEN + 1):
        with pytest.raises(InvalidRequest) as raised:
            world.completion(text, truncate_prompt_tokens=wrong)
        assert raised.value.param == "truncate_prompt_tokens"


def test_of_a_text_of_which_the_end_is_wanted_no_more_is_tokenized_than_tokenize_takes() -> None:
    world = World()
    with pytest.raises(ContextLengthExceeded, match=str(MAX_TOKENS)):
        world.completion("1 " * (MAX_TOKENS + 1), truncate_prompt_tokens=5)


def test_bad_words_are_tokens_with_and_without_a_space_and_something_allowed_must_be_left() -> None:
    world = World()
    encode = world.model.tokenizer.encode
    words = world.completion("a", bad_words=["time", "  time", "xqz"]).samplings[0].bad_words
    expected = [tuple(encode(text, False)) for text in ("time", " time", "xqz", " xqz")]
    assert words == tuple(dict.fromkeys(expected)) and len(words) > 2
    fits = next(n for n in range(60, 0, -1) if len(encode(" " + "1" * n, False)) == MAX_BAD_WORD_TOKENS)
    world.completion("a", bad_words=["1" * fits])
    for fields, param in (
        ({"bad_words": ["a", " "]}, "bad_words[1]"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["1" * (fits + 8)]}, "bad_words[0]"),
        ({"bad_words": [f"{number}" for number in range(MAX_BAD_WORDS // 2 + 1)]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [100_000]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": sorted(world.model.eos_ids), "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": encode("the", False), "bad_words": ["the"]}, "allowed_token_ids"),
    ):
        with pytest.raises(InvalidRequest) as raised:
            world.completion("a", **fields)
        assert raised.value.param == param, fields
    taken = world.completion(
        "a", allowed_token_ids=sorted(world.model.eos_ids), min_tokens=1, ignore_eos=True, stop_token_ids=[7]
    )
    assert taken.samplings[0].allowed_token_ids == tuple(sorted(world.model.eos_ids))


def test_a_chat_template_gets_names_and_variables_and_what_it_does_not_read_is_warned_of(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.name or 'nobody' }}: {{ m.content }}\n{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}no thoughts{% else %}think{% endif %}"
    )
    (copy_of_tiny(tmp_path) / "chat_template.jinja").write_text(template)
    world = World(path=tmp_path)
    jobs = [
        world.chat("a"),
        world.chat("a", chat_template_kwargs={"enable_thinking": True}),
        world.chat("a", chat_template_kwargs={"enable_thinking": False}),
        world.chat("a", messages=[{"role": "user", "content": "a", "name": "ann"}]),
        world.chat("a", chat_template_kwargs={"enable_thinking": False, "enable_thought": True, "x": 1}),
    ]
    assert world.tokenized == [
        "nobody: a\nthink",
        "nobody: a\nthink",
        "nobody: a\nno thoughts",
        "ann: a\nthink",
        "nobody: a\nno thoughts",
    ]
    assert [parsed.warnings for parsed in jobs[:-1]] == [[]] * 4
    [warning] = jobs[-1].warnings
    assert warning.endswith("does not read enable_thought, x")
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(InvalidRequest) as raised:
            world.chat("a", chat_template_kwargs={name: []})
        assert raised.value.param == f"chat_template_kwargs.{name}"
    with pytest.raises(InvalidRequest):  # a variable that hides what the template calls
        (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('x') }}")
        World(path=tmp_path).chat("a", chat_template_kwargs={"raise_exception": 1})


def test_eos_of_the_tokenizer_ends_a_text_unless_it_is_ignored_or_has_no_embedding(tmp_path: Path) -> None:
    copy_of_tiny(tmp_path)
    for name in ("config.json", "generation_config.json"):
        described = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps({**described, "eos_token_id": 1}))
    world = World(path=tmp_path)
    [eos] = world.model.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert eos != 1 and world.model.eos_ids == {1, eos}
    assert world.completion("a", stop_token_ids=[7, eos]).samplings[0].stop_token_ids == (7, eos)
    assert world.completion("a").samplings[0].stop_token_ids == (eos,)
    assert world.completion("a", ignore_eos=True).samplings[0].stop_token_ids == ()

    described = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**described, "eos_token": "<a new one>"}))
    world = World(path=tmp_path)
    assert world.model.eos_ids == {1}
    assert world.completion("a").samplings[0].stop_token_ids == ()


@pytest.mark.parametrize("prompt", ["The fox", "<|im_start|>é<|pad|> 😀<|im_end|>", "<|begin|>a"])
@pytest.mark.parametrize("more", [{}, {"add_special_tokens": False}, {"skip_special_tokens": False}])
def test_text_offsets_of_a_prompt_that_is_repeated_are_places_in_its_text(prompt: str, more: dict[str, bool]) -> None:
    world = World()
    none: Any = None
    router: Any = SimpleNamespace(cancel=none)
    routes = GenerationRoutes(world.model, router, none, RouterConfig(), FakeClock(), lambda scope: "", none)
    parsed = world.completion(prompt, echo=True, logprobs=0, **more)
    [own], [sampling] = parsed.prompts, parsed.samplings
    of_prompt = routes._prompt_answer(own, parsed)
    choice = routes.choice_of(
        parsed, Generation(GenerateRequest("id", b"", 1, sampling), none, 0.0, 0.0), own, of_prompt
    )
    asyncio.run(routes._write_prompt(choice, pack_logprobs(-1.0) * (own.num_tokens - 1), parsed.options))
    assert choice.logprobs is not None
    shown = json.loads(b"".join(choice.logprobs.pieces(of_prompt)))
    num_added = own.num_tokens - len(world.model.tokenizer.encode(prompt, add_special_tokens=False))
    assert own.echo == prompt and shown["text_offset"][:num_added] == [0] * num_added
    for token, at in zip(shown["tokens"][num_added:], shown["text_offset"][num_added:], strict=True):
        assert prompt.startswith(token, at) or token.startswith("bytes:")
