"""Each tool-call format as its models write it: calls, text that is no call, and streamed events."""

from __future__ import annotations

from typing import Any

import pytest

from slime.models.parsers.events import (
    Call,
    CallArguments,
    CallBegun,
    CallEnded,
    Event,
    IllFormed,
    ParsedOutput,
    Reasoning,
    Text,
    gathered,
)
from slime.models.parsers.formats import REASONING_PARSERS, TOOL_CALL_PARSERS, Formats, make_parser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        },
    }
]


def parsed(tool: str | None, *pieces: str, reasoning: str | None = None) -> list[Event]:
    parser = make_parser(Formats(tool, reasoning), tools=TOOLS, ids=lambda: "call_1")
    return [event for piece in pieces for event in parser.feed(piece)] + parser.end()


def f(arguments: str) -> tuple[Call, ...]:
    return (Call("call_1", "f", arguments),)


def broken(text: str) -> ParsedOutput:
    return ParsedOutput(None, text, (), True)


@pytest.mark.parametrize(
    ("tool", "text", "output"),
    [
        # missing tags
        ("qwen3_coder", "<function=f><parameter=a>1</parameter></function>", ParsedOutput(None, "", f('{"a": 1}'))),
        ("qwen3_coder", "<tool_call><function=f></function>", ParsedOutput(None, "", f("{}"))),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1", broken("<tool_call><function=f><parameter=a>1")),
        ("qwen3_coder", "<tool_call>f</tool_call>", broken("<tool_call>f</tool_call>")),
        # GLM-4.7 writes no line breaks
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", ParsedOutput(None, "", f('{"a": 1}'))),
        ("glm45", "<tool_call>f</tool_call><|observation|>", ParsedOutput(None, "", f("{}"))),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>1</tool_call>", broken("<tool_call>f\n<arg_key>a</arg_key>1</tool_call>")),
        ("glm45", '<tool_call>{"name": "f"}</tool_call>', broken('<tool_call>{"name": "f"}</tool_call>')),
        # calls in sections
        ("deepseekv31", "hm<｜tool▁calls▁begin｜>", broken("hm<｜tool▁calls▁begin｜>")),
        ("deepseekv31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>\nb", ParsedOutput(None, "b", f("{}"))),
        ("deepseekv31", "a <｜tool▁calls▁end｜>", ParsedOutput(None, "a <｜tool▁calls▁end｜>")),
        ("deepseekv3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": 1}\n```<｜tool▁call▁end｜>", ParsedOutput(None, "", f('{"a": 1}'))),
        ("deepseekv3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", broken("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}")),
        ("deepseekv32", '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter></｜DSML｜invoke>', ParsedOutput(None, "", f('{"a": "1"}'))),
        ("deepseekv32", '<｜DSML｜invoke name="f"><｜DSML｜parameter name="b" string="false">[1</｜DSML｜parameter></｜DSML｜invoke>', ParsedOutput(None, "", f('{"b": "[1"}'))),
        ("minimax-m2", '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>', ParsedOutput(None, "", f('{"a": 1}'))),
        # Kimi's ids are markers
        ("kimi_k2", '<|tool_call_begin|>functions.f:12<|tool_call_argument_begin|>{"a":1}<|tool_call_end|>', ParsedOutput(None, "", f('{"a":1}'))),
        ("kimi_k2", "<|tool_call_begin|>f:0 <|tool_call_argument_begin|>{}<|tool_call_end|>", ParsedOutput(None, "", f("{}"))),
        ("kimi_k2", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}", broken("<|tool_call_begin|>f<|tool_call_argument_begin|>{}")),
        # Llama: the answer itself may be JSON
        ("llama3", '{"name": "f", "parameters": {"a": 1}}', ParsedOutput(None, "", f('{"a": 1}'))),
        ("llama3", '{"type": "function", "name": "f", "parameters": {}}<|eom_id|>', ParsedOutput(None, "", f("{}"))),
        ("llama3", '{"name": "Ann", "parameters": {}}', ParsedOutput(None, '{"name": "Ann", "parameters": {}}')),
        ("llama3", ' {"answer": 5}\n', ParsedOutput(None, ' {"answer": 5}\n')),
        ("llama3", 'so {"name": "f", "parameters": {}}', ParsedOutput(None, 'so {"name": "f", "parameters": {}}')),
        ("llama3", 'so <|python_tag|>{"name": "g"} or', ParsedOutput(None, "so or", (Call("call_1", "g", "{}"),))),
        ("llama3", "<|python_tag|>print(1)", broken("<|python_tag|>print(1)")),
        # Mistral: a list of calls, or single calls
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcDEF123"}]</s>', ParsedOutput(None, "", f('{"a": 1}'))),
        ("mistral", "a[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}", ParsedOutput(None, "a", f("{}"))),
        ("mistral", "[TOOL_CALLS]f{}", ParsedOutput(None, "", f("{}"))),
        ("mistral", '[TOOL_CALLS] [{"name": "f"} {', ParsedOutput(None, "{", f("{}"), True)),
        ("mistral", "[TOOL_CALLS] []", broken("[TOOL_CALLS] []")),
        # Python calls
        ("pythonic", "[f(a=1, b='x', c=[True, None, {'d': -1.5}], e=false)]", ParsedOutput(None, "", f('{"a": 1, "b": "x", "c": [true, null, {"d": -1.5}], "e": false}'))),
        ("pythonic", "<|python_start|>[f()]<|python_end|>", ParsedOutput(None, "", f("{}"))),
        ("pythonic", "[f(b='\\&')]", ParsedOutput(None, "", f('{"b": "\\\\&"}'))),
        ("pythonic", "[1, 2]", ParsedOutput(None, "[1, 2]")),
        ("pythonic", "[g()]", ParsedOutput(None, "[g()]")),
        ("pythonic", "[f(1)]", ParsedOutput(None, "[f(1)]")),
        ("pythonic", "[f(a=open('x'))]", ParsedOutput(None, "[f(a=open('x'))]")),
        ("pythonic", "[f(a={'k': 1, 'k': 2})]", ParsedOutput(None, "[f(a={'k': 1, 'k': 2})]")),
        ("pythonic", "[f(a=" + "[" * 1000, ParsedOutput(None, "[f(a=" + "[" * 1000)),
        ("pythonic", "<|python_start|>[f(a=1e999)]", broken("<|python_start|>[f(a=1e999)]")),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_calls_of_each_format_are_parsed(tool: str, text: str, output: ParsedOutput) -> None:
    assert gathered(parsed(tool, text)) == output
    assert gathered(parsed(tool, *text)) == output


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hi<|return|>", ParsedOutput("hm", "hi")),
        ("<|channel|>analysis<|message|>hm", ParsedOutput("hm", "")),
        ("<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>hi", ParsedOutput("", "hi")),
        ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>', ParsedOutput(None, "", f('{"a": 1}'))),
        ("<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}", ParsedOutput(None, "", f("{}"))),
        (" to=functions.f<|channel|>commentary<|message|>{}", ParsedOutput(None, "", f("{}"))),
        ("<|channel|>commentary<|message|>first<|end|><|start|>assistant<|channel|>final<|message|>then", ParsedOutput(None, "first\nthen")),
        ("<|channel|>commentary to=functions.f<|message|>{oops<|call|>", broken("<|channel|>commentary to=functions.f<|message|>{oops<|call|>")),
        ("<|channel|>what is this<|message|>a", broken("<|channel|>what is this<|message|>a")),
        ("no channel at all ", ParsedOutput(None, "no channel at all ")),
        ("tomorrow<|return|>", ParsedOutput(None, "tomorrow<|return|>")),
    ],
)  # fmt: skip
def test_gpt_oss_channels_are_parsed(text: str, output: ParsedOutput) -> None:
    assert gathered(parsed("gpt-oss", text, reasoning="gpt-oss")) == output
    assert gathered(parsed("gpt-oss", *text, reasoning="gpt-oss")) == output


def test_gpt_oss_calls_stay_text_without_a_tool_parser() -> None:
    text = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert gathered(parsed(None, "<|channel|>analysis<|message|>a<|end|>", text, reasoning="gpt-oss")) == ParsedOutput(
        "a", text
    )


@pytest.mark.parametrize(
    ("tool", "pieces", "events"),
    [
        ("glm45", ["<tool_call>f\n", "<", "arg_key>b</arg_key><arg_value>x", "y</arg_value>", "</tool_call>"],
         [[], [CallBegun(0, "call_1", "f")], [], [CallArguments(0, '{"b": "xy"')], [CallArguments(0, "}"), CallEnded(0)]]),
        ("kimi_k2", ["<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", '{"b": "x', 'y"}', "<|tool_call_end|>"],
         [[CallBegun(0, "call_1", "f")], [CallArguments(0, '{"b": "x')], [CallArguments(0, 'y"')], [CallArguments(0, "}"), CallEnded(0)]]),
        ("gpt-oss", ["<|channel|>analysis<|message|>a", " b", "<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>", '{"b": "x', 'y"}', "<|call|>"],
         [[Reasoning("a")], [Reasoning(" b")], [CallBegun(0, "call_1", "f")], [CallArguments(0, '{"b": "x')], [CallArguments(0, 'y"')], [CallArguments(0, "}"), CallEnded(0)]]),
        ("deepseekv31", ["a", " <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>", '{"b": 1', "!"],
         [[Text("a")], [CallBegun(0, "call_1", "f")], [CallArguments(0, '{"b": 1')],
          [IllFormed("invalid JSON: expected a comma or }", 0), Text(' <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"b": 1'), Text("!")]]),
    ],
)  # fmt: skip
def test_call_events_are_streamed_piece_by_piece(tool: str, pieces: list[str], events: list[Any]) -> None:
    parser = make_parser(Formats(tool), tools=TOOLS, ids=lambda: "call_1")
    assert [parser.feed(piece) for piece in pieces] == events
    assert parser.end() == []


@pytest.mark.parametrize("tool", TOOL_CALL_PARSERS)
@pytest.mark.parametrize("reasoning", REASONING_PARSERS)
def test_every_parser_name_passes_plain_text_through(tool: str, reasoning: str) -> None:
    for text in ("", "hello", "hello <", "<"):
        output = gathered(parsed(tool, text, reasoning=reasoning))
        assert (output.reasoning or "") + output.text == text
