"""Every format as models write it, made from calls: what the parsers are tested with."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Written = Sequence[tuple[str, dict[str, Any]]]


def hermes(calls: Written) -> str:
    objects = (json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)


def _unquoted(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def qwen3_coder(calls: Written) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(f"<parameter={k}>\n{_unquoted(v)}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


WRITERS: dict[str, Callable[[Written], str]] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
}

MARKS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", ">"],
}
"""What a broken answer may be made of besides."""
