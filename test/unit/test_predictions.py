"""A predicted answer on its way to D, and what of it was right on its way back."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from test_collecting import World as Answering
from test_jobs import MAX_LEN, World
from test_openai_output import ByteDetokenizer

from chitu.errors import InvalidRequest
from chitu.http.answer.choice import ChoiceDecoder
from chitu.http.answer.formats import AnswerHead, FinishedChoice, UsageCount
from chitu.http.ask.bodies import ChatBody, CompletionBody, StreamOptions
from chitu.http.ask.parsed import ParsedRequest
from chitu.http.dialects.anthropic.answers import MessagesFormat
from chitu.http.dialects.responses.answers import ResponsesFormat
from chitu.http.dialects.responses.bodies import ResponsesBody
from chitu.http.dialects.responses.chat import Repeated
from chitu.protocol import SamplingParams, pack_i32
from chitu.tokenizer import StopScanner

TEXT = "The red fox has number 7."
USER = {"role": "user", "content": "a"}
ROUTES: dict[str, dict[str, Any]] = {
    "completion": {"prompt": "a"},
    "chat": {"messages": [USER]},
    "responses": {"input": "a"},
    "messages": {"messages": [USER], "max_tokens": 1},
}
"""Least body of each endpoint."""
OF_OPENAI = ("completion", "chat")
PARTS = [{"type": "text", "text": TEXT[:9]}, {"type": "text", "text": TEXT[9:]}]


def parsed(route: str, world: World | None = None, **fields: Any) -> ParsedRequest:
    world = world or World()
    found: ParsedRequest = world.parsed(route, json.dumps({**ROUTES[route], **fields}).encode())
    return found


def predicted(content: object) -> dict[str, object]:
    return {"type": "content", "content": content}


@pytest.mark.parametrize("route", OF_OPENAI)
@pytest.mark.parametrize("content", [TEXT, PARTS, PARTS[:1]], ids=["text", "parts", "part"])
def test_a_prediction_is_the_tokens_of_its_text_alone(route: str, content: Any) -> None:
    world = World()
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    found = parsed(route, world, prediction=predicted(content))
    assert found.prediction == pack_i32(world.model.tokenizer.encode(text, add_special_tokens=False))
    assert found.asked.is_drafted and not found.warnings


@pytest.mark.parametrize("route", OF_OPENAI)
def test_a_prediction_goes_with_what_else_a_request_may_ask_for(route: str) -> None:
    more: dict[str, Any] = {"n": 2, "seed": 5, "temperature": 1.0, "presence_penalty": 1.0, "max_tokens": 3}
    more |= {"response_format": {"type": "json_object"}, "logprobs": True if route == "chat" else 2, "stream": True}
    without, found = parsed(route, **more), parsed(route, **more, prediction=predicted(TEXT))
    assert found.prediction and not without.prediction
    assert found == msgspec.structs.replace(without, prediction=found.prediction)


@pytest.mark.parametrize("route", OF_OPENAI)
@pytest.mark.parametrize("nothing", [None, predicted(""), predicted([])], ids=["null", "empty", "no parts"])
def test_of_nothing_nothing_is_predicted(route: str, nothing: object) -> None:
    assert parsed(route, prediction=nothing).prediction == b""


BAD: list[tuple[object, str]] = [
    (TEXT, "prediction"),
    ([], "prediction"),
    ({}, "prediction.type"),
    ({"content": TEXT}, "prediction.type"),
    ({"type": "content"}, "prediction.content"),
    ({"type": "text", "content": TEXT}, "prediction.type"),
    ({"type": "content", "content": None}, "prediction.content"),
    ({"type": "content", "content": 7}, "prediction.content"),
    ({"type": "content", "content": {"text": TEXT}}, "prediction.content"),
    ({"type": "content", "content": [TEXT]}, "prediction.content[0]"),
    ({"type": "content", "content": [*PARTS, {"type": "text"}]}, "prediction.content[2].text"),
    ({"type": "content", "content": [{"type": "input_audio", "text": TEXT}]}, "prediction.content[0].type"),
    ({"type": "content", "content": [{"type": "text", "text": 7}]}, "prediction.content[0].text"),
    ({"type": "content", "content": [PARTS[0]] * 4097}, "prediction.content"),
    ({"type": "content", "content": TEXT, "weight": 1}, "prediction.weight"),
    (predicted("fox " * MAX_LEN), "prediction"),
    (predicted("x" * 100_000), "prediction"),
]


@pytest.mark.parametrize("route", OF_OPENAI)
@pytest.mark.parametrize(("given", "param"), BAD)
def test_what_is_no_prediction_is_refused_by_name(route: str, given: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parsed(route, prediction=given)
    assert raised.value.param == param and param in raised.value.message


def test_sound_beside_a_prediction_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as raised:
        parsed("chat", prediction=predicted(TEXT), audio={"voice": "alloy", "format": "wav"})
    assert raised.value.param == "audio"


def test_a_prediction_that_is_certainly_too_long_is_not_tokenised_whole() -> None:
    world = World()
    with pytest.raises(InvalidRequest, match=f"more than the {MAX_LEN} tokens of the context"):
        parsed("chat", world, prediction=predicted("x y " * 100_000))
    assert sum(map(len, world.tokenized)) < 100_000


@pytest.mark.parametrize("route", ROUTES)
def test_each_route_that_generates_may_do_without_drafts(route: str) -> None:
    for given, is_drafted in (("auto", True), (None, True), ("off", False)):
        assert parsed(route, speculation=given).asked.is_drafted == is_drafted
    for given in ("on", "text", True, 3):
        with pytest.raises(InvalidRequest) as raised:
            parsed(route, speculation=given)
        assert raised.value.param == "speculation"


# ----------------------------------------------------------------------------------------------------------- the usage


DRAFTS = ((("prediction", 8, 5), ("text", 3, 1)), (("prediction", 2, 2), ("grammar", 4, 4)))
SUMS = {"prediction": (10, 7), "text": (3, 1), "grammar": (4, 4)}


async def usage(body: ChatBody | CompletionBody, *, is_predicted: bool = True, stop: str = "") -> Any:
    """Return the usage of two choices of three tokens, each of which had drafts. With `stop`, the router ends them."""
    world = Answering(body, 3)
    for choice, drafts in zip(world.running.choices, DRAFTS, strict=True):
        choice.generation.drafts = drafts
        choice.generation.request.prediction = pack_i32([1, 2]) if is_predicted else b""
        if stop:
            scanner = StopScanner((stop,), False)
            choice.decoder = ChoiceDecoder(ByteDetokenizer(), scanner, world.options, frozenset())
            choice.generation.finish, choice.generation.drafts = None, ()
    await world.write()
    return world.events()[-1]["usage"] if body.stream else json.loads(world.client.body)["usage"]


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
@pytest.mark.parametrize("streams", [False, True])
async def test_the_usage_has_all_choices_and_openais_fields_the_prediction_alone(kind: Any, streams: bool) -> None:
    found = await usage(kind(n=2, stream=streams, stream_options=StreamOptions(True) if streams else None))
    assert found["completion_tokens"] == 6, "a rejected token is none of the answer"
    assert found["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 7,
        "rejected_prediction_tokens": 3,
    }
    assert found["speculation"] == {
        source: {"drafted": drafted, "accepted": accepted} for source, (drafted, accepted) in SUMS.items()
    }


async def test_every_event_may_have_the_usage_of_its_choice() -> None:
    body = ChatBody(n=2, stream=True, stream_options=StreamOptions(continuous_usage_stats=True))
    world = Answering(body, 3)
    for choice, drafts in zip(world.running.choices, DRAFTS, strict=True):
        choice.generation.drafts, choice.generation.request.prediction = drafts, pack_i32([1])
    await world.write()
    last = {event["choices"][0]["index"]: event["usage"] for event in world.events()}
    accepted = [last[index]["completion_tokens_details"]["accepted_prediction_tokens"] for index in (0, 1)]
    assert accepted == [5, 2]


@pytest.mark.parametrize(("is_predicted", "stop"), [(False, ""), (True, "aa")], ids=["no prediction", "stop string"])
async def test_openais_fields_are_left_out_if_nothing_is_known_of_a_prediction(is_predicted: bool, stop: str) -> None:
    found = await usage(ChatBody(n=2), is_predicted=is_predicted, stop=stop)
    assert found["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert ("speculation" in found) == (not stop)


async def test_a_prediction_of_which_nothing_was_drafted_counts_as_zero() -> None:
    world = Answering(ChatBody(), 3)
    world.running.choices[0].generation.request.prediction = pack_i32([1])
    await world.write()
    found = json.loads(world.client.body)["usage"]
    assert "speculation" not in found
    details = found["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)


def test_other_apis_have_what_was_drafted_in_their_usage() -> None:
    count = UsageCount(4, 6, 1, 0, DRAFTS[0])
    drafts = {"prediction": {"drafted": 8, "accepted": 5}, "text": {"drafted": 3, "accepted": 1}}
    message = MessagesFormat(AnswerHead("id", 1, "m"), False)
    whole = json.loads(b"".join(message.full([FinishedChoice("a", "stop", None)], count)))
    assert whole["usage"]["speculation"] == drafts
    body = ResponsesBody(input="a")
    response = ResponsesFormat(AnswerHead("id", 1, "m"), Repeated.of(body, SamplingParams(max_tokens=9)))
    whole = json.loads(b"".join(response.full([FinishedChoice("a", "stop", None)], count)))
    assert whole["usage"]["speculation"] == drafts
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
