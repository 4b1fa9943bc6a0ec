"""Incremental detokenising equals decoding at once, for every kind of tokenizer; loading; chat templates."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from fastapi.responses import StreamingResponse
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from chitu.errors import ConfigError, InvalidRequest, MissingDependency
from chitu.http.wire.pieces import WRITE_BYTES, in_pieces, joined
from chitu.tokenizer import StopScanner, Tokenizer, words
from chitu.tokenizer.chat_template import ChatTemplate, find_templates, has_chat_template
from chitu.tokenizer.core import CONVERSION_PROBES, require_same_ids
from chitu.tokenizer.detokenizer import ByteLevelDetokenizer, PieceDetokenizer, WholeTextDetokenizer
from chitu.tokenizer.words import WordEncoder
from chitu.tools.make_model import train_tokenizer

TEXTS = [
    "plain words, and more words.",
    " 你好，世界 ",
    "🙂👩‍👩‍👧‍👦 flags 🇩🇪",
    "e\u0301 a\u0308\u0323",
    "ﷺ \ufffd \x00",
    "  two  spaces\n\tand lines\r\n",
]


def byte_level() -> Backend:
    backend = train_tokenizer(600)
    backend.add_tokens(["an added one", "é🙂", AddedToken("<plain>", special=False)])
    backend.add_special_tokens(["<|tool call|>"])
    return backend


def metaspace(prepend_scheme: str) -> Backend:
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    backend.train_from_iterator(TEXTS * 3 + ["▁ a word ▁▁ after"], trainer)
    return backend


def sentencepiece(strip: bool) -> Backend:
    """Return a tokenizer like Llama 2's (with strip) or Gemma's (without): byte fallback, ▁ for a space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "a", "b", "▁a", "ab", "▁the", "你", "好", "e", "\u0301", ".", "<0xZZ>", "<0x+1>", "\ufffd"]
    backend = Backend(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def no_decoder() -> Backend:
    backend = metaspace("always")
    backend.decoder = None
    return backend


def regex_decoder() -> Backend:
    """Return a tokenizer whose decoder works only on the whole text."""
    backend = metaspace("always")
    backend.decoder = decoders.Sequence([decoders.Replace(Regex("▁"), " "), decoders.Fuse()])
    return backend


KINDS: dict[str, tuple[Callable[[], Backend], type]] = {
    "byte level": (byte_level, ByteLevelDetokenizer),
    "metaspace always": (lambda: metaspace("always"), PieceDetokenizer),
    "metaspace never": (lambda: metaspace("never"), PieceDetokenizer),
    "metaspace first": (lambda: metaspace("first"), PieceDetokenizer),
    "sentencepiece": (lambda: sentencepiece(True), PieceDetokenizer),
    "sentencepiece without strip": (lambda: sentencepiece(False), PieceDetokenizer),
    "no decoder": (no_decoder, WholeTextDetokenizer),
    "regex decoder": (regex_decoder, WholeTextDetokenizer),
}


def wrap(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, ChatTemplate({}, {}), {}, ())


TOKENIZERS = {name: wrap(make()) for name, (make, _) in KINDS.items()}


def incremental(tokenizer: Tokenizer, pushes: Sequence[Sequence[int]], skip: bool) -> str:
    detokenizer = tokenizer.detokenizer(skip)
    return "".join(detokenizer.push(tokens) for tokens in pushes) + detokenizer.finish()


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_tokenizer_gets_its_detokenizer(name: str) -> None:
    assert type(TOKENIZERS[name].detokenizer()) is KINDS[name][1]


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data(), skip=st.booleans())
def test_deltas_of_any_ids_concatenate_to_the_decoded_text(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    # Ids beyond the vocabulary too: a model's logits row may be longer.
    pushes = data.draw(st.lists(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=4), max_size=12))
    ids = [token for tokens in pushes for token in tokens]
    assert incremental(tokenizer, pushes, skip) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", ["sentencepiece", "sentencepiece without strip"])
@given(data=st.data())
def test_runs_of_byte_tokens_are_whole_or_replaced_as_in_decode(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    byte_runs = st.text(max_size=3).map(lambda text: [3 + byte for byte in text.encode()])
    broken = st.lists(st.integers(3, 258), max_size=3)
    others = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=2)
    pushes = data.draw(st.lists(st.one_of(byte_runs, broken, others), max_size=8))
    ids = [token for tokens in pushes for token in tokens]
    assert incremental(tokenizer, [[token] for token in ids], True) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_real_text_comes_out_token_by_token_as_it_does_at_once(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert incremental(tokenizer, [[token] for token in ids], True) == tokenizer.decode(ids)


@settings(deadline=None)
@given(st.text(max_size=20))
@example("🙂")
def test_no_half_character_leaves_a_byte_level_detokenizer(text: str) -> None:
    tokenizer = TOKENIZERS["byte level"]
    detokenizer = tokenizer.detokenizer()
    emitted = ""
    normal = tokenizer.decode(tokenizer.encode(text))
    for token in tokenizer.encode(text):
        delta = detokenizer.push([token])
        emitted += delta
        assert normal.startswith(emitted)
    assert detokenizer.finish() == ""
    assert emitted == normal


def test_a_multi_byte_character_appears_with_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("🦜", add_special_tokens=False)
    assert len(ids) == 4
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push([token]) for token in ids] == ["", "", "", "🦜"]


def test_a_character_cut_off_by_the_end_becomes_a_replacement_character() -> None:
    tokenizer = TOKENIZERS["byte level"]
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(tokenizer.encode("a🦜", add_special_tokens=False)[:-1]) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_are_shown_when_asked_for() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("<|tool call|>x an added one")
    assert incremental(tokenizer, [ids], True) == "x an added one"
    assert incremental(tokenizer, [ids], False) == "<|begin|><|tool call|>x an added one"


def write_checkpoint(folder: Path, tokenizer_config: dict[str, object], **files: object) -> Path:
    folder.mkdir(exist_ok=True)
    train_tokenizer(300).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


USER = [{"role": "user", "content": "hi"}]


def test_eos_ids_are_collected_from_all_files_once(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path,
        {"eos_token": {"content": "<|im_end|>"}},
        generation_config={"eos_token_id": [1, 4]},
        config={"eos_token_id": 7},
    )
    assert Tokenizer.load(folder).eos_token_ids == (4, 1, 7)


def test_a_truncating_tokenizer_json_does_not_cut_prompts(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {})
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.load(folder).encode("one two three four five six seven")) in range(5, 60)


def test_a_missing_template_is_a_clear_error_of_the_request(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path, {}))
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.apply_chat_template(USER)
    assert caught.value.param == "messages"


def test_the_template_file_wins_over_the_one_in_the_configuration(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"chat_template": "from config"})
    assert Tokenizer.load(folder).apply_chat_template(USER) == "from config"
    (folder / "chat_template.jinja").write_text("from file")
    assert Tokenizer.load(folder).apply_chat_template(USER) == "from file"


def test_named_templates_are_chosen_by_the_presence_of_tools(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path, {"chat_template": templates}))
    assert tokenizer.apply_chat_template(USER) == "plain"
    assert tokenizer.apply_chat_template(USER, tools=[{}, {}]) == "2 tools"


def test_the_template_file_replaces_all_named_templates_of_the_configuration(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "old tools"}]
    folder = write_checkpoint(tmp_path, {"chat_template": named})
    (folder / "chat_template.jinja").write_text("new")
    assert Tokenizer.load(folder).apply_chat_template(USER, tools=[{}]) == "new"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("new tools")
    assert Tokenizer.load(folder).apply_chat_template(USER, tools=[{}]) == "new tools"


def test_templates_get_special_tokens_variables_and_helpers(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ bos_token }}|{{ m | tojson }}|{{ enable_thinking }}|{{ strftime_now('%Y') | int > 2000 }}"
        "{% generation %}|body{% endgeneration %}{% endfor %}"
    )
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path, {"chat_template": template, "bos_token": "<|begin|>"}))
    text = tokenizer.apply_chat_template([{"content": "<ä>"}, {}], variables={"enable_thinking": False})
    assert text == '<|begin|>|{"content": "<ä>"}|False|True|body'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only pairs') }}", "only pairs"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ messages[0].nothing.at_all }}", "nothing"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_fails_is_the_requests_error(template: str, message: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path, {"chat_template": template}))
    with pytest.raises(InvalidRequest, match=message):
        tokenizer.apply_chat_template(USER)


def test_a_template_that_is_no_jinja_is_found_at_start(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"chat_template": "{% if %}"})
    with pytest.raises(ConfigError, match="does not compile"):
        Tokenizer.load(folder)


def test_a_missing_folder_and_a_broken_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Tokenizer.load(tmp_path / "nowhere")
    folder = write_checkpoint(tmp_path / "broken", {})
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(folder)


def test_loading_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"chat_template": "{{ messages[0].content }}"})
    program = (
        "import sys; from chitu.tokenizer import Tokenizer; t = Tokenizer.load(sys.argv[1]);"
        "assert t.decode(t.encode('a b')) == 'a b';"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("text", ["{}", "[]", "{"])
def test_a_chat_template_without_its_text_is_refused(text, tmp_path):
    (tmp_path / "chat_template.json").write_text(text)
    with pytest.raises(ConfigError, match="chat template"):
        find_templates(tmp_path, {})
    (tmp_path / "chat_template.json").unlink()
    with pytest.raises(ConfigError, match="chat template"):
        find_templates(tmp_path, {"chat_template": [{"name": "default"}]})


def test_a_conversion_to_other_tokens_than_those_of_sentencepiece_is_refused(tmp_path: Path) -> None:
    backend = sentencepiece(True)

    def encode(text: str) -> list[int]:
        return backend.encode(text, add_special_tokens=False).ids

    require_same_ids(backend, encode, tmp_path)
    last = CONVERSION_PROBES[-1]
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json.*instead of"):
        require_same_ids(backend, lambda text: encode(text)[int(text == last) :], tmp_path)


def test_a_sentencepiece_model_alone_names_the_package_that_converts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(MissingDependency, match=r"tokenizer\.model needs: pip install sentencepiece"):
        Tokenizer.load(tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# Stop strings: what is held back, what ends the text, and that the cuts between deltas do not matter.


def feed(stops: list[str], deltas: list[str], include_stop: bool = False) -> tuple[list[str], bool]:
    """Return what was emitted at each push and at the end, and whether a stop string was hit."""
    scanner = StopScanner(stops, include_stop)
    out = []
    for delta in deltas:
        text, hit = scanner.push(delta)
        out.append(text)
        if hit:
            return out, True
    return [*out, scanner.finish()], False


def test_text_before_the_stop_is_emitted_and_the_stop_is_not() -> None:
    assert feed(["END"], ["one END two"]) == (["one "], True)


def test_include_stop_ends_the_text_after_the_stop() -> None:
    assert feed(["END"], ["one END two"], include_stop=True) == (["one END"], True)


def test_a_stop_split_over_deltas_is_found_and_its_start_never_emitted() -> None:
    assert feed(["END"], ["one E", "N", "D two"]) == (["one ", "", ""], True)


def test_text_that_only_began_like_a_stop_is_emitted_as_soon_as_it_differs() -> None:
    assert feed(["END"], ["one E", "N", "d two"]) == (["one ", "", "ENd two", ""], False)


def test_only_the_longest_possible_start_is_held_back() -> None:
    assert feed(["aab"], ["xaaa"]) == (["xa", "aa"], False)


def test_the_stop_that_begins_earliest_wins() -> None:
    assert feed(["two", "one"], ["zero one two"]) == (["zero "], True)


def test_of_two_overlapping_stops_the_one_complete_first_wins() -> None:
    assert feed(["abcd", "bc"], ["abcd"]) == (["a"], True)
    assert feed(["abcd", "bc"], list("abcd")) == (["", "", "a"], True)


def test_of_two_stops_complete_at_once_the_longer_wins() -> None:
    assert feed(["c", "abc"], ["xabc"]) == (["x"], True)


def test_a_token_that_is_not_in_the_text_is_found_in_a_stop_string_and_nowhere_else() -> None:
    for include, shown in ((False, ["a", "", "b", ""]), (True, ["a", "", "b", "\n<e><ee>"])):
        scanner = StopScanner(["never", "\n<e><ee>", "<ee>x"], include, {"<e>": 5, "<ee>": 6})
        e, ee = scanner.marks[5], scanner.marks[6]
        assert [scanner.push(text) for text in ("a" + e, "\n" + ee, "b\n" + e)] == [
            ("a", False),
            ("\n", False),
            ("b", False),
        ]
        assert scanner.push(ee) == (shown[3], True)
    scanner = StopScanner(["<e>", "e>b"], False, {"<e>": 5})
    assert scanner.push("a<e") == ("a", False) and scanner.push(">") == ("", True)  # spelled by other tokens
    scanner = StopScanner(["e>b", "<e>c"], False, {"<e>": 5})
    assert scanner.push(scanner.marks[5] + "b") == ("b", False) and not scanner.finish()


def test_after_a_hit_nothing_comes_out_any_more() -> None:
    scanner = StopScanner(["."])
    assert scanner.push("a.b") == ("a", True)
    assert scanner.push("c") == ("", True)
    assert scanner.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        StopScanner(["a", ""])


def first_hit(stops: list[str], text: str) -> tuple[int, int] | None:
    """Return (end, start) of the hit, found by looking at every prefix of the text in turn."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return end, min(starts)
    return None


alphabet = st.text("ab🙂", max_size=12)


@given(
    st.lists(st.text("ab🙂", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(alphabet, max_size=8),
    st.booleans(),
)
def test_the_text_is_that_of_the_first_hit_however_it_is_cut(
    stops: list[str], deltas: list[str], include_stop: bool
) -> None:
    text = "".join(deltas)
    hit = first_hit(stops, text)
    expected = text if hit is None else text[: hit[0] if include_stop else hit[1]]
    out, stopped = feed(stops, deltas, include_stop)
    assert ("".join(out), stopped) == (expected, hit is not None)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), st.lists(st.text("ab", max_size=3)))
def test_what_is_held_back_could_always_become_a_stop(stops: list[str], deltas: list[str]) -> None:
    scanner = StopScanner(stops)
    emitted = text = ""
    for delta in deltas:
        out, hit = scanner.push(delta)
        if hit:
            return
        emitted += out
        text += delta
        held = text[len(emitted) :]
        assert text.startswith(emitted)
        assert not held or any(stop.startswith(held) and len(held) < len(stop) for stop in stops)


# ----------------------------------------------------------------------------------------------------------------------
# Long answers of the routes that are not hot: the loop is free between two pieces of them.


def test_the_loop_is_free_between_two_pieces_and_small_ones_are_written_together() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def pieces() -> Iterator[bytes]:
        before = -1
        for number in range(100):
            assert turns > before, "nothing else ran since the last piece"
            before = turns
            yield bytes([number]) * (WRITE_BYTES // 10)

    async def run() -> list[bytes]:
        counting = asyncio.create_task(count_turns())
        parts = [part async for part in joined(pieces())]
        counting.cancel()
        return parts

    parts = asyncio.run(run())
    assert b"".join(parts) == b"".join(bytes([number]) * (WRITE_BYTES // 10) for number in range(100))
    assert len(parts) < 15


def test_a_short_answer_has_a_length_and_a_long_one_is_not_made_before_it_is_written() -> None:
    taken = 0

    def pieces(count: int) -> Iterator[bytes]:
        nonlocal taken
        for number in range(count):
            taken = number
            yield b"x" * 1000

    short = asyncio.run(in_pieces(pieces(10), {"content-type": "text/plain"}))
    assert short.body == b"x" * 10_000
    assert short.headers["content-length"] == "10000"
    long = asyncio.run(in_pieces(pieces(1000), {"content-type": "text/plain"}))
    assert isinstance(long, StreamingResponse) and "content-length" not in long.headers
    assert taken < 100

    async def rest() -> int:
        return sum([len(part) async for part in (await in_pieces(pieces(1000), {})).body_iterator])  # type: ignore[attr-defined]

    assert asyncio.run(rest()) == 1_000_000


# ----------------------------------------------------------------------------------------------------------------------
# Encoding word by word gives exactly the library's ids, and is used only if it can.


QWEN = train_tokenizer(2000).to_str()
LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
ASCII = st.characters(max_codepoint=127)
PARTS = st.sampled_from(
    ["the", " and", "'s", "'LL", "12", "3456", "  ", "\r\n", "\t", "<|im_start|>", "<|im_end|>", "<|", "<odd>", "\x1c"]
)
ODD_TEXTS = st.lists(st.one_of(PARTS, ASCII), max_size=30).map("".join)


def qwen() -> Backend:
    return Backend.from_str(QWEN)


def llama3() -> Backend:
    backend = qwen()
    split = pre_tokenizers.Split(Regex(LLAMA_SPLIT), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.normalizer = None
    return backend


def gpt2() -> Backend:
    backend = qwen()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


@pytest.mark.parametrize("make", [qwen, llama3, gpt2])
def test_ids_are_the_librarys(make: Callable[[], Backend]) -> None:
    backend = make()
    backend.add_tokens([AddedToken("<odd>", lstrip=True)])
    encoder = WordEncoder.of(backend)
    assert encoder is not None

    @given(ODD_TEXTS, st.booleans())
    def check(text: str, add_special_tokens: bool) -> None:
        assert encoder is not None
        ids = encoder.encode(text, add_special_tokens)
        if "<odd>" in text:
            assert ids is None
        else:
            assert ids == backend.encode(text, add_special_tokens=add_special_tokens).ids

    check()


def test_what_is_not_ascii_or_too_long_is_the_librarys() -> None:
    encoder = WordEncoder.of(qwen())
    assert encoder is not None
    assert encoder.encode("caf\u00e9", True) is None
    assert encoder.encode("a" * (words.MAX_TEXT_CHARS + 1), True) is None
    assert encoder.encode("a" * words.MAX_TEXT_CHARS, True) is not None


def test_ids_stay_right_when_the_table_is_full() -> None:
    backend = qwen()
    encoder = WordEncoder.of(backend)
    assert encoder is not None
    per_text = 4000
    for first in range(0, words.MAX_PIECES + 2 * per_text, per_text):
        pieces = [
            f" {chr(97 + n % 26)}{chr(97 + n // 26 % 26)}{chr(97 + n // 676 % 26)}{chr(97 + n // 17576)}"
            for n in range(first, first + per_text)
        ]
        ids = encoder.encode("".join(pieces), False)
    assert ids == backend.encode("".join(pieces), add_special_tokens=False).ids
    assert 0 < encoder.num_words <= words.MAX_PIECES


def other_split() -> Backend:
    backend = qwen()
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\s+"), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return backend


def prefix_space() -> Backend:
    backend = qwen()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return backend


def lower_case() -> Backend:
    backend = qwen()
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    return backend


def word_level() -> Backend:
    backend = Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def no_letters() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


@pytest.mark.parametrize("make", [other_split, prefix_space, lower_case, word_level, no_letters])
def test_any_other_tokenizer_is_left_to_the_library(make: Callable[[], Backend]) -> None:
    assert WordEncoder.of(make()) is None


def test_a_folder_has_a_chat_template_or_has_none(tmp_path: Path) -> None:
    assert not has_chat_template(tmp_path) and not has_chat_template(tmp_path / "missing")
    config = tmp_path / "tokenizer_config.json"
    for text, has_one in (("{", False), ("[]", False), ("{}", False), ('{"chat_template": "a"}', True)):
        config.write_text(text, encoding="utf-8")
        assert has_chat_template(tmp_path) is has_one, text
