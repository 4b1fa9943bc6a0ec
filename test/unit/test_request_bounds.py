"""Every list and length of a body has a bound, and the largest accepted body costs no more than its size."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import (
    LARGE_BODY_BYTES,
    MAX_ID_CHARS,
    MAX_MESSAGES,
    MAX_N,
    MAX_NAME_CHARS,
    MAX_PARTS,
    MAX_PROMPTS,
    MAX_ROLE_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEMPLATE_KWARGS,
    MAX_TOKENS,
    MAX_TOOL_CALLS,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    MAX_WORD_CHARS,
)
from chitu.http.ask.chat import chat_messages
from chitu.http.ask.decoder import MAX_FIELD_BYTES, MAX_TOOLS_BYTES
from chitu.http.ask.prompts import prompts_of
from chitu.http.ask.sampling import output_options, sampling_params
from chitu.http.dialects.openai.bodies import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE
from chitu.http.table import BODIES
from chitu.http.wire.connection import RequestParser
from chitu.http.wire.limits import HTTPLimits
from chitu.protocol import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_PRIORITY
from chitu.tokenizer import StopScanner

USER = {"role": "user", "content": "a"}
DECODERS = {route: BODIES.decoder(body) for route, body in BODIES.bodies.items()}
TOOL = {"type": "function", "function": {"name": "f"}}
PART = {"type": "text", "text": "a"}
VOCAB = 100_000


def read(decoder: Any, body: Any, warnings: list[str] | None = None) -> Any:
    """Read everything that is made of a body's fields before anything is tokenised."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    decoded = decoder.decode(raw, warnings)
    if decoder is DECODERS[COMPLETIONS]:
        prompts_of(decoded.prompt, "prompt")
    if getattr(decoded, "messages", None) is not None:
        chat_messages(decoded.messages)
    if decoder in (DECODERS[COMPLETIONS], DECODERS[CHAT]):
        sampling_params(decoded, output_options(decoded), 1, VOCAB)
    return decoded


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", **fields}


BOUNDS = {
    # name: (decoder, a body of size n, the bound, the field that the error names)
    "stops": (DECODERS[COMPLETIONS], lambda n: completion(stop=["ab"] * n), MAX_STOPS, "stop"),
    "one stop": (DECODERS[COMPLETIONS], lambda n: completion(stop="a" * n), MAX_STOP_CHARS, "stop"),
    "a stop of several": (DECODERS[COMPLETIONS], lambda n: completion(stop=["b", "é" * n]), MAX_STOP_CHARS, "stop[1]"),
    "stop ids": (
        DECODERS[COMPLETIONS],
        lambda n: completion(stop_token_ids=[5] * n),
        MAX_STOP_TOKEN_IDS,
        "stop_token_ids",
    ),
    "biases": (
        DECODERS[COMPLETIONS],
        lambda n: completion(logit_bias={str(i): -100 for i in range(n)}),
        MAX_LOGIT_BIAS,
        "logit_bias",
    ),
    "allowed ids": (
        DECODERS[COMPLETIONS],
        lambda n: completion(allowed_token_ids=[5] * n),
        MAX_ALLOWED_TOKEN_IDS,
        "allowed_token_ids",
    ),
    "bad words": (DECODERS[CHAT], lambda n: {"messages": [USER], "bad_words": ["a"] * n}, MAX_BAD_WORDS, "bad_words"),
    "a bad word": (
        DECODERS[COMPLETIONS],
        lambda n: completion(bad_words=["b", "a" * n]),
        MAX_WORD_CHARS,
        "bad_words[1]",
    ),
    "choices": (DECODERS[COMPLETIONS], lambda n: completion(n=n), MAX_N, "n"),
    "texts": (DECODERS[COMPLETIONS], lambda n: {"prompt": ["a"] * n}, MAX_PROMPTS, "prompt"),
    "lists of ids": (DECODERS[COMPLETIONS], lambda n: {"prompt": [[1]] * n}, MAX_PROMPTS, "prompt"),
    "tools": (DECODERS[CHAT], lambda n: {"messages": [USER], "tools": [TOOL] * n}, MAX_TOOLS, "tools"),
    "a tool's name": (
        DECODERS[CHAT],
        lambda n: {"messages": [USER], "tools": [{"type": "function", "function": {"name": "a" * n}}]},
        MAX_TOOL_NAME_CHARS,
        "tools[0].function.name",
    ),
    "tool calls": (
        DECODERS[CHAT],
        lambda n: {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * n}]},
        MAX_TOOL_CALLS,
        "messages[0].tool_calls",
    ),
    "a call's id": (
        DECODERS[CHAT],
        lambda n: {"messages": [{"role": "tool", "content": "4", "tool_call_id": "a" * n}]},
        MAX_ID_CHARS,
        "messages[0].tool_call_id",
    ),
    "messages": (DECODERS[CHAT], lambda n: {"messages": [USER] * n}, MAX_MESSAGES, "messages"),
    "parts": (
        DECODERS[CHAT],
        lambda n: {"messages": [USER, {"role": "user", "content": [PART] * n}]},
        MAX_PARTS,
        "messages[1].content",
    ),
    "a role": (
        DECODERS[CHAT],
        lambda n: {"messages": [{"role": "x" * n, "content": ""}]},
        MAX_ROLE_CHARS,
        "messages[0].role",
    ),
    "a name": (
        DECODERS[CHAT],
        lambda n: {"messages": [{"role": "user", "content": "", "name": "x" * n}]},
        MAX_NAME_CHARS,
        "messages[0].name",
    ),
    "variables of a template": (
        DECODERS[CHAT],
        lambda n: {"messages": [USER], "chat_template_kwargs": {str(i): i for i in range(n)}},
        MAX_TEMPLATE_KWARGS,
        "chat_template_kwargs",
    ),
    "messages to tokenize": (DECODERS[TOKENIZE], lambda n: {"messages": [USER] * n}, MAX_MESSAGES, "messages"),
    "tokens": (DECODERS[DETOKENIZE], lambda n: {"tokens": [1] * n}, MAX_TOKENS, "tokens"),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_list_or_length_is_taken_at_its_bound_and_refused_beyond(name: str) -> None:
    decoder, body_of, bound, param = BOUNDS[name]
    read(decoder, body_of(bound))
    for beyond in (bound + 1, 3 * bound):
        with pytest.raises(InvalidRequest) as raised:
            read(decoder, body_of(beyond))
        assert raised.value.param == param
        assert str(bound) in raised.value.message


def test_a_priority_is_taken_at_its_bounds_and_refused_beyond() -> None:
    for bound in (-MAX_PRIORITY, MAX_PRIORITY):
        assert read(DECODERS[COMPLETIONS], completion(priority=bound)).priority == bound
        with pytest.raises(InvalidRequest) as raised:
            read(DECODERS[COMPLETIONS], completion(priority=bound + (1 if bound > 0 else -1)))
        assert raised.value.param == "priority"


def test_max_tokens_is_not_judged_beside_the_field_that_overrides_it() -> None:
    assert (
        read(DECODERS[CHAT], {"messages": [USER], "max_tokens": 0, "max_completion_tokens": 5}).max_completion_tokens
        == 5
    )


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE])
def test_of_a_large_body_no_field_but_its_content_may_be_large(route: str) -> None:
    decoder, content = DECODERS[route], {"prompt", "messages", "tokens", "prediction", "images"}
    fields = [name for name in BODIES.bodies[route].__struct_fields__ if name not in content]
    padding = " " * LARGE_BODY_BYTES
    for name in fields:
        most = MAX_TOOLS_BYTES if name == "tools" else MAX_FIELD_BYTES
        with pytest.raises(InvalidRequest) as raised:
            decoder.decode((json.dumps({name: "x" * (most - 1)}) + padding).encode())
        assert raised.value.param == name
        assert str(most) in raised.value.message
        try:
            decoder.decode((json.dumps({name: "x" * (most - 2)}) + padding).encode())
        except InvalidRequest as error:
            assert "bytes of JSON" not in error.message


def test_a_large_body_ends_at_its_first_unknown_field() -> None:
    body = b'{"unheard_of":0,"prompt":"a","prompt":%s}' % (b"[" * LARGE_BODY_BYTES)
    with pytest.raises(InvalidRequest) as raised:
        DECODERS[COMPLETIONS].decode(body)
    assert raised.value.param == "unheard_of"


def test_stop_ids_that_come_twice_are_one() -> None:
    body = DECODERS[COMPLETIONS].decode(b'{"stop_token_ids":[7,3,7,7,3]}')
    assert sampling_params(body, output_options(body), 1, VOCAB).stop_token_ids == (7, 3)


COSTLY = {
    "lists in prompt": (DECODERS[COMPLETIONS], '{"prompt":[[],%s[]]}', "[],"),
    "a text, then lists": (DECODERS[COMPLETIONS], '{"prompt":["a",%s[]]}', "[],"),
    "ids, then lists": (DECODERS[COMPLETIONS], '{"prompt":[1,%s[]]}', "[],"),
    "objects in prompt": (DECODERS[COMPLETIONS], '{"prompt":[%s{}]}', "{},"),
    "objects where none are known": (DECODERS[COMPLETIONS], '{"guided_json":[%s{}]}', "{},"),
    "objects in an unknown field": (DECODERS[COMPLETIONS], '{"unheard_of":[%s{}]}', "{},"),
    "objects in an unknown field of an object": (
        DECODERS[CHAT],
        '{"messages":[{"role":"user","content":"a","unheard_of":[%s{}]}]}',
        "{},",
    ),
    "objects in messages": (DECODERS[CHAT], '{"messages":[{"role":"a","tool_calls":[%s{}]}]}', "{},"),
    "biases": (DECODERS[COMPLETIONS], '{"logit_bias":{%s"1":1}}', '"2":1,'),
    "stop ids": (DECODERS[COMPLETIONS], '{"stop_token_ids":[%s1]}', "1,"),
    "stops": (DECODERS[COMPLETIONS], '{"stop":[%s"a"]}', '"",'),
    "fields": (DECODERS[COMPLETIONS], "{%s}", '"n":1,'),
}


@pytest.mark.parametrize("warnings", [None, []])
@pytest.mark.parametrize("name", COSTLY)
def test_no_json_becomes_much_larger_than_it_is(name: str, warnings: list[str] | None) -> None:
    decoder, form, piece = COSTLY[name]
    body = (form % (piece * (600_000 // len(piece)))).replace(",}", "}").encode()
    tracemalloc.start()
    try:
        read(decoder, body, warnings)
    except InvalidRequest:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 3 * len(body)


def test_a_stop_scanner_keeps_no_more_than_its_stop_strings_and_looks_at_each_character_once() -> None:
    class Counted(str):
        """A string that counts comparisons with it."""

        compared = 0

        def startswith(self, *args: Any) -> bool:
            Counted.compared += 1
            return super().startswith(*args)

    stops = [Counted("ab" * (MAX_STOP_CHARS // 2 - 1) + f"c{i:x}"[:2]) for i in range(MAX_STOPS)]
    tracemalloc.start()
    scanner = StopScanner(stops)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 10_000
    text = ("ab" * MAX_STOP_CHARS + "aab") * 20
    emitted = "".join(scanner.push(character)[0] for character in text)
    assert text.startswith(emitted) and len(text) - len(emitted) < MAX_STOP_CHARS
    assert 0 < Counted.compared <= 2 * len(text) * MAX_STOPS


def test_prompts_are_made_from_where_they_lie() -> None:
    """A copy of a large body would block the event loop."""
    raw = bytearray(json.dumps({"prompt": ["x" * 40_000] * 100}).encode())
    body = DECODERS[COMPLETIONS].decode(raw)
    tracemalloc.start()
    try:
        assert prompts_of(body.prompt, "prompt") == ["x" * 40_000] * 100
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1.5 * len(raw), "of the prompts themselves it is once"


# ----------------------------------------------------------------------------------------------------------------------
# What the parser of requests holds back counts against the bound of what it belongs to.


def test_trailers_do_not_count_against_the_next_head() -> None:
    paths: list[str] = []
    parser = RequestParser(
        HTTPLimits(max_head_bytes=1000),
        lambda scope, _may_follow, _expects: paths.append(scope["path"]),
        lambda _data: None,
        lambda: None,
    )
    many = b"y" * 700
    parser.feed(b"POST /1 HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
    parser.feed(b"0\r\nt: " + many)
    parser.feed(b"\r\n\r\nGET /2 HTTP/1.1\r\nz: " + many)
    parser.feed(b"\r\n\r\n")
    assert paths == ["/1", "/2"]
