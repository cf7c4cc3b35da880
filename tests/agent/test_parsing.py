"""Upstream slime's API for parsing a whole answer."""

from __future__ import annotations

import re

import pytest

from slime.agent.parsing import ParsedModelOutput, parse_model_output
from slime.errors import UserError

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
CALL = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"


def test_parses_reasoning_text_and_calls_of_an_answer() -> None:
    parsed = parse_model_output(f"hm</think>so {CALL}<|im_end|>", [TOOL], "qwen3_coder", "deepseek-r1")
    [use] = parsed.tool_uses
    assert re.fullmatch("call_[0-9a-f]{24}", use.pop("id"))
    assert parsed == ParsedModelOutput("hm", "so", [{"name": "f", "input": {"a": 1}}], False)


def test_malformed_calls_and_calls_without_a_parser_are_text() -> None:
    broken = CALL.removesuffix("</function></tool_call>")
    assert parse_model_output(broken, tool_parser="qwen3_coder") == ParsedModelOutput("", broken, [], True)
    assert parse_model_output(CALL) == ParsedModelOutput("", CALL, [], False)
    digits = '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>"
    assert parse_model_output(digits, tool_parser="hermes") == ParsedModelOutput("", digits, [], True)


def test_rejects_an_unknown_tool_parser() -> None:
    with pytest.raises(UserError, match="choose one of"):
        parse_model_output("", tool_parser="morse")
