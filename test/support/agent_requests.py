"""Requests of coding agents, in the shapes that their public documentation and clients show; all texts are our own."""

from __future__ import annotations

from typing import Any

CACHED = {"type": "ephemeral"}


def _schema(index: int) -> dict[str, Any]:
    """Return a nested schema, as the tools of agents have."""
    edit = {
        "type": "object",
        "properties": {
            "old_text": {"type": "string", "description": "Text to replace"},
            "new_text": {"type": "string"},
            "mode": {"enum": ["first", "all"], "default": "first"},
        },
        "required": ["old_text", "new_text"],
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": f"File number {index}"},
            "edits": {"type": "array", "items": edit, "minItems": 1},
            "limit": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
            "options": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "required": ["path"],
        "additionalProperties": False,
    }


TOOL_NAMES = (
    *("read", "write", "edit", "run", "search", "list", "fetch", "plan", "ask", "task", "stop_task", "notebook"),
    *("mcp__tracker__open", "mcp__tracker__close", "mcp__docs__find", "skill"),
)


def anthropic_agent(num_rounds: int = 12, **fields: Any) -> dict[str, Any]:
    """Return a body of `/v1/messages` in the middle of an agent's work, after so many calls of tools."""
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<reminder>\nThe working folder is /srv/app.\n</reminder>"},
                {"type": "text", "text": "Rename the function `load` in every file."},
            ],
        }
    ]
    for i in range(num_rounds):
        blocks: list[dict[str, Any]] = [
            {"type": "thinking", "thinking": f"Round {i}: look at file {i}.", "signature": "EqQB" + "x" * 300},
            {"type": "text", "text": "" if i % 3 == 0 else f"Reading file {i}."},
            {"type": "tool_use", "id": f"toolu_{i}a", "name": "read", "input": {"path": f"src/{i}.py", "limit": None}},
        ]
        results: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": f"toolu_{i}a", "content": f"def load():\n    return {i}\n"}
        ]
        if i % 4 == 1:  # two calls at once, of which one fails
            edits = [{"old_text": 'print("a")\n', "new_text": "print('ü {}')\n", "mode": "all"}]
            blocks.append(
                {"type": "tool_use", "id": f"toolu_{i}b", "name": "edit", "input": {"path": "b.py", "edits": edits}}
            )
            results.append(
                {
                    "type": "tool_result",
                    "tool_use_id": f"toolu_{i}b",
                    "content": [{"type": "text", "text": "no such file"}, {"type": "text", "text": ""}],
                    "is_error": True,
                }
            )
        if i % 5 == 2:
            results[0]["content"] = []
            results.append({"type": "text", "text": "<reminder>Mind the tests.</reminder>"})
        messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    messages[-1]["content"][-1]["cache_control"] = CACHED
    return {
        "model": "tiny",
        "max_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "system": [
            {"type": "text", "text": "You help with software.", "cache_control": CACHED},
            {"type": "text", "text": "Rules:\n" + "- Be careful.\n" * 40, "cache_control": {**CACHED, "ttl": "1h"}},
        ],
        "messages": messages,
        "tools": [
            *(
                {"name": name, "description": f"Does {name}.", "input_schema": _schema(i)}
                for i, name in enumerate(TOOL_NAMES)
            ),
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8, "allowed_domains": []},
        ],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "user_1_account__session_2"},
        **fields,
    }
