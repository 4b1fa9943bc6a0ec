"""Items that agents have in their histories at `/v1/responses`: calls with their outputs, and what is no text."""

from __future__ import annotations

import json
from base64 import b64encode
from itertools import permutations
from typing import Any

import pytest

from chitu.errors import InvalidRequest
from chitu.http.ask.chat import chat_messages
from chitu.http.dialects.responses.bodies import ResponsesBody
from chitu.http.dialects.responses.chat import chat_of_responses
from chitu.http.table import BODIES

ASK = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a?"}]}
SAY = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a."}]}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"}
NO_IMAGE = "[image left out: this model takes text alone]"
NOT_RUN = "this server cannot run {}, so the prompt leaves it out"
SERVED = "this server serves text, so the prompt has a placeholder for"


def shown(*items: dict[str, Any], warnings: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the messages for the chat template; a result must answer a call before it, as gpt-oss's demands."""
    body = BODIES.decoder(ResponsesBody).decode(json.dumps({"input": items}).encode())
    found = chat_messages(chat_of_responses(body, (), [] if warnings is None else warnings).chat.messages)
    called: set[str] = set()
    for message in found:
        called |= {call["id"] for call in message.get("tool_calls", ())}
        assert message["role"] != "tool" or message["tool_call_id"] in called
    return found


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "ok"}


def test_reasoning_in_several_items_is_one_text() -> None:
    found = shown(ASK, reasoning("a"), reasoning("b"), {"type": "reasoning", "summary": []}, CALL, OUTPUT)
    assert found[1]["reasoning_content"] == "a\nb" and len(found[1]["tool_calls"]) == 1 and len(found) == 3
    found = shown(ASK, reasoning("a"), SAY, reasoning("b"), CALL, OUTPUT)
    assert (found[1]["reasoning_content"], found[1]["content"], len(found)) == ("a\nb", "a.", 3)


def test_reasoning_of_a_turn_that_was_cut_is_left_out_with_a_warning() -> None:
    warnings: list[str] = []
    assert [message["role"] for message in shown(ASK, reasoning("a"), ASK, warnings=warnings)] == ["user", "user"]
    assert warnings == ["input[1]: the prompt leaves out reasoning"]


EXEC = {"type": "exec", "command": ["ls", "-a"], "env": {}, "timeout_ms": None}
PATCH = {"type": "update_file", "path": "a.py", "diff": "@@"}
SHOT = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"}
PAIRS: list[tuple[dict[str, Any], dict[str, Any], str, dict[str, Any], str]] = [
    (
        {"type": "local_shell_call", "call_id": "c", "status": "completed", "action": EXEC},
        {"type": "function_call_output", "call_id": "c", "output": "a.py"},
        *("local_shell", EXEC, "a.py"),
    ),
    (
        {"type": "local_shell_call", "id": "c", "call_id": None, "status": "completed", "action": EXEC},
        {"type": "local_shell_call_output", "id": "c", "output": '{"output": "a.py"}', "status": None},
        *("local_shell", EXEC, '{"output": "a.py"}'),
    ),
    (
        {
            **{"type": "shell_call", "id": "sh_1", "call_id": "c", "status": "completed", "environment": None},
            "action": {"commands": ["ls"], "max_output_length": 9, "timeout_ms": None},
        },
        {
            **{"type": "shell_call_output", "call_id": "c", "max_output_length": 9},
            "output": [
                {"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 0}, "created_by": "x"},
                {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
            ],
        },
        *("shell", {"commands": ["ls"], "max_output_length": 9, "timeout_ms": None}),
        "a\nb\n[exit 0]\n[timeout]",
    ),
    (
        {"type": "apply_patch_call", "call_id": "c", "status": "completed", "operation": PATCH},
        {"type": "apply_patch_call_output", "call_id": "c", "status": "failed", "output": "no such file"},
        *("apply_patch", PATCH, "no such file"),
    ),
    (
        {"type": "apply_patch_call", "call_id": "c", "status": "completed", "operation": PATCH},
        {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"},
        *("apply_patch", PATCH, "completed"),
    ),
    (
        {
            **{"type": "computer_call", "call_id": "c", "id": "x", "status": "completed", "pending_safety_checks": []},
            "action": {"type": "click", "x": 1},
        },
        {"type": "computer_call_output", "call_id": "c", "output": SHOT, "acknowledged_safety_checks": []},
        *("computer", {"type": "click", "x": 1}, NO_IMAGE),
    ),
    (
        {"type": "computer_call", "call_id": "c", "id": "x", "actions": [{"type": "click"}]},
        {"type": "computer_call_output", "call_id": "c", "output": {**SHOT, "image_url": None, "file_id": "f"}},
        *("computer", {"actions": [{"type": "click"}]}, NO_IMAGE),
    ),
    (
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "b"}, IMAGE]},
        *("f", {"input": "a"}, f"b\n{NO_IMAGE}"),
    ),
    (
        {"type": "function_call", "call_id": "c", "namespace": "mcp__x", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": {"content": "b", "success": False}},
        *("mcp__x__f", {"a": 1}, "b"),
    ),
    (
        {"type": "browser_call", "call_id": "c", "name": "go", "arguments": {"url": "x"}},
        {"type": "browser_call_output", "call_id": "c", "output": {"status": 200}},
        *("go", {"url": "x"}, '{"status":200}'),
    ),
]


@pytest.mark.parametrize(("call", "output", "name", "arguments", "text"), PAIRS)
def test_a_call_and_its_output_stay_together(
    call: dict[str, Any], output: dict[str, Any], name: str, arguments: dict[str, Any], text: str
) -> None:
    for between in ([], [SAY]):
        found = shown(ASK, call, *between, output, ASK)
        assert found[1]["tool_calls"] == [
            {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
        ]
        results = [message for message in found if message["role"] == "tool"]
        assert [(result["content"], result["tool_call_id"]) for result in results] == [(text, "c")]
    # Without the call, or with a call of another id, the output is text of the user, in any order of the items.
    for items in permutations([SAY, {**call, "call_id": "d", "id": "d"}, output]):
        found = shown(ASK, *items, ASK)
        [orphan] = [message for message in found if text in message["content"]]
        assert orphan["role"] == "user" and orphan["content"].startswith("[result of a call")


def test_an_output_without_a_call_names_its_function() -> None:
    named = {"type": "function_call_output", "name": "create", "namespace": "app", "output": "ok"}
    for item in (named, {**named, "call_id": "c"}, {**named, "call_id": None}):
        assert shown(item, ASK)[0] == {"role": "user", "content": "[result of a call of app__create]\nok"}


def test_a_call_of_an_mcp_server_has_its_output_in_one_item() -> None:
    call = {
        **{"type": "mcp_call", "id": "mcp_1", "server_label": "docs", "name": "find", "arguments": '{"a": 1}'},
        **{"approval_request_id": None, "error": None, "output": "found"},
    }
    found = shown(ASK, reasoning("Hm."), call, SAY, ASK)
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant", "user"]
    assert found[1]["tool_calls"][0]["function"] == {"name": "docs__find", "arguments": {"a": 1}}
    assert found[1]["reasoning_content"] == "Hm." and found[2]["content"] == "found"
    failed = {**call, "output": None, "error": {"type": "http_error", "code": 404}}
    assert shown(ASK, failed)[2]["content"] == '{"type":"http_error","code":404}'


def test_what_ran_on_another_server_is_left_out_with_its_output() -> None:
    warnings: list[str] = []
    items = [
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "a"}},
        {"type": "file_search_call", "id": "fs", "queries": ["a"], "results": None},
        {"type": "image_generation_call", "id": "ig", "result": "AAAA", "revised_prompt": "a"},
        {"type": "code_interpreter_call", "id": "ci", "code": "1", "container_id": "x", "outputs": []},
        {"type": "mcp_list_tools", "id": "ml", "server_label": "s", "tools": [{"name": "f", "input_schema": {}}]},
        {"type": "mcp_approval_request", "id": "ma", "server_label": "s", "name": "f", "arguments": "{}"},
        {"type": "mcp_approval_response", "approval_request_id": "ma", "approve": True, "reason": None},
        {"type": "program", "id": "p", "call_id": "pc", "code": "f()", "fingerprint": "x"},
        {"type": "program_output", "id": "po", "call_id": "pc", "result": "1", "status": "completed"},
        {"type": "function_call_output", "call_id": "pc", "output": "1"},
    ]
    found = shown(ASK, *items, SAY, ASK, warnings=warnings)
    assert [message["role"] for message in found] == ["user", "assistant", "user"]
    assert len(warnings) == 1 and warnings[0].startswith("input[1], input[2], input[3], input[4], ...: this server")
    for item in items[:9]:
        warnings = []
        shown(ASK, item, SAY, ASK, warnings=warnings)
        assert warnings == [f"input[1]: {NOT_RUN.format(item['type'])}"]


def test_what_is_not_for_the_model_is_left_out_with_a_warning() -> None:
    for item in (
        {"type": "ghost_snapshot", "ghost_commit": {"id": "x", "parent": None}},
        {"type": "compaction_trigger"},
        {"type": "configuration_update", "reasoning": {"effort": "low"}},
        {"type": "other"},
        {"type": "of_tomorrow", "id": "x"},
    ):
        warnings: list[str] = []
        assert len(shown(ASK, item, SAY, ASK, warnings=warnings)) == 3
        assert warnings == [f"input[1]: the prompt leaves out {item['type']}"]
    told = shown(ASK, {"type": "of_tomorrow", "content": "Hear!"}, SAY, ASK)
    assert told[1] == {"role": "user", "content": "Hear!"}


@pytest.mark.parametrize("kind", ["compaction", "compaction_summary", "context_compaction"])
def test_a_summary_that_only_its_server_can_read_is_a_placeholder(kind: str) -> None:
    warnings: list[str] = []
    found = shown({"type": kind, "encrypted_content": "gAAAA"}, ASK, warnings=warnings)
    assert found[0] == {"role": "user", "content": f"[{kind} of earlier turns left out]"}
    assert warnings == [f"input[0]: {SERVED} {kind}"]


def test_a_message_of_another_agent_and_a_refusal_are_text() -> None:
    parts = [{"type": "input_text", "text": "Done."}, {"type": "encrypted_content", "encrypted_content": "x"}]
    told = {"type": "agent_message", "author": "/root/reviewer", "recipient": "/root", "content": parts}
    refusal = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    passed = {"internal_chat_message_metadata_passthrough": {"turn_id": "x"}}
    found = shown(ASK, {**refusal, **passed}, told, ASK)
    assert found[1] == {"role": "assistant", "content": "I cannot."}
    assert found[2]["content"] == "[message of /root/reviewer]\nDone.\n[encrypted_content left out]"


FILE = {"type": "input_file", "filename": "a.md", "file_data": "data:;base64," + b64encode(b"# b").decode()}
PDF = {"type": "input_file", "filename": "a.pdf", "file_url": "https://x/a.pdf"}


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (IMAGE, NO_IMAGE),
        ({"type": "input_image", "file_id": "f", "detail": "auto"}, NO_IMAGE),
        (PDF, "[input_file a.pdf left out]"),
        ({"type": "input_file", "file_id": "f"}, "[input_file left out]"),
        ({"type": "input_audio", "audio_url": "data:"}, "[sound left out: this model takes text alone]"),
        (
            {"type": "input_audio", "input_audio": {"data": "", "format": "mp3"}},
            "[sound left out: this model takes text alone]",
        ),
        (FILE, "a.md\n# b"),
    ],
)
def test_what_is_no_text_is_a_placeholder_unless_the_last_turn_asks_about_it(part: dict[str, Any], text: str) -> None:
    asked = {"role": "user", "content": [{"type": "input_text", "text": "See:"}, part]}
    is_named = part is not FILE
    for items, place, where in (
        ([asked, SAY, ASK], 0, "input[0].content[1]"),
        ([asked, CALL, OUTPUT], 0, "input[0].content[1]"),
        ([ASK, CALL, {**OUTPUT, "output": asked["content"]}], 2, "input[2].output[1]"),
        ([ASK, CALL, {**OUTPUT, "output": asked["content"]}, SAY, ASK], 2, "input[2].output[1]"),
        ([ASK, CALL, OUTPUT, asked], 3, "input[3].content[1]"),
    ):
        warnings: list[str] = []
        assert shown(*items, warnings=warnings)[place]["content"] == f"See:\n{text}"
        assert warnings == ([f"{where}: {SERVED} {part['type']}"] if is_named else [])
    for before in ([], [ASK, SAY]):
        if is_named and part["type"] != "input_image":  # the model cannot see it, whoever asks
            with pytest.raises(InvalidRequest, match="text") as raised:
                shown(*before, asked)
            assert raised.value.param == f"input[{len(before)}].content[1]"
        else:
            assert shown(*before, asked)[-1]["content"] == f"See:\n{text}"


def test_a_reference_to_what_is_stored_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nothing is stored") as raised:
        shown(ASK, {"type": "item_reference", "id": "msg_1"})
    assert raised.value.param == "input[1].type"


def test_an_error_of_a_message_names_the_item_that_it_begins_with() -> None:
    items = [ASK, reasoning("r"), SAY, ASK]
    body = BODIES.decoder(ResponsesBody).decode(json.dumps({"instructions": "i", "input": items}).encode())
    names = chat_of_responses(body, (), []).names
    assert [names.of(f"messages[{i}].content") for i in range(4)] == [
        "instructions",
        "input[0]",
        "input[1]",
        "input[3]",
    ]
