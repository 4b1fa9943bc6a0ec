"""Incremental detokenising equals decoding at once, for every kind of tokenizer; loading; chat templates."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from chitu.errors import ConfigError, InvalidRequest, MissingDependency
from chitu.launch.tiny_tokenizer import train_tokenizer
from chitu.tokenizer import Tokenizer
from chitu.tokenizer.chat_template import ChatTemplate, find_templates
from chitu.tokenizer.core import CONVERSION_PROBES, require_same_ids
from chitu.tokenizer.detokenizer import ByteLevelDetokenizer, PieceDetokenizer, WholeTextDetokenizer

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
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_deltas_of_any_ids_concatenate_to_the_decoded_text(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    # Ids beyond the vocabulary too: a model's logits row may be longer.
    pushes = data.draw(st.lists(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=4), max_size=12))
    ids = [token for tokens in pushes for token in tokens]
    assert incremental(tokenizer, pushes, skip) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", ["sentencepiece", "sentencepiece without strip"])
@settings(max_examples=150, deadline=None)
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
