"""Random conversations under every chat template: no new text is lost, and no message creates a control token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.agent.messages import Message, ToolCall
from slime.agent.session.template import ChatTemplate
from slime.agent.session.template_probe import TurnEndStyle
from tests.agent.families import FAMILIES, family_tokenizer

SPECIAL = sorted({token for family in FAMILIES.values() for token in family.special + family.added if token.strip()})
NAMES = ["bash", "read_file", "übersetzen"]


def tools_with_text(text: str) -> list[dict[str, Any]]:
    properties = {"x": {"type": "string", "description": f"What. {text}"}}
    function = {"description": f"Does it. {text}", "parameters": {"type": "object", "properties": properties}}
    return [{"type": "function", "function": {"name": name, **function}} for name in NAMES]


TOOLS = tools_with_text("<|im_end|>[INST]<end_of_turn><｜User｜></think>")
PLAIN_TOOLS = tools_with_text("word")
REWRITES_HISTORY = {"gemma4", "qwen3", "qwen3_5", "glm4_5", "gpt_oss", "nemotron", "mistral"}
plain_text = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), max_size=12) | st.sampled_from(
    ["a < b", "x\n\ny", "{'k': \"v\"}", "漢字かな", "\\n \\ \t", "<b>bold</b>", "<table>", "🙂 naïve", "3 + 4\r\n"]
)


@cache
def template_of(family: str) -> ChatTemplate:
    return ChatTemplate(family_tokenizer(family))


@dataclass(frozen=True)
class Written:
    """Text between two unique marker words."""

    number: int
    pieces: tuple[str, ...]

    def text(self, *, harmless: bool = False) -> str:
        pieces = ["word" if harmless and piece in SPECIAL else piece for piece in self.pieces]
        return f"Begin{self.number}of{''.join(pieces)}End{self.number}of"


class Writer:
    """Generates messages with unique texts."""

    def __init__(self, draw: st.DrawFn, *, special: bool) -> None:
        self._draw = draw
        self._pieces = st.lists(plain_text | st.sampled_from(SPECIAL) if special else plain_text, max_size=4)
        self.written: dict[str, Written] = {}

    def text(self) -> str:
        written = Written(len(self.written), tuple(self._draw(self._pieces)))
        self.written[written.text()] = written
        return written.text()

    def user(self) -> Message:
        return Message("user", self.text())

    def said(self, calls: int) -> Message:
        made = tuple(
            ToolCall(
                f"call_{len(self.written)}_{i}", self._draw(st.sampled_from(NAMES)), json.dumps({"x": self.text()})
            )
            for i in range(calls)
        )
        content = self.text() if not calls or self._draw(st.booleans()) else ""
        return Message("assistant", content, self._draw(st.none() | st.just("hm, so")), made)

    def added(self, last: Message) -> list[Message]:
        """Return a client's additions to a turn: call results, then optional reminders, questions or other answers."""
        results = [Message("tool", self.text(), tool_call_id=call.id) for call in last.tool_calls]
        more = self._draw(st.sampled_from(["", "u", "su", "uu", "us"] if results else ["u", "su", "uau", "us", "uua"]))
        makers = {"u": self.user, "s": lambda: Message("system", self.text()), "a": lambda: self.said(0)}
        return [*results, *(makers[kind]() for kind in more)]


@st.composite
def conversations(
    draw: st.DrawFn, *, special: bool
) -> tuple[list[Message], list[tuple[Message, list[Message]]], Writer]:
    writer = Writer(draw, special=special)
    begin = [Message("system", writer.text())] * draw(st.integers(0, 1)) + [writer.user()]
    turns = []
    for calls in draw(st.lists(st.integers(0, 2), min_size=1, max_size=3)):
        last = writer.said(calls)
        turns.append((last, writer.added(last)))
    return begin, turns, writer


def content_offset(text: str, content: str) -> int:
    """Return the offset of a content, plain or as JSON, in a text; -1 unless it occurs exactly once."""
    forms = {content, json.dumps(content, ensure_ascii=False)[1:-1]}
    found = [(text.count(form), text.find(form)) for form in forms if form in text]
    return found[0][1] if len(found) == 1 and found[0][0] == 1 else -1


def controls(template: ChatTemplate, ids: Any) -> list[int]:
    known = set(template._special.ids.values())
    return [int(id_) for id_ in ids if int(id_) in known]


def harmless(message: Message, writer: Writer) -> Message:
    """Return the message without the text of control tokens."""

    def clean(text: str) -> str:
        return writer.written[text].text(harmless=True) if text in writer.written else text

    calls = tuple(
        ToolCall(call.id, call.name, json.dumps({"x": clean(json.loads(call.arguments)["x"])}))
        for call in message.tool_calls
    )
    return Message(message.role, clean(message.content), message.reasoning, calls, message.tool_call_id)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_new_messages_appear_once_in_order_without_control_tokens(family: str, data: st.DataObject) -> None:
    begin, turns, writer = data.draw(conversations(special=True))
    template, tokenizer = template_of(family), family_tokenizer(family)
    pieces = [(begin, template.prompt(begin, TOOLS), template.prompt([harmless(m, writer) for m in begin], ()))]
    for last, new in turns:
        ended = data.draw(st.sampled_from([None, *sorted(template.stop_ids)]))
        clean = [harmless(message, writer) for message in new]
        ids = template.continuation(last, ended, new, TOOLS)
        pieces.append((new, ids, template.continuation(harmless(last, writer), ended, clean, TOOLS[:1])))
    for messages, ids, cleaned in pieces:
        text = tokenizer.decode(ids)
        places = [content_offset(text, message.content) for message in messages]
        assert -1 not in places, (text, messages)
        assert places == sorted(places)
        if messages is not begin:
            assert controls(template, ids) == controls(template, cleaned)
        assert ids.dtype == np.int32


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_special_text_in_prompts_and_tools_makes_no_control_token(family: str, data: st.DataObject) -> None:
    begin, turns, writer = data.draw(conversations(special=True))
    messages = begin + [message for last, new in turns for message in (last, *new)]
    template = template_of(family)
    ids = template.prompt(messages, TOOLS)
    cleaned = template.prompt([harmless(message, writer) for message in messages], PLAIN_TOOLS)
    assert controls(template, ids) == controls(template, cleaned)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_continuation_completes_the_prompt_if_history_is_kept(family: str, data: st.DataObject) -> None:
    begin, [(last, new), *_], _ = data.draw(conversations(special=False))
    template, tokenizer = template_of(family), family_tokenizer(family)
    if template.ending.way is TurnEndStyle.BARE:
        return  # no token separates a turn from the next text: tokens may merge across the boundary
    whole = template.prompt([*begin, last, *new], PLAIN_TOOLS).tolist()
    rendered = tokenizer.apply_chat_template(template.shape.of([*begin, last]), tools=PLAIN_TOOLS, return_dict=False)
    ends = {template._special.ids[token] for token in template.ending.cuts}
    while template.ending.way is TurnEndStyle.CLOSED and rendered[-1] not in ends:
        rendered.pop()
    kept = whole[: len(rendered)] == rendered
    assert kept or family in REWRITES_HISTORY
    if kept:
        ended = rendered[-1] if template.ending.way is TurnEndStyle.CLOSED else None
        assert [*rendered, *template.continuation(last, ended, new, PLAIN_TOOLS).tolist()] == whole


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5, deadline=None)
@given(st.lists(plain_text.map(str.strip).filter(bool), min_size=1, max_size=5), st.booleans())
def test_plain_prompt_matches_apply_chat_template(family: str, texts: list[str], tools: bool) -> None:
    tokenizer = family_tokenizer(family)
    roles = ["user", "assistant"]
    messages = [Message(roles[i % 2], text) for i, text in enumerate(texts)]
    dicts = [{"role": message.role, "content": message.content} for message in messages]
    offered = PLAIN_TOOLS if tools else None
    expected = tokenizer.apply_chat_template(dicts, tools=offered, add_generation_prompt=True, return_dict=False)
    assert template_of(family).prompt(messages, offered or ()).tolist() == expected
