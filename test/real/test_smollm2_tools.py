"""SmolLM2 with a chat template that has tools, which the published one has not: a unified instance."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from published import post, serving

from chitu.launch.local import LocalCluster

pytestmark = pytest.mark.timeout(600)
TEMPLATE = """{% if tools %}<|im_start|>system
You call functions. They are:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one as <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"type": "string", "maxLength": 20}}, "required": ["zone"]}
QUESTION = "How will the weather be in Paris for 3 days, in celsius?"


@pytest.fixture(scope="module")
def cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    shutil.copytree(smollm2, folder, symlinks=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(folder, "model.max_model_len=2048", topology="unified_local.yaml") as cluster:
        yield cluster


def check_arguments(arguments: dict[str, Any]) -> None:
    assert list(arguments) == ["city", "unit", "days"]
    assert isinstance(arguments["city"], str) and len(arguments["city"]) <= 20
    assert arguments["unit"] in ("celsius", "fahrenheit") and 1 <= arguments["days"] <= 7


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_a_call_that_must_come_comes_and_follows_its_schema(cluster: LocalCluster, choice: str) -> None:
    functions = [{"name": "weather", "parameters": WEATHER}, {"name": "time", "parameters": TIME}]
    named = {"type": "function", "function": {"name": choice}}
    answer = post(
        cluster,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=120,
        tools=[{"type": "function", "function": function} for function in functions],
        tool_choice=choice if choice == "required" else named,
        parallel_tool_calls=False,
    )["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] in ("tool_calls", "stop"), answer
    if choice == "required" and call["function"]["name"] == "time":
        assert isinstance(json.loads(call["function"]["arguments"])["zone"], str)
    else:
        assert call["function"]["name"] == "weather"
        check_arguments(json.loads(call["function"]["arguments"]))


def test_messages_enforce_a_call_too_and_its_result_is_answered(cluster: LocalCluster) -> None:
    tools = [{"name": "weather", "input_schema": WEATHER}]
    asked = {"role": "user", "content": QUESTION}
    first = post(cluster, "/v1/messages", messages=[asked], max_tokens=120, tools=tools, tool_choice={"type": "any"})
    (call,) = [part for part in first["content"] if part["type"] == "tool_use"]
    assert first["stop_reason"] == "tool_use"
    check_arguments(call["input"])
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "Rain on all three days, 12 degrees."}
    turns = [asked, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = post(cluster, "/v1/messages", messages=turns, max_tokens=60, tools=tools, tool_choice={"type": "none"})
    (part,) = second["content"]
    assert part["type"] == "text" and part["text"].strip()
