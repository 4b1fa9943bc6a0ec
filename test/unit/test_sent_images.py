"""Images of requests, from the bodies of three APIs to rows of a prompt: where they may be, how the chat template has
them, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.image_files import image_file, png_bomb, saved

from chitu.config.schema import ImagesConfig, ModelConfig
from chitu.errors import ChituError, ContextLengthExceeded, InvalidRequest
from chitu.http.ask import image_turns
from chitu.http.ask.bodies import LARGE_BODY_BYTES
from chitu.http.ask.image_files import ImageReader
from chitu.http.ask.images import MARK, ServedVision, joined, marked
from chitu.http.ask.parsed import ClusterFacts, ParsedRequest, TokensAnswer
from chitu.http.ask.reader import BodyReader, BodyWork, ReadBody, WantedImages
from chitu.http.ask.served_model import ModelLimits, ServedModel
from chitu.http.ask.turns import ChatTurns
from chitu.http.table import READERS
from chitu.images.forms import form_of, key_of
from chitu.images.layout import ImageForm, ImageLayout, Run
from chitu.images.videos import SampledVideo
from chitu.protocol import ImagePart, unpack_i32
from chitu.tokenizer.chat_template import ChatTemplate
from chitu.tools.make_model import make_model

SIDE = 32
"""Pixels of a row's side, in what `Squares` makes of a size."""
RED, WIDE, TALL = image_file(64, 64), image_file(96, 40, seed=1), image_file(40, 160, "JPEG", seed=2)
ROWS = {RED: 4, WIDE: 6, TALL: 10}
FACTS = ClusterFacts(ModelLimits(4096, 100_000), "", 100_000)
IMAGE_PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
NO_IMAGE = "[image left out: this model takes text alone]"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


class Squares:
    """A processor with a row for each square of a size that is begun."""

    def __init__(self, form: ImageForm) -> None:
        self.form = form

    def layout(self, sizes: Sequence[tuple[int, int]]) -> list[ImageLayout]:
        found = []
        for i, (width, height) in enumerate(sizes):
            if max(width, height) > 100 * min(width, height):
                raise InvalidRequest("too long and too thin", str(i))
            grid = (1, -(-height // SIDE), -(-width // SIDE))
            found.append(ImageLayout((Run(self.form.token_id, grid[1] * grid[2]),), grid))
        return found

    def video(self, data: bytes, fps: float | None, most_rows: int) -> SampledVideo:
        raise InvalidRequest(f"{len(data)} bytes are no squares")


WITH_CALLS = (
    '{#- <tool_call> {"name": ..., "arguments": ...} </tool_call> -#}'
    "{%- for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
)
"""How a template that knows Hermes's calls ends a turn."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_model(tmp_path_factory.mktemp("model") / "qwen3_vl", "qwen3_vl")
    template = made / "chat_template.jinja"
    head, end, tail = template.read_text().rpartition("{{- '<|im_end|>\\n' }}")
    assert end
    template.write_text(head + WITH_CALLS + tail)
    return made


class Asked:
    """A process that reads files, and one that reads none, as bodies meet them."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        config, images = ModelConfig(path=str(folder), served_name="m"), ImagesConfig(**limits)
        self.model = ServedModel.load(config, 0, images)
        form = form_of(folder)
        assert isinstance(form, ImageForm)
        self.form = form
        self.model.set_reader(ImageReader(images, lambda: Squares(form)))
        self.here = BodyWork(self.model, False, READERS)
        self.elsewhere = BodyWork(ServedModel.load(config, 0, images), False, READERS)

    def read(self, route: str, body: dict[str, Any], fetched: dict[str, bytes] | None = None) -> Any:
        """Return what becomes of a body. Where no files are read, it is found to have images."""
        raw = json.dumps({"model": "m", **body}).encode()
        task = ReadBody(route, FACTS, fetched=fetched or {}, reads_images=True)
        try:
            found = self.here.read(task, raw, lambda: None)
        except ChituError as error:
            if "image" not in error.message:
                raise
            found = error
        without = ReadBody(route, FACTS)
        try:
            assert isinstance(self.elsewhere.read(without, raw, lambda: None), WantedImages)
        except InvalidRequest as error:
            assert isinstance(found, InvalidRequest) and error.message == found.message
        if isinstance(found, ChituError):
            raise found
        return found

    def chat(self, *messages: dict[str, Any], **fields: Any) -> ParsedRequest:
        found = self.read("chat", {"messages": list(messages), **fields})
        assert isinstance(found, ParsedRequest)
        return found

    def text(self, parsed: ParsedRequest) -> str:
        """Return the prompt with each image's rows as `[KEY:ROWS]`, as its parts say."""
        ids = unpack_i32(parsed.prompts[0].token_ids)
        text, at = "", 0
        for part in parsed.prompts[0].images:
            [(start, length, first)] = part.spans
            assert first == 0 and set(ids[start : start + length]) == {self.form.token_id}
            text += self.model.tokenizer.decode(list(ids[at:start]), skip_special_tokens=False)
            text += f"[{key_name(part, self.form)}:{length}]"
            at = start + length
        assert self.form.token_id not in ids[at:]
        return text + self.model.tokenizer.decode(list(ids[at:]), skip_special_tokens=False)


def key_name(part: ImagePart, form: ImageForm) -> str:
    names = {key_of(data, form): name for name, data in (("red", RED), ("wide", WIDE), ("tall", TALL))}
    return names[part.key]


@pytest.fixture(scope="module")
def asked(folder: Path) -> Asked:
    return Asked(folder)


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data), "detail": "high"}}


def text(told: str) -> dict[str, Any]:
    return {"type": "text", "text": told}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def block(data: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64encode(data).decode()}}


def test_images_are_where_they_stand_among_the_texts_of_all_three_apis(asked: Asked) -> None:
    parsed = asked.chat(user(text("A"), part(RED), text("B"), text("C"), part(WIDE), part(TALL)))
    shown = asked.text(parsed)
    place = "<|vision_start|>[{}]<|vision_end|>"
    expected = f"A{place}B\nC{place}{place}".format("red:4", "wide:6", "tall:10")
    assert expected in shown
    assert [part.grid for part in parsed.prompts[0].images] == [(1, 2, 2), (1, 2, 3), (1, 5, 2)]
    assert {len(data) for data in parsed.files.values()} == {len(RED), len(WIDE), len(TALL)}
    assert parsed.image_fingerprint == asked.form.fingerprint and not parsed.warnings
    assert parsed.prompts[0].num_tokens == len(unpack_i32(parsed.prompts[0].token_ids))
    assert parsed.samplings[0].max_tokens == 4096 - parsed.prompts[0].num_tokens
    inputs = [
        {"type": "input_text", "text": "A"},
        {"type": "input_image", "image_url": url(RED), "detail": "auto"},
        {"type": "input_text", "text": "B"},
        {"type": "input_text", "text": "C"},
        {"type": "input_image", "image_url": url(WIDE)},
        {"type": "input_image", "image_url": url(TALL)},
    ]
    assert asked.text(asked.read("responses", {"input": [{"role": "user", "content": inputs}]})) == shown
    blocks = [text("A"), block(RED), text("B"), text("C"), block(WIDE), block(TALL)]
    body = {"messages": [user(*blocks)], "max_tokens": 5}
    assert asked.text(asked.read("messages", body)) == shown


def test_a_video_of_an_api_without_videos_is_refused_by_its_name_and_place(asked: Asked) -> None:
    told = {"type": "input_text", "text": "What is it?"}
    film = {"type": "input_video", "video_url": "data:video/mp4;base64,AAAA"}
    with pytest.raises(InvalidRequest, match=r"input\[0\].content\[1\].video_url: .* has no such field"):
        asked.read("responses", {"input": [{"role": "user", "content": [told, film]}]})
    block_of_film = {"type": "video", "source": {"type": "base64", "media_type": "video/mp4", "data": "AAAA"}}
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[1\].type: 'video' is not supported"):
        asked.read("messages", {"messages": [user(text("A"), block_of_film)], "max_tokens": 5})


def test_an_image_that_is_sent_twice_is_one_file_with_two_places(asked: Asked) -> None:
    parsed = asked.chat(user(part(RED), text("?")), {"role": "assistant", "content": "!"}, user(part(RED)))
    first, second = parsed.prompts[0].images
    assert first.key == second.key and first.start < second.start and len(parsed.files) == 1


def test_counts_have_the_rows_of_images(asked: Asked) -> None:
    messages = [user(text("A"), part(WIDE))]
    num_tokens = asked.chat(*messages).prompts[0].num_tokens
    answer = asked.read("tokenize", {"messages": messages})
    assert isinstance(answer, TokensAnswer)
    counted = json.loads(answer.body)
    assert counted["count"] == num_tokens and counted["tokens"].count(asked.form.token_id) == ROWS[WIDE]
    answer = asked.read("count_tokens", {"messages": [user(text("A"), block(WIDE))]})
    assert json.loads(answer.body) == {"input_tokens": num_tokens}


def test_an_image_takes_room_in_the_context(asked: Asked) -> None:
    num_tokens = asked.chat(user(part(WIDE))).prompts[0].num_tokens
    room = 4096 - num_tokens
    assert asked.chat(user(part(WIDE)), max_tokens=room).samplings[0].max_tokens == room
    with pytest.raises(ContextLengthExceeded, match=f"{num_tokens} in the prompt"):
        asked.chat(user(part(WIDE)), max_tokens=room + 1)
    large = saved_large(2048, 2080)
    with pytest.raises(ContextLengthExceeded, match="the images alone have 4160"):
        asked.chat(user(part(large)))
    with pytest.raises(InvalidRequest, match="not cut"):
        asked.chat(user(part(WIDE)), truncate_prompt_tokens=num_tokens - 1)


def saved_large(width: int, height: int) -> bytes:
    from PIL import Image

    return saved(Image.new("L", (width, height)), "PNG")


# ------------------------------------------------------------------------------------------------- results of tools


def result(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    return [user(text("Go.")), call, {"role": "tool", "tool_call_id": "c", "content": list(parts)}]


def test_what_a_tool_shows_is_in_its_result_in_all_three_apis(asked: Asked) -> None:
    parsed = asked.chat(*result(text("A"), part(RED)), tools=TOOLS)
    shown = asked.text(parsed)
    assert "<|im_start|>tool\nA<|vision_start|>[red:4]<|vision_end|><|im_end|>" in shown and not parsed.warnings
    items = [
        {"role": "user", "content": "Go."},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "A"}, {"type": "input_image", "image_url": url(RED)}],
        },
    ]
    own = [{"type": "function", "name": "f"}]
    assert asked.text(asked.read("responses", {"input": items, "tools": own})) == shown
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        user({"type": "tool_result", "tool_use_id": "c", "content": [text("A"), block(RED)]}),
    ]
    tools = [{"name": "f", "input_schema": {}}]
    found = asked.read("messages", {"messages": messages, "tools": tools, "max_tokens": 5})
    assert [each.key for each in found.prompts[0].images] == [each.key for each in parsed.prompts[0].images]


EACH = "{% for m in messages %}<{{ m.role }}>"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ '<img>' if c.type == 'image' else c.text }}{% endfor %}{% endif %}"
)
ANYWHERE = EACH + PARTS + CALLS + "{% endfor %}"
OF_USERS = EACH + "{% if m.role == 'user' %}" + PARTS + "{% else %}{{ m.content }}{% endif %}" + CALLS + "{% endfor %}"
NO_USER_BEHIND = (
    "{% for m in messages %}{% if loop.index0 and m.role == 'user' and messages[loop.index0 - 1].role == 'tool' %}"
    "{{ raise_exception('no user behind a tool') }}{% endif %}{% endfor %}" + OF_USERS
)
NOWHERE = EACH + "{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"


class Order:
    """Stands for `SentImages`."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def __bool__(self) -> bool:
        return True

    def place(self, order: Sequence[int]) -> None:
        self.order = list(order)

    def where(self, index: int) -> str:
        return f"messages[9].content[{index}]"


@pytest.mark.parametrize(
    ("source", "told", "order", "warned"),
    [
        (ANYWHERE, "<user>Go.<assistant>[f {}]<tool>A<img>B<user><img>C", [0, 1], ""),
        (
            OF_USERS,
            "<user>Go.<assistant>[f {}]<tool>A[image: in the user's next turn]B<user><img><img>C",
            [0, 1],
            "in a turn of the user behind",
        ),
        (NO_USER_BEHIND, "<user>Go.<assistant>[f {}]<tool>A[image left out]B", [], "leaves them out"),
    ],
)
def test_images_of_results_are_where_the_template_has_a_place(
    source: str, told: str, order: list[int], warned: str
) -> None:
    template = ChatTemplate({"default": source}, {})
    stage = ChatTurns(template.render, template.source, template.variables, None, "<img>")
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "tool_call_id": "c", "content": f"A{marked(0)}B"},
    ]
    if source is not NO_USER_BEHIND:  # where its texts are in results
        turns.append({"role": "user", "content": f"{marked(1)}C"})
    images, warnings = Order(), list[str]()
    assert stage.takes_images
    assert stage.prompt(turns, None, {}, False, images=images, warnings=warnings) == told  # type: ignore[arg-type]
    assert images.order == order and (warned in "".join(warnings) if warned else not warnings)


def test_images_of_several_results_are_in_one_turn_behind_them() -> None:
    results = [{"role": "tool", "content": f"{name}{marked(i)}"} for i, name in enumerate("ABC")]
    answer = {"role": "assistant", "content": "D"}
    behind = {"role": "user", "content": marked(0) + marked(1) + marked(2)}
    for later in ([], [answer]):
        found = image_turns.moved([*results, *later])
        assert found[3:] == [behind, *later] and image_turns.numbers(found) == [0, 1, 2]
        assert [turn["content"][0] for turn in found[:3]] == ["A", "B", "C"]


def test_a_template_without_a_place_for_images_is_that_of_a_model_without_vision() -> None:
    template = ChatTemplate({"default": NOWHERE}, {})
    assert not ChatTurns(template.render, template.source, template.variables, None, "<img>").takes_images


def test_text_beside_an_image_has_no_break_there() -> None:
    mark = marked(3)
    assert joined(["a", "b", mark, mark, "c", "d"]) == f"a\nb{mark}{mark}c\nd"
    assert joined([]) == "" and joined(["", "a"]) == "\na"


# ------------------------------------------------------------------------------------------------------ not to be seen


@pytest.mark.parametrize("images", ["off", "auto"])
def test_a_model_that_sees_nothing_gets_a_placeholder_wherever_the_image_is(
    folder: Path, tmp_path: Path, images: Any
) -> None:
    if images == "auto":
        folder = make_model(tmp_path / "text")
    model = ServedModel.load(ModelConfig(path=str(folder), served_name="m", images=images), 0, ImagesConfig())
    work = BodyWork(model, False, READERS)
    for route, body, where in (
        ("chat", {"messages": [user(text("A"), part(RED))]}, "messages[0].content[1]"),
        ("responses", {"input": [user({"type": "input_image", "image_url": "http://x/y"})]}, "input[0].content[0]"),
        ("messages", {"messages": [user(block(RED))], "max_tokens": 5}, "messages[0].content[0]"),
        ("chat", {"messages": [user({"type": "image_url", "image_url": 5})]}, "messages[0].content[0]"),
    ):
        parsed = work.read(ReadBody(route, FACTS), json.dumps({"model": "m", **body}).encode(), lambda: None)
        assert isinstance(parsed, ParsedRequest) and not parsed.prompts[0].images and not parsed.files
        assert NO_IMAGE in model.tokenizer.decode(list(unpack_i32(parsed.prompts[0].token_ids)))
        [warning] = parsed.warnings
        assert warning.startswith(f"{where}: this server serves text, so the prompt has a placeholder for ")


def test_instances_without_the_models_vision_see_nothing_either(asked: Asked) -> None:
    facts = ClusterFacts(ModelLimits(4096, 100_000), "", 100_000, sees_images=False)
    raw = json.dumps({"model": "m", "messages": [user(part(RED))]}).encode()
    parsed = asked.elsewhere.read(ReadBody("chat", facts), raw, lambda: None)
    assert isinstance(parsed, ParsedRequest) and not parsed.prompts[0].images and len(parsed.warnings) == 1


def test_an_image_of_the_assistant_is_a_placeholder_of_a_model_with_vision_too(asked: Asked) -> None:
    parsed = asked.chat(user(part(RED)), {"role": "assistant", "content": [part(WIDE)]}, user(text("B")))
    assert len(parsed.prompts[0].images) == 1 and "[image left out]" in asked.text(parsed)
    assert parsed.warnings == [
        "messages[1].content[0]: the model sees images of the user and of results of tools, so the prompt has a "
        "placeholder for image_url"
    ]


@pytest.mark.parametrize("literal", [IMAGE_PLACE, "<|image_pad|>", "<|image_pad|><|image_pad|>"])
def test_a_text_with_what_stands_for_an_image_is_refused_beside_images_alone(asked: Asked, literal: str) -> None:
    for messages, where in (
        ([user(text(f"so: {literal}"), part(RED))], "messages[0].content"),
        ([{"role": "system", "content": literal}, user(part(RED))], "messages[0].content"),
        ([*result(text(literal)), user(part(RED))], "messages[2].content"),
    ):
        with pytest.raises(InvalidRequest, match="stands for an image") as raised:
            asked.chat(*messages)
        assert raised.value.param == where and "'<|image_pad|>'" in raised.value.message
    raw = json.dumps({"model": "m", "messages": [user(text(literal))]}).encode()
    parsed = asked.elsewhere.read(ReadBody("chat", FACTS), raw, lambda: None)
    assert isinstance(parsed, ParsedRequest) and not parsed.prompts[0].images


def test_no_text_of_a_client_is_a_mark(asked: Asked) -> None:
    raw = b'{"model":"m","messages":[{"role":"user","content":"\\udfff0\\udfff"}]}'
    for work in (asked.here, asked.elsewhere):
        with pytest.raises(InvalidRequest):
            work.read(ReadBody("chat", FACTS, reads_images=True), raw, lambda: None)
    with pytest.raises(InvalidRequest):
        asked.here.read(ReadBody("chat", FACTS), raw.replace(b"\\udfff", MARK.encode(errors="surrogatepass")), list)


# ----------------------------------------------------------------------------------------------------------- refused

SVG = b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ("data:image/png;base64", "without data"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,AAA", "no valid base64"),
        ("data:image/png;base64,\u00fc===", "no valid base64"),
        ("data:image/png;base64," + "A" * (4 << 20), "more than 2 MiB"),
        (url(RED[:200]), "damaged or truncated"),
        (url(RED + b"x", "text/html"), "says 'text/html'"),
        (url(b"%PDF-1.7", "application/pdf"), "says 'application/pdf'"),
        (url(b"%PDF-1.7"), "a PDF file"),
        (url(SVG, "image/svg+xml"), "an SVG file"),
        ("data:image/svg+xml,%3Csvg%3E", "an SVG file"),
        (url(png_bomb(60_000, 60_000)), "more than the 36000000 pixels"),
        (url(saved_large(2, 300)), "too long and too thin"),
        ("ftp://a/b.png", "none of http, https or file"),
        ("javascript:alert(1)", "none of http, https or file"),
        ("", "none of http, https or file"),
        ("http://a/b.png", "this server fetches none"),
        ("file:///etc/passwd", "no folder for images"),
    ],
)
def test_what_is_no_image_is_refused_by_its_place(folder: Path, sent: str, says: str) -> None:
    asked = Asked(folder, max_file_mb=2)
    sent_part = {"type": "image_url", "image_url": {"url": sent}}
    with pytest.raises(InvalidRequest, match=says) as raised:
        asked.chat(user(text("A"), part(RED), sent_part))
    assert raised.value.param == "messages[0].content[2]" and raised.value.message.startswith(raised.value.param)
    source = {"type": "url", "url": sent}
    with pytest.raises(InvalidRequest, match=says) as raised:
        messages = [{"role": "user", "content": "a"}, user({"type": "image", "source": source})]
        asked.read("messages", {"messages": messages, "max_tokens": 5})
    assert raised.value.param == "messages[1].content[0]"


def test_bounds_hold_for_all_images_of_a_request_together(folder: Path) -> None:
    asked = Asked(folder, max_images=3, max_total_mb=1, max_pixels=4096)
    assert len(asked.chat(user(*[part(RED)] * 3)).prompts[0].images) == 3
    with pytest.raises(InvalidRequest, match="3 images at most") as raised:
        asked.chat(user(*[part(RED)] * 200))
    assert raised.value.param == "messages[0].content[3]"
    asked = Asked(folder, max_total_mb=1)
    noise = image_file(400, 400)
    assert 1 << 19 > len(noise) > 1 << 18
    with pytest.raises(InvalidRequest, match="larger than 1 MiB"):
        asked.chat(user(*[part(noise)] * 3))
    asked = Asked(folder, max_pixels=4096)
    assert asked.chat(user(*[part(RED)] * 8))
    with pytest.raises(InvalidRequest, match=r"8 times router.images.max_pixels") as raised:
        asked.chat(user(*[part(RED)] * 9))
    assert raised.value.param == "messages[0].content[8]"
    with pytest.raises(InvalidRequest, match="more than the 4095 pixels"):
        Asked(folder, max_pixels=4095).chat(user(part(RED)))


def test_base64_may_have_line_breaks_and_the_type_of_a_picture_need_not_be_right(asked: Asked) -> None:
    encoded = b64encode(RED).decode()
    lines = "\r\n".join(encoded[i : i + 76] for i in range(0, len(encoded), 76))
    for sent in (f"data:image/jpeg;base64,{lines}", f"data:;base64,{encoded}", f"DATA:image/png;BASE64,{encoded}"):
        parsed = asked.chat(user({"type": "image_url", "image_url": sent}))
        assert [*parsed.files.values()] == [RED]


def test_files_are_those_below_the_folder_alone(folder: Path, tmp_path: Path) -> None:
    shared, secret = tmp_path / "shared", tmp_path / "secret.png"
    (shared / "deep").mkdir(parents=True)
    for path in (shared / "a b.png", shared / "deep" / "c.png", secret, tmp_path / "shared2.png"):
        path.write_bytes(RED)
    (shared / "out.png").symlink_to(secret)
    (shared / "up").symlink_to(tmp_path)
    (shared / "in.png").symlink_to(shared / "a b.png")
    (shared / "large.png").write_bytes(bytes(2 << 20))
    os.mkfifo(shared / "pipe.png")
    asked = Asked(folder, dir=str(shared), max_file_mb=1)

    def read(path: str) -> ParsedRequest:
        return asked.chat(user({"type": "image_url", "image_url": {"url": path}}))

    for name in ("a%20b.png", "deep/c.png", "in.png"):
        assert [*read(f"file://{shared}/{name}").files.values()] == [RED]
    assert read(f"file://localhost{shared}/in.png")
    refused = (
        *(f"file://{shared}/out.png", f"file://{shared}/up/secret.png", f"file://{shared}/../secret.png"),
        *(f"file://{shared}/%2e%2e/secret.png", f"file://{secret}", f"file://{tmp_path}/shared2.png"),
        *(
            f"file://{shared}",
            f"file://{shared}/none.png",
            f"file://{shared}/pipe.png",
            f"file://{shared}/deep/../a%20b.png",
        ),
        *(f"file://{shared}/a%00b.png", "file:///dev/zero", "file:relative.png"),
    )
    for path in refused:
        with pytest.raises(InvalidRequest, match="no file below the folder"):
            read(path)
    with pytest.raises(InvalidRequest, match="another host"):
        read(f"file://elsewhere{shared}/in.png")
    with pytest.raises(InvalidRequest, match="more than 1 MiB"):
        read(f"file://{shared}/large.png")


# ---------------------------------------------------------------------------------------------------------------- URLs


def test_urls_of_allowed_hosts_are_wanted_and_then_read(folder: Path) -> None:
    asked = Asked(folder, hosts=("img.example", "*.cdn.example:8443"))
    first, second = "https://img.example/a.png", "https://x.cdn.example:8443/b.png"
    parts = [{"type": "image_url", "image_url": {"url": each}} for each in (first, second, first)]
    body = {"model": "m", "messages": [user(*parts, part(TALL))]}
    raw = json.dumps(body).encode()
    places = {first: "messages[0].content[0]", second: "messages[0].content[1]"}
    for reads in (False, True):  # without their files they are wanted in any process
        found = asked.here.read(ReadBody("chat", FACTS, reads_images=reads), raw, lambda: None)
        assert found == WantedImages(places)
    parsed = asked.read("chat", body, {first: RED, second: WIDE})
    rows = [part.num_rows for part in parsed.prompts[0].images]
    assert rows == [4, 6, 4, 10]
    for refused in ("https://img.example.evil/a", "https://cdn.example:8443/a", "https://x.cdn.example/a"):
        with pytest.raises(InvalidRequest, match="images are not fetched from"):
            asked.chat(user({"type": "image_url", "image_url": {"url": refused}}))


def test_rows_of_lines_are_spans_of_one_image() -> None:
    from chitu.http.ask.image_files import ReadFile, SentImage
    from chitu.http.ask.images import SentImages

    images = SentImages(ServedVision(ImageForm("P", "P", 7, bytes(16)), ImagesConfig()), {}, False)
    images._sent = [SentImage("a", "data:"), SentImage("b", "data:")]
    lines = ImageLayout((Run(7, 2), Run(8, 1, False), Run(7, 2), Run(9, 1, False)))
    whole = ImageLayout((Run(7, 1), Run(7, 2)), (1, 1, 3))
    images._files = [(ReadFile(b"x", b"", whole, "P", 7),), (ReadFile(b"y", b"", lines, "P", 7),)]
    images.place([1, 0])
    assert images.expanded([1, 7, 2, 7], lambda _: "P", []) == [1, 7, 7, 8, 7, 7, 9, 2, 7, 7, 7]
    for ids in ([1, 7, 2], [7, 7, 7]):
        with pytest.raises(InvalidRequest, match="'P', which stands for an image") as raised:
            images.expanded(ids, lambda _: "P", [{"content": "a"}, {"content": "aP"}])
        assert raised.value.param == "messages[1].content"
    images.expanded([1, 7, 2, 7], lambda _: "P", [])
    first, second = images.parts
    assert first == ImagePart(b"y", ((1, 2, 0), (4, 2, 2)), (0, 0, 0))
    assert second == ImagePart(b"x", ((8, 3, 0),), (1, 1, 3))


def test_a_prompt_of_token_ids_that_has_the_rows_is_taken_with_its_images(folder: Path) -> None:
    """As `chitu replay` asks for what a chat was: the same ids, parts and files, also of a large body."""
    asked = Asked(folder)
    large = image_file(250, 120, seed=3)
    assert len(large) > LARGE_BODY_BYTES
    chat = asked.chat(user(part(RED), {"type": "text", "text": "between"}, part(TALL), part(large)))
    ids = unpack_i32(chat.prompts[0].token_ids).tolist()
    given = [url(RED), url(TALL), url(large)]
    again = asked.read("completion", {"prompt": ids, "images": given})
    assert again.prompts[0].token_ids == chat.prompts[0].token_ids and again.prompts[0].num_tokens == len(ids)
    assert again.prompts[0].images == chat.prompts[0].images and again.files == chat.files
    assert again.image_fingerprint == chat.image_fingerprint != b""
    row = asked.form.token_id
    at = ids.index(row)
    for prompt, images, says in (
        (ids, [url(TALL), url(RED), url(large)], r"images\[0\]: the prompt does not have its 10 tokens"),
        (ids, [*given, url(RED)], r"images\[3\]: the prompt does not have"),
        ([*ids[:at], row, *ids[at:]], given, r"images\[1\]: the prompt does not have its 10 tokens"),
        (ids[: at + 2], given[:1], r"images\[0\]: the prompt does not have its 4 tokens"),
        ([ids, ids], given, "images: only with one prompt of token ids"),
        ("text", given, "images: only with one prompt of token ids"),
        (ids, ["https://a/b"], "fetches none"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            asked.read("completion", {"prompt": prompt, "images": images})


def test_rows_in_lines_are_found_in_token_ids() -> None:
    """A generated token may look like a row: what is behind all images is none."""
    from chitu.http.ask.image_files import ReadFile, SentImage
    from chitu.http.ask.images import SentImages

    images = SentImages(ServedVision(ImageForm("P", "P", 7, bytes(16)), ImagesConfig()), {}, False)
    images._sent = [SentImage("a", "data:"), SentImage("b", "data:")]
    lines = ImageLayout((Run(7, 2), Run(8, 1, False), Run(7, 2), Run(9, 1, False)))
    row = ImageLayout((Run(7, 3),), (1, 1, 3))
    images._files = [(ReadFile(b"y", b"", lines, "P", 7),), (ReadFile(b"x", b"", row, "P", 7),)]
    images.find([1, 7, 7, 8, 7, 7, 9, 2, 7, 7, 7, 3, 7, 7])
    assert [part.spans for part in images.parts] == [((1, 2, 0), (4, 2, 2)), ((8, 3, 0),)]


async def test_what_was_fetched_goes_to_the_next_router_and_is_not_fetched_again(folder: Path) -> None:
    """By then its host may be gone, or have another image there."""
    place, other = "https://img.example/a.png", "https://img.example/b.png"
    asked, hosts = Asked(folder, hosts=("img.example",)), {place: RED, other: TALL}
    fetches: list[str] = []

    class Fetcher:
        @contextlib.asynccontextmanager
        async def files(self, wanted: dict[str, str], client: bytes) -> AsyncIterator[dict[str, bytes]]:
            fetches.extend(wanted)
            yield {url: bytes(bytearray(hosts[url])) for url in wanted}

    class Here:
        async def do(self, task: ReadBody, raw: bytes, client: bytes = b"") -> Any:
            return asked.here.read(task, raw, lambda: None)

    router = SimpleNamespace(candidates=SimpleNamespace(serving=[], why_unusable=lambda: ""))
    reader = BodyReader(
        cast(Any, asked.model), cast(Any, router), Here(), False, lambda scope: b"", READERS, cast(Any, Fetcher())
    )
    reader._facts = lambda: FACTS  # type: ignore[method-assign]
    parts = [{"type": "image_url", "image_url": {"url": each}} for each in (place, other, place)]
    raw = bytearray(json.dumps({"model": "m", "messages": [user(*parts, part(WIDE))]}).encode())
    first = await reader.parse_again("chat", raw, {})
    assert fetches == [place, other] and first.fetched == hosts
    assert all(any(each is file for file in first.files.values()) for each in first.fetched.values())
    hosts.clear()
    again = await reader.parse_again("chat", raw, first.fetched)
    assert fetches == [place, other] and again.files == first.files
    assert again.prompts[0].images == first.prompts[0].images
