"""Bodies as clients and agents send them, with what other servers take: each is read as its client means it, and what
has no effect is named."""

from __future__ import annotations

import json
import shutil
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest
from support.agent_requests import anthropic_agent, codex_agent

from chitu.assets import TINY_MODEL_DIR
from chitu.config.schema import ModelConfig, RouterConfig
from chitu.errors import InvalidRequest
from chitu.grammars import GrammarCompiler
from chitu.http.ask.bodies import LARGE_BODY_BYTES
from chitu.http.ask.decoder import MAX_FIELD_BYTES, MAX_TOLD
from chitu.http.ask.parsed import ClusterFacts, ParsedRequest
from chitu.http.ask.reader import BodyWork, ReadBody
from chitu.http.ask.served_model import ModelLimits, ServedModel
from chitu.http.messages.call_formats import HermesParser
from chitu.http.table import READERS
from chitu.protocol import unpack_i32

TEMPLATE = """{#- <tool_call> {"name": ..., "arguments": ...} </tool_call> <think> </think> -#}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- if m.reasoning_content %}(thought {{ m.reasoning_content }}){% endif %}
{%- if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}
{%- if enable_thinking is defined and not enable_thinking %}[quick]{% endif %}"""
USER = {"role": "user", "content": "hi"}
MAX_LEN = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(TINY_MODEL_DIR, folder)
    Path(folder, "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return ServedModel.load(ModelConfig(path=str(folder), served_name="tiny"), 0)


def parsed(
    model: ServedModel,
    name: str,
    body: dict[str, Any] | bytes,
    takes_unknown: bool = RouterConfig().unknown_fields == "warn",
) -> ParsedRequest:
    facts = ClusterFacts(ModelLimits(MAX_LEN, model.tokenizer.vocab_size), "", model.tokenizer.vocab_size)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = BodyWork(model, takes_unknown, READERS).read(ReadBody(name, facts), raw, lambda: None)
    assert isinstance(found, ParsedRequest)
    return found


def prompt_of(model: ServedModel, found: ParsedRequest) -> str:
    return model.tokenizer.decode(unpack_i32(found.prompts[0].token_ids), skip_special_tokens=False)


def tool(name: str, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters, **more}}


def call(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": arguments}]}


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "4"}
OPEN_WEBUI = {
    **{"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 64.0},
    **{"chat_id": "3f", "session_id": "s", "id": "m1", "features": {"web_search": False}, "background_tasks": {}},
    "messages": [USER, {"role": "assistant", "content": "Yes?", "timestamp": 1, "models": ["tiny"]}, USER],
}
OPENCODE = {
    **{"model": "tiny", "max_tokens": 32000, "temperature": 0, "top_p": 1, "stream": True, "tool_choice": "auto"},
    **{"stream_options": {"include_usage": True}, "tools": [tool(f"tool{i}") for i in range(140)]},
    "messages": [
        {"role": "system", "content": "You code."},
        USER,
        {**call({"name": "tool1", "arguments": '{"x": 1}'}), "reasoning_content": "look"},
        RESULT,
    ],
}
LM_STUDIO = {"model": "tiny", "messages": [USER], "temperature": 0.7, "max_tokens": -1, "stream": False}
LITELLM = {
    "model": "tiny",
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "deep", "signature": "EqQB"},
                {"type": "redacted_thinking", "data": "xx"},
                {"type": "text", "text": "Right.", "cache_control": {"type": "ephemeral"}},
            ],
            "thinking_blocks": [{"type": "thinking", "thinking": "deep", "signature": "EqQB"}],
        },
        USER,
    ],
}
MISTRAL = {
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "de"}, {"type": "text", "text": "ep"}]},
                {"type": "refusal", "refusal": "Right."},
            ],
        },
    ]
}
CLIENTS = {
    # name: endpoint, body, texts in the prompt in their order, the fields that the warnings name in their order
    "Open WebUI": (
        *("chat", OPEN_WEBUI, ["[user]hi[assistant]Yes?[user]hi"]),
        ["chat_id", "session_id", "id", "features", "background_tasks", "messages[1].timestamp", "messages[1].models"],
    ),
    "opencode, with 140 tools": (
        *("chat", OPENCODE, ['"tool139"', "You code.", "(thought look)", '"arguments": {"x": 1}', "[tool]4"]),
        [],
    ),
    "LM Studio": ("chat", LM_STUDIO, ["[user]hi"], []),
    "litellm": ("chat", LITELLM, ["[assistant]Right.(thought deep)[user]"], []),
    "Mistral's parts": ("chat", MISTRAL, ["[assistant]Right.(thought deep)"], []),
    "Qwen's": ("chat", {"messages": [USER], "enable_thinking": False}, ["[user]hi[quick]"], []),
    "Ollama's": ("chat", {"messages": [USER], "num_ctx": 8192, "keep_alive": "5m", "options": {}}, ["[user]hi"], []),
    "arguments as an object": (
        *("chat", {"messages": [USER, call({"name": "f", "arguments": {"x": [1]}}), {**RESULT, "content": None}]}),
        *(['"arguments": {"x": [1]}', "[tool]"], []),
    ),
    "arguments as an object, of responses": (
        "responses",
        {
            "input": [
                {"type": "function_call", "name": "f", "call_id": "c", "arguments": {"x": 1}},
                {"type": "function_call_output", "call_id": "c", "output": "4"},
            ]
        },
        *(['"arguments": {"x": 1}', "[tool]4"], []),
    ),
    "samplers that are off": (
        "chat",
        {
            "messages": [USER],
            **{"typical_p": 1, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "dry_multiplier": 0},
            **{"dry_base": 1.75, "dry_allowed_length": 2, "xtc_probability": 0, "xtc_threshold": 0.1},
            **{"repeat_penalty": 1.0, "n_predict": -1, "do_sample": True, "logits_processors": []},
        },
        *(["[user]hi"], []),
    ),
    "Codex": ("responses", codex_agent(), ["You write code.", "Fix a.py.", "It is done."], None),
    "Claude Code": ("messages", anthropic_agent(), ["You help with software.", "Rename the function"], None),
    "a newer Claude Code": (
        *("messages", anthropic_agent(1, effort_hint="x", speed="fast"), ["You help with software."]),
        ["effort_hint", "tools[16]"],
    ),
    "a newer Codex": (
        "responses",
        {"input": "hi", "turn_metadata": {"a": 1}, "store": False},
        ["hi"],
        ["turn_metadata"],
    ),
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("padding", [0, LARGE_BODY_BYTES, 2 * MAX_FIELD_BYTES])
def test_what_clients_send_is_taken_and_what_has_no_effect_is_named(
    model: ServedModel, client: str, padding: int
) -> None:
    name, body, texts, named = CLIENTS[client]
    found = parsed(model, name, json.dumps(body).encode() + b" " * padding)
    prompt, at = prompt_of(model, found), 0
    for text in texts:
        at = prompt.index(text, at)
    if named is not None and padding <= MAX_FIELD_BYTES:
        assert [warning.split(":")[0] for warning in found.warnings] == named


def test_a_body_of_many_unknown_fields_is_taken_and_only_the_first_are_named(model: ServedModel) -> None:
    body = {"messages": [USER], **{f"field{i}": i for i in range(100)}}
    warnings = parsed(model, "chat", body).warnings
    assert len(warnings) == MAX_TOLD + 1 and "field0: " in warnings[0] and "and 92 more fields" in warnings[-1]
    large = {"messages": [USER], **{f"field{i}": "x" * 100 for i in range(1000)}}
    warnings = parsed(model, "chat", large).warnings
    assert [warning.split(":")[0] for warning in warnings] == ["field0"]
    with pytest.raises(InvalidRequest) as raised:
        parsed(model, "chat", {**large, "typical_p": 0.5})
    assert raised.value.param == "typical_p"
    within = {"messages": [{**USER, **{f"field{i}": "x" * 100 for i in range(1000)}}]}
    warnings = parsed(model, "chat", within).warnings
    assert [warning.split(":")[0] for warning in warnings] == ["messages[0].field0"]


@pytest.mark.parametrize("padding", [0, LARGE_BODY_BYTES])
@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("chat", {"messages": [USER], "typical_p": 0.9}, "typical_p"),
        ("chat", {"messages": [{**USER, "new": 1}], "xtc_probability": 0.5}, "xtc_probability"),
        (
            *(
                "chat",
                {"messages": [{**USER, "new": 1}], "structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            ),
            "structured_outputs.whitespace_pattern",
        ),
        ("chat", {"messages": [{**USER, "new": 1}, {**USER, "images": ["aGk="]}]}, "messages[1].images"),
        (
            "chat",
            {
                "messages": [
                    {**USER, "new": 1},
                    {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:"}}]},
                ]
            },
            "messages[1].content[0]",
        ),
        ("chat", {"messages": [USER], "stop_sequences": ["a"], "new": 1}, "stop_sequences"),
        ("responses", {"input": "hi", "seed": 3, "new": 1}, "seed"),
        ("responses", {"input": "hi", "max_tokens": 3}, "max_tokens"),
        ("messages", {"messages": [USER], "max_tokens": 1, "presence_penalty": 0.5}, "presence_penalty"),
    ],
)
def test_what_would_change_tokens_is_refused_by_name_at_any_depth(
    model: ServedModel, name: str, body: dict[str, Any], param: str, padding: int
) -> None:
    for takes_unknown in (True, False):
        with pytest.raises(InvalidRequest) as raised:
            parsed(model, name, json.dumps(body).encode() + b" " * padding, takes_unknown)
        assert raised.value.param == param or (not takes_unknown and "new" in str(raised.value.param))


def test_an_operator_may_have_unknown_fields_refused(model: ServedModel) -> None:
    for body, param in (
        ({"messages": [USER], "chat_id": "x"}, "chat_id"),
        ({"messages": [USER, {**USER, "timestamp": 1}], "user": "u"}, "messages[1].timestamp"),
    ):
        with pytest.raises(InvalidRequest) as raised:
            parsed(model, "chat", body, takes_unknown=False)
        assert raised.value.param == param
    parsed(model, "chat", {"messages": [USER], "user": "u"}, takes_unknown=False)


ENDPOINTS = {
    "completion": ({"prompt": "hi"}, "max_tokens"),
    "chat": ({"messages": [USER]}, "max_tokens"),
    "chat of OpenAI's newer clients": ({"messages": [USER]}, "max_completion_tokens"),
    "responses": ({"input": "hi"}, "max_output_tokens"),
    "messages": ({"messages": [USER]}, "max_tokens"),
}


@pytest.mark.parametrize("which", ENDPOINTS)
def test_tokens_are_counted_as_clients_write_numbers_and_minus_one_is_no_limit(model: ServedModel, which: str) -> None:
    body, field = ENDPOINTS[which]
    name = which.split()[0]
    for given, expected in (("100.0", 100), ("7", 7), ("-1", None), ("-1.0", None)):
        found = parsed(model, name, json.dumps(body)[:-1].encode() + f', "{field}": {given}}}'.encode())
        prompt = found.prompts[0]
        assert found.samplings[0].max_tokens == (expected or MAX_LEN - prompt.num_tokens), given
    for given in ("0", "-2", "1.5", "1e400", '"7"'):
        with pytest.raises(InvalidRequest) as raised:
            parsed(model, name, json.dumps(body)[:-1].encode() + f', "{field}": {given}}}'.encode())
        assert raised.value.param in (field, None), given  # 1e400 is no number of JSON decoders


def test_other_whole_numbers_may_be_floats_and_texts_stay_as_they_are(model: ServedModel) -> None:
    messages = json.dumps([{**USER, "content": '"seed": 5.0, "top_k":1.0'}]).encode()
    raw = b'{"messages":%b,"seed": 5.0,"top_k":40.0 ,"n":2.00}' % messages
    found = parsed(model, "chat", raw)
    assert (found.samplings[0].seed, found.samplings[0].top_k, found.options.n) == (5, 40, 2)
    assert '"seed": 5.0, "top_k":1.0' in prompt_of(model, found)


def test_a_byte_order_mark_ahead_of_a_body_is_skipped(model: ServedModel) -> None:
    for padding in (b"", b" " * LARGE_BODY_BYTES):
        found = parsed(model, "chat", BOM_UTF8 + json.dumps({"messages": [USER]}).encode() + padding)
        assert "[user]hi" in prompt_of(model, found)


def test_thinking_at_the_top_is_the_templates_choice_or_a_warning(model: ServedModel) -> None:
    assert "[quick]" not in prompt_of(model, parsed(model, "chat", {"messages": [USER], "enable_thinking": True}))
    both = {"messages": [USER], "enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}
    assert "[quick]" in prompt_of(model, parsed(model, "chat", both))
    effort = {"messages": [USER], "enable_thinking": False, "reasoning_effort": "high"}
    assert "[quick]" in prompt_of(model, parsed(model, "chat", effort))


def test_as_many_tools_are_taken_as_a_body_holds(model: ServedModel) -> None:
    tools = [tool(f"mcp__server__tool_{i}", description="words " * 100) for i in range(1100)]
    found = parsed(model, "chat", {"messages": [USER], "tools": tools})
    assert "mcp__server__tool_1099" in prompt_of(model, found)
    with pytest.raises(InvalidRequest, match="a call can be enforced of at most 65536") as raised:
        parsed(model, "chat", {"messages": [USER], "tools": tools, "tool_choice": "required"})
    assert raised.value.param == "tools"


# ------------------------------------------------------------------------------------------------------- allowed tools


def allows(model: ServedModel, found: ParsedRequest, text: str) -> bool:
    """Return whether the answer may be this text."""
    grammar = found.samplings[0].grammar
    if grammar is None:
        return True
    tokenizer = model.tokenizer
    matcher = GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(grammar).matcher()
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not matcher.mask()[token // 32] >> (token % 32) & 1:
            return False
        matcher.consume([token])
    return any(bool(matcher.mask()[eos // 32] >> (eos % 32) & 1) for eos in tokenizer.eos_token_ids)


def written(name: str, arguments: str = '{"x": 3}') -> str:
    begin, end = HermesParser.written(name)
    return begin + arguments + end


def chosen(api: str, mode: str, names: list[str]) -> dict[str, Any]:
    if api == "chat":
        tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in names]
        choice: dict[str, Any] = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
        return {"messages": [USER], "tools": [tool("add"), tool("look"), tool("save")], "tool_choice": choice}
    tools = [{"type": "function", "name": name} for name in names]
    offered = [{"type": "function", **tool(name)["function"]} for name in ("add", "look", "save")]
    return {"input": "hi", "tools": offered, "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": tools}}


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_calls_are_of_allowed_tools_alone_and_the_prompt_has_all(model: ServedModel, api: str, mode: str) -> None:
    found = parsed(model, api, chosen(api, mode, ["add", "look"]))
    assert all(f'"{name}"' in prompt_of(model, found) for name in ("add", "look", "save"))
    assert found.plan is not None and set(found.plan.names) == {"add", "look"}
    for name, is_allowed in (("add", True), ("look", True), ("save", False)):
        assert allows(model, found, written(name)) is is_allowed, name
    assert allows(model, found, "Just text.") is (mode == "auto")
    assert allows(model, found, written("add", '{"y": 3}')) is (mode == "auto"), "only an enforced call has a schema"
    everything = parsed(model, api, chosen(api, "auto", ["add", "look", "save"]))
    assert everything.samplings[0].grammar is None


@pytest.mark.parametrize(
    ("api", "names", "param"),
    [
        ("chat", ["add", "nothing"], "tool_choice.allowed_tools.tools[1]"),
        ("responses", ["nothing"], "tool_choice.tools"),
        ("chat", [], "tool_choice.allowed_tools.tools"),
        ("responses", [], "tool_choice.tools"),
    ],
)
def test_a_tool_that_is_allowed_is_one_of_those_offered(
    model: ServedModel, api: str, names: list[str], param: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parsed(model, api, chosen(api, "auto", names))
    assert raised.value.param == param


def test_allowed_tools_that_only_another_server_runs_are_left_out_with_a_warning(model: ServedModel) -> None:
    body = chosen("responses", "required", ["look"])
    body["tool_choice"]["tools"].append({"type": "mcp", "server_label": "x"})
    found = parsed(model, "responses", body)
    assert found.plan is not None and set(found.plan.names) == {"look"}
    assert any(warning.startswith("tool_choice.tools[1]: ") for warning in found.warnings)
