"""Request bodies of agent command lines: the second turn of a task, after one tool call and its result."""

from __future__ import annotations

import copy
from typing import Any

SHELL = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
    "required": ["command"],
}

CLAUDE_CODE: dict[str, Any] = {
    "model": "slime-actor",
    "max_tokens": 32000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: none"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": '{"session_id": "8b0f"}'},
    "tools": [
        {"name": "Bash", "description": "Run a command", "input_schema": {**SHELL, "additionalProperties": False}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "messages": [
        {"role": "user", "content": "Write the file."},
        {"role": "system", "content": [{"type": "text", "text": "Today is Monday.", "cache_control": {"type": "e"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I write it.\n", "signature": "turn_1"},
                {"type": "text", "text": "Writing."},
                {"type": "tool_use", "id": "call_a", "name": "Bash", "input": {"command": "echo é > f"}},
                {"type": "tool_use", "id": "call_b", "name": "Bash", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_a", "content": "Exit code 1", "is_error": True},
                {
                    "type": "tool_result",
                    "tool_use_id": "call_b",
                    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "system", "content": "A file changed."},
    ],
}

CODEX: dict[str, Any] = {
    "model": "slime-actor",
    "instructions": "",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are Codex."}]},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "id": "msg_0f", "content": [{"type": "input_text", "text": "Write it."}]},
        {
            "type": "reasoning",
            "id": "rs_turn_1.0",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "I write it.\n"}],
            "encrypted_content": "turn_1",
        },
        {
            "type": "message",
            "id": "msg_turn_1.1",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Writing."}],
        },
        {
            "type": "function_call",
            "id": "fc_turn_1.2",
            "call_id": "call_a",
            "name": "exec_command",
            "arguments": '{"cmd": "echo \\u00e9 > f"}',
        },
        {"type": "custom_tool_call", "call_id": "call_b", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "function_call", "call_id": "call_c", "name": "find", "namespace": "mcp__docs", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_a", "output": "Exit code: 0"},
        {"type": "custom_tool_call_output", "call_id": "call_b", "output": "Success"},
        {"type": "function_call_output", "call_id": "call_c", "output": [{"type": "input_text", "text": "found"}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command",
            "strict": False,
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
        },
        {
            "type": "namespace",
            "name": "mcp__docs",
            "description": "Docs",
            "tools": [
                {"type": "function", "name": "find", "description": "Find", "strict": False, "parameters": SHELL}
            ],
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Patch files",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019a",
    "text": {"verbosity": "low"},
    "client_metadata": {"x": "y"},
}

_FUNCTION = {"name": "bash", "description": "Run a command", "parameters": SHELL}
_CALLS = [
    {"id": "call_a", "type": "function", "function": {"name": "bash", "arguments": '{"command":"echo é > f"}'}},
    {"id": "call_b", "type": "function", "function": {"name": "bash", "arguments": "{}"}},
]

OPENCODE: dict[str, Any] = {
    "model": "slime-actor",
    "max_tokens": 4096,
    "messages": [
        {"role": "system", "content": "You are opencode."},
        {"role": "user", "content": "Write it."},
        {"role": "assistant", "content": "Writing.", "reasoning_content": "I write it.\n", "tool_calls": _CALLS},
        {"role": "tool", "tool_call_id": "call_a", "content": "ok"},
        {"role": "tool", "tool_call_id": "call_b", "content": "ok too"},
    ],
    "tools": [{"type": "function", "function": _FUNCTION}],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}

QWEN_CODE: dict[str, Any] = {
    **copy.deepcopy(OPENCODE),
    "temperature": 0.7,
    "top_p": 0.9,
    "metadata": {"sessionId": "s", "promptId": "p"},
    "enable_thinking": True,
    "vl_high_resolution_images": True,
}
QWEN_CODE["messages"][1] = {"role": "user", "content": [{"type": "text", "text": "Write it."}]}
QWEN_CODE["messages"][3]["content"] = [{"type": "text", "text": "ok"}]
QWEN_CODE["messages"][2]["content"] = None

MINI: dict[str, Any] = {
    "model": "slime-actor",
    "messages": [
        {"role": "system", "content": "You can run commands."},
        {"role": "user", "content": "Write it."},
        {
            "role": "assistant",
            "reasoning_content": "I write it.\n",
            "provider_specific_fields": {"reasoning_content": "I write it.\n", "refusal": None},
            "function_call": None,
            "tool_calls": _CALLS[:1],
        },
        {"role": "tool", "tool_call_id": "call_a", "content": "<returncode>0</returncode>"},
    ],
    "tools": [{"type": "function", "function": _FUNCTION}],
    "parallel_tool_calls": True,
}
