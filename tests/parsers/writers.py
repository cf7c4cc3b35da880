"""Writes calls in every format as models do, to test the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Written = Sequence[tuple[str, dict[str, Any]]]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _unquoted(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def hermes(calls: Written) -> str:
    objects = (_json({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)


def qwen3_coder(calls: Written) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(f"<parameter={k}>\n{_unquoted(v)}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def glm45(calls: Written) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        keys = (f"<arg_key>{k}</arg_key>\n<arg_value>{_unquoted(v)}</arg_value>\n" for k, v in arguments.items())
        return f"<tool_call>{name}\n{''.join(keys)}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def deepseekv3(calls: Written) -> str:
    made = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(made) + "<｜tool▁calls▁end｜>"


def deepseekv31(calls: Written) -> str:
    made = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "".join(made) + "<｜tool▁calls▁end｜>"


def deepseekv32(calls: Written) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(
            f'<｜DSML｜parameter name="{k}" string="{_json(isinstance(v, str))}">{_unquoted(v)}</｜DSML｜parameter>\n'
            for k, v in arguments.items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>\n'

    return "<｜DSML｜function_calls>\n" + "".join(one(*call) for call in calls) + "</｜DSML｜function_calls>"


def minimax_m2(calls: Written) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(f'<parameter name="{k}">{_unquoted(v)}</parameter>\n' for k, v in arguments.items())
        return f'<invoke name="{name}">\n{values}</invoke>\n'

    return "<minimax:tool_call>\n" + "".join(one(*call) for call in calls) + "</minimax:tool_call>"


def kimi_k2(calls: Written) -> str:
    made = (
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for place, (name, arguments) in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(made) + "<|tool_calls_section_end|>"


def llama3(calls: Written) -> str:
    return "; ".join(_json({"name": name, "parameters": arguments}) for name, arguments in calls)


def mistral(calls: Written) -> str:
    return "[TOOL_CALLS] " + _json([{"name": name, "arguments": arguments} for name, arguments in calls])


def mistral_compact(calls: Written) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def pythonic(calls: Written) -> str:
    made = (f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls)
    return f"[{', '.join(made)}]"


def gpt_oss(calls: Written) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
        for name, arguments in calls
    )


WRITERS: dict[str, Callable[[Written], str]] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "glm45": glm45,
    "deepseekv3": deepseekv3,
    "deepseekv31": deepseekv31,
    "deepseekv32": deepseekv32,
    "minimax-m2": minimax_m2,
    "kimi_k2": kimi_k2,
    "llama3": llama3,
    "mistral": mistral,
    "mistral compact": mistral_compact,
    "pythonic": pythonic,
    "gpt-oss": gpt_oss,
}

MARKS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", ">"],
    "glm45": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "deepseekv3": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
                   "<｜tool▁sep｜>", "function<｜tool▁sep｜>", "```json", "```"],
    "deepseekv31": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
                    "<｜tool▁sep｜>"],
    "deepseekv32": ["<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="', '">',
                    "</｜DSML｜invoke>", '<｜DSML｜parameter name="', ' string="false"', "</｜DSML｜parameter>"],
    "minimax-m2": ["<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">', "</invoke>",
                   '<parameter name="', "</parameter>"],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.a:0"],
    "llama3": ["<|python_tag|>", ";", '{"name": ', '"parameters": '],
    "mistral": ["[TOOL_CALLS]", "[", "]", ",", "</s>"],
    "mistral compact": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "</s>"],
    "pythonic": ["<|python_start|>", "<|python_end|>", "[", "(", ")", "]", "'", "#", "\n", "=", "look_up("],
    "gpt-oss": ["<|start|>", "<|start|>assistant", "<|channel|>", "analysis", "final", "<|message|>", "<|end|>",
                "<|call|>", "<|return|>", "<|constrain|>", " to=functions.a"],
}  # fmt: skip
"""Markers of each format, which damaged answers contain."""


def written(name: str, thought: str | None, text: str, calls: Written) -> str:
    """Returns a complete answer: reasoning, text and calls."""
    made = WRITERS[name](calls)
    if name == "gpt-oss":
        messages = [] if thought is None else [f"<|channel|>analysis<|message|>{thought}<|end|>"]
        messages += [f"<|channel|>commentary<|message|>{text}<|end|>", made]
        return "<|start|>assistant".join(messages)
    if text and name == "llama3":
        made = f"<|python_tag|>{made}"
    if text and name == "pythonic":
        made = f"<|python_start|>{made}<|python_end|>"
    said = f"{text}\n{made}" if text else made
    return said if thought is None else f"<think>\n{thought}\n</think>\n\n{said}"
