"""Tools of `/v1/responses` in namespaces and in items: in the prompt, in answers and in histories."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import responses
from pydantic import TypeAdapter
from support.agent_requests import codex_agent

from chitu.errors import InvalidRequest
from chitu.http.answer.formats import AnswerHead, Delta, FinishedChoice, UsageCount, to_json
from chitu.http.ask.chat import chat_messages, chosen_tools
from chitu.http.ask.translation import Translation
from chitu.http.dialects.responses.answers import ResponsesFormat
from chitu.http.dialects.responses.bodies import ResponsesBody
from chitu.http.dialects.responses.chat import Repeated, chat_of_responses
from chitu.http.messages.call_objects import CallDelta, MessageDelta
from chitu.http.table import BODIES
from chitu.protocol import SamplingParams

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

SAMPLING = SamplingParams(max_tokens=1)


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": f"Does {name}.", "parameters": CITY, **more}


def namespace(name: str, *tools: dict[str, Any], about: str = "d") -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": about, "tools": list(tools)}


def decoded(**fields: Any) -> ResponsesBody:
    return BODIES.decoder(ResponsesBody).decode(json.dumps({"input": "a", **fields}).encode())


def translated(warnings: list[str] | None = None, **fields: Any) -> Translation:
    return chat_of_responses(decoded(**fields), (), [] if warnings is None else warnings)


def names(**fields: Any) -> list[str]:
    return [tool.function.name for tool in translated(**fields).chat.tools or ()]


def answer(body: ResponsesBody, *calls: tuple[str, str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the items of an answer that makes calls, and its events; a stream must have the same items."""
    head, usage = AnswerHead("id", 1, "m", "resp_"), UsageCount(3, 4, 1)
    made = tuple(CallDelta(i, text, f"call_{i}", name) for i, (name, text) in enumerate(calls))
    message = MessageDelta(calls=made)
    whole = ResponsesFormat(head, Repeated.of(body, SAMPLING)).full(
        [FinishedChoice(message, "tool_calls", None)], usage
    )
    output = json.loads(b"".join(whole))["output"]
    streamed = ResponsesFormat(head, Repeated.of(body, SAMPLING))
    data = streamed.opening(0) + streamed.delta(0, Delta(message, []))
    data += streamed.last(0, Delta("", [], reason="tool_calls")) + streamed.usage(usage)
    events = [json.loads(event.split("\ndata: ")[1]) for event in data.decode().split("\n\n")[:-1]]
    assert events[-1]["response"]["output"] == output
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    for item in output:
        TypeAdapter(responses.ResponseOutputItem).validate_python(item)
    return output, events


SERVERS = (
    function("f"),
    namespace("mcp__x", function("f"), function("g", strict=True), about="Of x."),
    namespace("mcp__y", function("f", defer_loading=True), {"type": "custom", "name": "note"}, about=""),
)


def test_functions_of_a_namespace_are_in_the_prompt_by_unique_names() -> None:
    warnings: list[str] = []
    chat = translated(warnings, tools=SERVERS).chat
    tools = {tool.function.name: tool.function for tool in chat.tools or ()}
    assert [*tools] == ["f", "mcp__x__f", "mcp__x__g", "mcp__y__f", "mcp__y__note"] and not warnings
    assert tools["mcp__x__f"].description == "[mcp__x: Of x.]\nDoes f." and tools["mcp__x__f"].parameters == CITY
    assert tools["mcp__x__g"].description == tools["mcp__y__f"].description.replace("f", "g") == "Does g."
    assert tools["mcp__x__g"].strict is True and tools["mcp__x__f"].strict is None
    assert [tool["function"]["name"] for tool in chosen_tools(chat).enforced] == [*tools], "g is strict"


def test_names_that_would_meet_get_a_number() -> None:
    tools = (
        namespace("a__b", function("c")),
        namespace("a", function("b__c")),
        function("a__b__c_2"),
        namespace("crm.v2 ü", function("f")),
        namespace("mcp__y__", function("f")),
        namespace("mcp__z", function("_search")),
        namespace("a", function("d")),
    )
    found = names(tools=tools)
    assert found == [
        *("a__b__c", "a__b__c_3", "a__b__c_2", "crm_v2____f", "mcp__y__f", "mcp__z_search", "a__d"),
    ]
    output, _ = answer(decoded(tools=tools), ("a__b__c_3", "{}"), ("crm_v2____f", "{}"), ("a__b__c_2", "{}"))
    assert [(item.get("namespace"), item["name"]) for item in output] == [
        *(("a", "b__c"), ("crm.v2 ü", "f"), (None, "a__b__c_2")),
    ]


def test_a_call_has_its_namespace_and_its_name_streamed_and_whole() -> None:
    body, arguments = decoded(tools=SERVERS), '{"city": "Rome"}'
    calls = (("mcp__x__f", arguments), ("f", arguments), ("mcp__y__note", '{"input": "a"}'))
    output, events = answer(body, *calls)
    told = [{name: item.get(name) for name in ("type", "namespace", "name", "call_id")} for item in output]
    assert told == [
        {"type": "function_call", "namespace": "mcp__x", "name": "f", "call_id": "call_0"},
        {"type": "function_call", "namespace": None, "name": "f", "call_id": "call_1"},
        {"type": "custom_tool_call", "namespace": "mcp__y", "name": "note", "call_id": "call_2"},
    ]
    assert "namespace" not in output[1] and output[2]["input"] == "a"
    opened = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("namespace") for item in opened] == ["mcp__x", None, "mcp__y"]
    done = [event["name"] for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done == ["f", "f"]
    # What comes back is the same call in the prompt.
    items = [{"role": "user", "content": "?"}, *output]
    items += [{"type": "function_call_output", "call_id": f"call_{i}", "output": "ok"} for i in range(2)]
    items.append({"type": "custom_tool_call_output", "call_id": "call_2", "output": "ok"})
    for tools in (SERVERS, ()):  # also if the tools are gone
        found = chat_messages(translated(input=items, tools=tools).chat.messages)
        made = [call["function"] for call in found[1]["tool_calls"]]
        assert [call["name"] for call in made] == ["mcp__x__f", "f", "mcp__y__note"]
        assert made[0]["arguments"] == {"city": "Rome"} and made[2]["arguments"] == {"input": "a"}
        assert [message["role"] for message in found[2:]] == ["tool"] * 3


def test_the_answer_repeats_namespaces_as_openais_client_reads_them() -> None:
    shown = Repeated.of(decoded(tools=SERVERS), SAMPLING).fields["tools"]
    read = [TypeAdapter(responses.Tool).validate_python(tool) for tool in json.loads(to_json(shown))]
    assert [tool.type for tool in read] == ["function", "namespace", "namespace"]
    assert isinstance(read[1], responses.NamespaceTool) and [tool.name for tool in read[1].tools] == ["f", "g"]


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({"type": "function", "name": "g"}, "mcp__x__g"),
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "function", "name": "f", "namespace": "mcp__y"}, "mcp__y__f"),
        ({"type": "function", "name": "mcp__y__f"}, "mcp__y__f"),
        ({"type": "custom", "name": "note"}, "mcp__y__note"),
    ],
)
def test_a_choice_names_a_function_with_or_without_its_namespace(choice: dict[str, Any], chosen: str) -> None:
    made = chosen_tools(translated(tools=SERVERS, tool_choice=choice).chat)
    assert made.is_required and [tool["function"]["name"] for tool in made.enforced] == [chosen]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": SERVERS[1:], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "'mcp__x', 'mcp__y'"),
        (
            {"tools": SERVERS, "tool_choice": {"type": "function", "name": "g", "namespace": "mcp__y"}},
            "tool_choice",
            "is none of tools",
        ),
        ({"tools": [namespace("a", function("f"), function("f"))]}, "tools[0].tools[1].name", "is there twice"),
        (
            {"tools": [function("g"), namespace("a", function("f")), namespace("a", function("f"))]},
            "tools[2].tools[0].name",
            "is there twice",
        ),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "is required"),
        ({"tools": [namespace("a", {"type": "function"})]}, "tools[0].tools[0].name", "is required"),
        ({"tools": [namespace("a", {"type": "function", "name": 1})]}, "tools[0].tools[0].name", "str"),
        ({"input": [{"type": "additional_tools", "tools": [{"name": "f"}]}]}, "input[0].tools", "type"),
    ],
)
def test_wrong_tools_and_choices_are_errors_of_their_place(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        chosen_tools(translated(**fields).chat)
    assert raised.value.param == param and says in raised.value.message


def test_errors_and_grammars_of_a_function_in_a_namespace_have_its_place() -> None:
    pattern = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    tools = [{"type": "web_search"}, namespace("n", function("f"), {"type": "custom", "name": "c", "format": pattern})]
    made = translated(tools=tools)
    for name, own in (
        ("tools[0].function.parameters.properties.a", "tools[1].tools[0].parameters.properties.a"),
        ("tools[1].function.parameters.properties.input", "tools[1].tools[1].format"),
    ):
        assert made.names.of(name) == own
    assert made.enforced["n__c"]["properties"]["input"]["pattern"] == "^(?:a+)$"


def test_only_what_a_namespace_has_of_other_servers_is_left_out() -> None:
    warnings: list[str] = []
    translated(warnings, tools=[namespace("n", function("f"), {"type": "web_search"})])
    assert warnings == ["tools[0].tools[1]: this server cannot run web_search, so the prompt leaves it out"]


# -------------------------------------------------------------------------------------------- tools that come later


SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": CITY}
FOUND = {
    "type": "tool_search_output",
    "call_id": "call_0",
    "status": "completed",
    "execution": "client",
    "tools": [namespace("mcp__x", function("f", defer_loading=True), function("late", unknown=1))],
}


def test_tools_of_items_are_offered_once() -> None:
    added = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [function("exec"), {"type": "web_search"}, *SERVERS[1:2]],
    }
    warnings: list[str] = []
    items = [added, {"role": "user", "content": "a"}, FOUND, added]
    chat = translated(warnings, input=items, tools=SERVERS[:1]).chat
    found = [tool.function.name for tool in chat.tools or ()]
    assert found == ["f", "exec", "mcp__x__f", "mcp__x__g", "mcp__x__late"]
    assert warnings == [
        "input[0].tools[1], input[3].tools[1]: this server cannot run web_search, so the prompt leaves it out"
    ]
    output, _ = answer(decoded(input=items, tools=SERVERS[:1]), ("mcp__x__late", "{}"))
    assert (output[0]["namespace"], output[0]["name"]) == ("mcp__x", "late")


def test_a_search_that_the_client_runs_is_a_function_and_its_call_an_item_of_its_own() -> None:
    body = decoded(tools=[SEARCH, function("f")])
    output, events = answer(body, ("tool_search", '{"city": "Rome"}'), ("f", "{}"))
    assert output[0] == {
        **{"id": "tsc_id_0", "type": "tool_search_call", "call_id": "call_0", "execution": "client"},
        **{"arguments": {"city": "Rome"}, "status": "completed"},
    }
    kinds = [event["type"] for event in events if event.get("output_index") == 0]
    assert kinds == ["response.output_item.added", "response.output_item.done"]
    items = [{"role": "user", "content": "a"}, output[0], FOUND]
    found = chat_messages(translated(input=items, tools=[SEARCH]).chat.messages)
    assert found[1]["tool_calls"][0]["function"] == {"name": "tool_search", "arguments": {"city": "Rome"}}
    assert found[2]["role"] == "tool" and "mcp__x__f, mcp__x__late" in found[2]["content"]


def test_a_search_of_another_server_is_left_out_with_its_call_and_output() -> None:
    warnings: list[str] = []
    call = {"type": "tool_search_call", "execution": "server", "call_id": None, "arguments": {"paths": ["a"]}}
    items = [{"role": "user", "content": "a"}, call, {**FOUND, "execution": "server", "call_id": None}]
    chat = translated(warnings, input=items, tools=[{"type": "tool_search"}]).chat
    assert [message["role"] for message in chat_messages(chat.messages)] == ["user"]
    assert [tool.function.name for tool in chat.tools or ()] == ["mcp__x__f", "mcp__x__late"], "they are there at once"
    assert [warning.split(":")[0] for warning in warnings] == ["input[1], input[2]", "tools[0]"]


def test_codex_with_mcp_servers_has_all_its_tools() -> None:
    given = codex_agent()
    given["tools"] = [*given["tools"], *SERVERS[1:]]
    found = names(**given)
    assert found == [
        *("shell", "update_plan", "apply_patch", "note"),
        *("mcp__x__f", "mcp__x__g", "mcp__y__f", "mcp__y__note"),
    ]
