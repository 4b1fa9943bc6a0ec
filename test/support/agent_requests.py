"""Requests of coding agents, in the shapes that their public documentation and clients show; all texts are our own."""

from __future__ import annotations

from base64 import b64encode
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


PATCH_GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""What the tool `apply_patch` takes: a grammar in the form in which the Codex CLI gives it."""
PATCH = '*** Begin Patch\n*** Update File: a.py\n@@ def f():\n-    return "a"\n+    return "\\n ü"\n*** End Patch\n'


def codex_agent(**fields: Any) -> dict[str, Any]:
    """Return a body of `/v1/responses` as the Codex CLI sends it, in the middle of its work."""

    def message(role: str, text: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    shell = {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "timeout_ms": {"type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    }
    step = {
        "type": "object",
        "properties": {"step": {"type": "string"}, "status": {"enum": ["pending", "done"]}},
        "required": ["step", "status"],
        "additionalProperties": False,
    }
    plan = {"type": "object", "properties": {"plan": {"type": "array", "items": step}}, "required": ["plan"]}
    encoded = "chitu1." + b64encode(b"Look first.").decode()
    return {
        "model": "tiny",
        "instructions": "You write code.",
        "input": [
            message("developer", "sandbox: none"),
            message("user", "<environment>\n  <folder>/srv/app</folder>\n</environment>"),
            message("user", "Fix a.py."),
            {"type": "reasoning", "summary": [], "encrypted_content": encoded},
            {**message("assistant", "I look."), "phase": "commentary"},
            {"type": "function_call", "name": "shell", "arguments": '{"command":["ls","-a"]}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "a.py\n"},
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "I think."}],
                "content": None,
                "encrypted_content": "gAAAAAB",
            },
            {
                "type": "custom_tool_call",
                "call_id": "call_2",
                "name": "apply_patch",
                "input": PATCH,
                "status": "completed",
            },
            {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "a"}},
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done!"},
            message("assistant", "It is done."),
            message("user", "Now test it."),
        ],
        "tools": [
            {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": shell},
            {"type": "function", "name": "update_plan", "description": "", "strict": False, "parameters": plan},
            {
                "type": "custom",
                "name": "apply_patch",
                "description": "Edits files.",
                "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
            },
            {"type": "local_shell"},
            {"type": "web_search", "external_web_access": False},
            {"type": "custom", "name": "note", "description": "Keeps a note.", "format": {"type": "text"}},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0198-session",
        "client_metadata": {"installation": "x"},
        "truncation": "auto",
        "text": {"verbosity": "medium"},
        **fields,
    }
