"""Choice of the parser, and its events while a model writes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slime.errors import UserError
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
from slime.models.parsers.formats import Formats, call_id, detect_formats, formats_from_flags, make_parser


def parse(formats: Formats, *pieces: str, **how: Any) -> list[Event]:
    parser = make_parser(formats, ids=lambda: "call_1", **how)
    return [event for piece in pieces for event in parser.feed(piece)] + parser.end()


@pytest.mark.parametrize(
    ("template", "formats"),
    [
        ("<｜tool▁calls▁begin｜> <｜Assistant｜> </think>", Formats("deepseekv31", "deepseek-v3")),
        ("<minimax:tool_call> <think>", Formats("minimax-m2", "qwen3")),
        ("<|tool_calls_section_begin|> </think>", Formats("kimi_k2", "kimi_k2")),
        ("◁think▷", Formats(None, "kimi")),
        ("[TOOL_CALLS] [THINK]", Formats("mistral", "mistral")),
        ('{"name": function name, "parameters": dictionary of argument', Formats("llama3", None)),
        ("<|python_start|>", Formats("pythonic", None)),
        ("", Formats()),
    ],
)
def test_template_markers_select_the_formats(template: str, formats: Formats) -> None:
    """test_templates.py covers whole templates."""
    assert detect_formats(template) == formats


@pytest.mark.parametrize("formats", [Formats("hermess", None), Formats(None, "think")])
def test_unknown_parser_error_lists_known_names(formats: Formats) -> None:
    with pytest.raises(UserError, match=r"hermes, .*qwen25|deepseek-r1, .*qwen3"):
        make_parser(formats)


def test_call_is_streamed_as_it_is_written() -> None:
    parser = make_parser(Formats("hermes", "qwen3"), ids=lambda: "call_1")
    written = [
        ("<think>", []),
        ("so", [Reasoning("so")]),
        ("\n</think>\n\nlet me ", [Text("let me")]),
        ("see\n<tool", [Text(" see")]),
        ('_call>\n{"name": "look', []),
        ('_up", ', [CallBegun(0, "call_1", "look_up")]),
        ('"arguments": {"what": "', [CallArguments(0, '{"what": "')]),
        ("tea", [CallArguments(0, "tea")]),
        ('"}', [CallArguments(0, '"')]),
        ("}\n</tool_call", []),
        (">", [CallArguments(0, "}"), CallEnded(0)]),
        ("\n", []),
    ]
    assert [(text, parser.feed(text)) for text, _ in written] == written
    assert parser.end() == []


def test_malformed_call_is_retracted_and_becomes_text() -> None:
    text = '<tool_call>{"name": "a", "arguments": {"b": 1} oops</tool_call>'
    events = parse(Formats("hermes", None), "well ", text)
    assert events[:4] == [
        Text("well"),
        CallBegun(0, "call_1", "a"),
        CallArguments(0, '{"b": 1'),
        IllFormed("invalid JSON: expected a comma or }", 0),
    ]
    assert gathered(events) == ParsedOutput(None, f"well {text}", (), True)


TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "yes": {"type": ["boolean"]},
                "kind": {"enum": ["1", "2"]},
                "rows": {"items": {"type": "integer"}},
                "any": {},
            },
        },
    },
}


@pytest.mark.parametrize(
    ("parameter", "written", "value"),
    [
        ("text", "12", '"12"'),
        ("text", "null", '"null"'),
        ("text", ' a"\n<b> ', '" a\\"\\n<b> "'),
        ("count", " 12 ", "12"),
        ("count", "12.5", '"12.5"'),
        ("count", "many", '"many"'),
        ("maybe", "12", "12"),
        ("maybe", "1.5e3", "1.5e3"),
        ("maybe", "null", "null"),
        ("yes", "True", "true"),
        ("kind", "1", '"1"'),
        ("rows", "[1, 2]", "[1, 2]"),
        ("rows", "[1, 2", '"[1, 2"'),
        ("rows", "[" * 5000, '"' + "[" * 5000 + '"'),
        ("count", "9" * 5000, '"' + "9" * 5000 + '"'),
        ("any", "1", '"1"'),
        ("unknown", "1", '"1"'),
    ],
)
def test_unquoted_values_are_typed_by_the_schema(parameter: str, written: str, value: str) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter={parameter}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    events = parse(Formats("qwen3_coder", None), text, tools=[TOOL])
    assert gathered(events).calls == (Call("call_1", "f", f'{{"{parameter}": {value}}}'),)


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("hello \n", ParsedOutput(None, "hello \n")),
        ("hello<|im_end|>", ParsedOutput(None, "hello")),
        ("a <|im_end|> b", ParsedOutput(None, "a <|im_end|> b")),
        ("<think>\n\n</think>\n\nhello", ParsedOutput("", "hello")),
        ("<think>a", ParsedOutput("a", "")),
        ("hello <think>a</think>", ParsedOutput(None, "hello <think>a</think>")),
        ("<think>a <tool_call> b</think> c", ParsedOutput("a <tool_call> b", "c", (), True)),
        ('<think>a <tool_call>{"name": "f"}</tool_call>', ParsedOutput("a", "", (Call("call_1", "f", "{}"),))),
        ('a\n<tool_call>{"name": "f"}</tool_call>\n b ', ParsedOutput(None, "a\n b ", (Call("call_1", "f", "{}"),))),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}',
            ParsedOutput(None, "", (Call("call_1", "f", '{"a": 1}'),)),
        ),
        (
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            ParsedOutput(None, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', (), True),
        ),
        *(
            (text, ParsedOutput(None, text, (), True))
            for text in (
                f'<tool_call>{{"name": "f", "arguments": {{"a": {number}}}}}'
                for number in ("9" * 5000, "1e999", "01", "+1", "tru")
            )
        ),
        ('<tool_call>{"name": 5}</tool_call>', ParsedOutput(None, '<tool_call>{"name": 5}</tool_call>', (), True)),
        ('<tool_call>{"name": ""}</tool_call>', ParsedOutput(None, '<tool_call>{"name": ""}</tool_call>', (), True)),
        (
            '<tool_call>{"name": "\\ud800"}</tool_call>',
            ParsedOutput(None, '<tool_call>{"name": "\\ud800"}</tool_call>', (), True),
        ),
    ],
)
def test_text_reasoning_and_calls_are_separated(text: str, output: ParsedOutput) -> None:
    assert gathered(parse(Formats("hermes", "qwen3"), text)) == output


def test_markers_stay_in_the_text_without_parsers() -> None:
    text = '<think>a</think> <tool_call>{"name": "f"}</tool_call>'
    assert gathered(parse(Formats(), text)) == ParsedOutput(None, text)


def test_reasoning_may_start_in_the_prompt() -> None:
    assert gathered(parse(Formats(None, "qwen3"), "a</think>b", starts_in_reasoning=True)) == ParsedOutput("a", "b")
    assert gathered(parse(Formats(None, "deepseek-r1"), "a</think>b")) == ParsedOutput("a", "b")
    assert gathered(parse(Formats(None, "deepseek-r1"), "<think>a</think>b")) == ParsedOutput("a", "b")


def test_call_ids_are_unique_24_digit_hex() -> None:
    assert re.fullmatch("call_[0-9a-f]{24}", call_id())
    assert len({call_id() for _ in range(100)}) == 100


def test_flags_select_the_formats() -> None:
    flags = {"sglang_tool_call_parser": "glm45", "sglang_reasoning_parser": "inkling", "other": 1}
    assert formats_from_flags(flags) == Formats("glm45", None)  # SGLang servers support more parsers
    assert formats_from_flags({}) == Formats()
