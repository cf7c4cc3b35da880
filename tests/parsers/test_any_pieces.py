"""Property tests of every format: answers are parsed in pieces of any size, and unreadable text is not lost."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.models.parsers.events import CallArguments, CallEnded, Event, IllFormed, Text, gathered
from slime.models.parsers.formats import Formats, call_opening, make_parser, opens_reasoning
from slime.models.parsers.json_stream import JsonScanner
from tests.parsers.writers import MARKS, WRITERS, written
from tests.rows import examples

TYPES = {"text": "string", "count": "integer", "share": "number", "yes": "boolean", "some": "array", "all": "object"}
PROPERTIES = {name: {"type": type_} for name, type_ in TYPES.items()}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("look_up", "write-file", "a.b")
]

LETTERS = "ab_c0-.,:;=é漢😀'\"\\/&|"
words = st.text(LETTERS + "<>[]{}()#`", max_size=12)
plain = st.text(LETTERS, max_size=12)
scalars = st.integers(-(2**53), 2**53) | st.booleans() | words
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": words,
        "count": st.integers(-(2**53), 2**53),
        "share": st.floats(-1e9, 1e9, allow_nan=False),
        "yes": st.booleans(),
        "some": st.lists(scalars, max_size=3),
        "all": st.dictionaries(words, scalars, max_size=3),
    },
)


def calls(name: str) -> st.SearchStrategy[list[Any]]:
    """Strategy for calls that this format can express."""
    names = ["look_up", "a.b"] if name == "pythonic" else ["look_up", "a.b", "write-file"]
    return st.lists(st.tuples(st.sampled_from(names), arguments), min_size=1, max_size=3)


def parse(
    name: str, text: str, cuts: list[int], *, reasoning: str | None = "qwen3", thinking: bool = False
) -> list[Event]:
    ids = (f"call_{number}" for number in itertools.count())
    tool = name.split(" ")[0]
    formats = Formats(tool, "gpt-oss" if tool == "gpt-oss" else reasoning)
    parser = make_parser(formats, tools=TOOLS, starts_in_reasoning=thinking, ids=ids.__next__)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    events = [event for start, end in itertools.pairwise(places) for event in parser.feed(text[start:end])]
    return events + parser.end()


def parsed_calls(events: list[Event]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in gathered(events).calls]


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data(), thought=st.none() | plain, before=plain, cuts=st.lists(st.integers(0), max_size=40))
def test_written_answers_are_parsed_in_any_pieces(
    name: str, data: st.DataObject, thought: str | None, before: str, cuts: list[int]
) -> None:
    made = data.draw(calls(name))
    text = written(name, thought, before, made)
    events = parse(name, text, cuts)
    output = gathered(events)
    assert (output.reasoning, output.text, parsed_calls(events)) == (thought, before, made)
    assert not output.ill_formed
    assert gathered(parse(name, text, list(range(len(text))))) == output


SENTINELS = [chr(0xE000 + number) for number in range(12)]


@st.composite
def damaged_answers(draw: st.DrawFn, name: str) -> str:
    """Strategy for answers with parts cut, doubled or inserted, and with sentinel characters that must survive."""
    parts = draw(
        st.lists(plain | calls(name).map(WRITERS[name]) | st.sampled_from(MARKS[name]), min_size=1, max_size=4)
    )
    text = draw(st.sampled_from(["", "<think>", "<think>\n</think>"])) + " ".join(parts)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 20)))
        kind = draw(st.sampled_from(["cut", "twice", "mark"]))
        middle = {
            "cut": "",
            "twice": text[start:end] * 2,
            "mark": draw(st.sampled_from([*MARKS[name], "</think>", "<|im_end|>", '"', "\\", "{", "}"])),
        }
        text = text[:start] + middle[kind] + text[end:]
    for sentinel in SENTINELS[: draw(st.integers(1, 6))]:
        place = draw(st.integers(0, len(text)))
        text = text[:place] + sentinel + text[place:]
    return text


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=examples(50), deadline=None)
@given(data=st.data(), thinking=st.booleans(), cuts=st.lists(st.integers(0), max_size=40))
def test_damaged_answers_lose_no_text(name: str, data: st.DataObject, thinking: bool, cuts: list[int]) -> None:
    text = data.draw(damaged_answers(name))
    events = parse(name, text, [], thinking=thinking)
    output = gathered(events)
    told = (output.reasoning or "") + output.text + "".join(call.name + call.arguments for call in output.calls)
    for sentinel in SENTINELS:
        assert told.count(sentinel) == text.count(sentinel)
    assert all(isinstance(json.loads(call.arguments), dict) for call in output.calls)
    assert gathered(parse(name, text, cuts, thinking=thinking)) == output
    assert gathered(parse(name, text, list(range(len(text))), thinking=thinking)) == output


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data(), end=st.integers(1, 40))
def test_truncated_call_becomes_text(name: str, data: st.DataObject, end: int) -> None:
    made = data.draw(calls(name))
    text = WRITERS[name](made)
    events = parse(name, text[: max(0, len(text) - end)], [])
    whole = [event.index for event in events if isinstance(event, CallEnded)]
    taken_back = [event.index for event in events if isinstance(event, IllFormed) and event.index is not None]
    assert parsed_calls(events) == made[: len(whole)]
    for index in taken_back:
        pieces = [event.text for event in events if isinstance(event, CallArguments) and event.index == index]
        with pytest.raises(json.JSONDecodeError):  # it must not parse as a complete call
            json.loads("".join(pieces))
    ill_formed = [place for place, event in enumerate(events) if isinstance(event, IllFormed)]
    assert all(isinstance(events[place + 1], Text) for place in ill_formed)


@pytest.mark.parametrize("name", WRITERS)
def test_forced_call_opening_matches_the_format(name: str) -> None:
    formats = Formats(name.split(" ")[0], "qwen3")
    text = WRITERS["mistral" if name == "mistral compact" else name]([("look_up", {"text": "a"})])
    for tool in ("look_up", None):
        opening = call_opening(formats, tool, starts_in_reasoning=False)
        assert text.startswith(opening)
        assert opening
        if formats.tool != "gpt-oss":
            thinking = call_opening(formats, tool, starts_in_reasoning=True)
            assert thinking == "\n</think>\n\n" + opening
            events = parse(name, thinking + text.removeprefix(opening), [], thinking=True)
            assert parsed_calls(events) == [("look_up", {"text": "a"})]


def test_opens_reasoning_detects_an_open_think_tag() -> None:
    assert opens_reasoning(Formats(None, "qwen3"), "<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning(Formats(None, "qwen3"), "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_reasoning(Formats("hermes", None), "<think>")


@pytest.mark.parametrize("name", WRITERS)
def test_unread_rest_stays_short_for_long_answers(name: str) -> None:
    """The unread rest after a piece, which is read again with the next one, is shorter than 40 characters."""
    long = {"text": "x < 1 and { [" * 500}
    text = written(name, "so " * 500, "and " * 500, [("look_up", long)] * 2)
    parser = make_parser(Formats(name.split(" ")[0], "qwen3"), tools=TOOLS)
    unread = []
    for character in text:
        parser.feed(character)
        unread.append(len(parser._reader.text) - parser._reader.at)  # type: ignore[attr-defined]
    assert max(unread) < 40


@pytest.mark.parametrize(
    ("text", "wanted"), [('"a\nb"', "an escaped control character"), ('"a\\qb"', "a valid escape")]
)
def test_json_error_names_what_a_string_needs(text: str, wanted: str) -> None:
    scanner = JsonScanner()
    scanner.scan(text, 0)
    assert scanner.error == f"invalid JSON: expected {wanted} in a string"
