"""A model's chat template as a session uses it: whole prompts, and what to append to the ids of a sampled turn.

Invariant: the ids of a sampled turn are never looked at, changed or encoded again. What a client adds is rendered after
a stand-in for the conversation so far, an assistant's turn with a mark in it; the continuation is what follows the
token that ends the marked turn. So its cost is that of what is new, and templates that rewrite earlier turns (they drop
earlier reasoning) rewrite only the stand-in.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slime.agent.messages import Message, ToolCall
from slime.agent.session.probe import ADDITIONS, Ending, Probe, Way, asked, find_ending, in_order, said, tool
from slime.agent.session.rendering import NO_TEMPLATE, Renderer, TemplateRefused
from slime.agent.session.shape import Shape, completed
from slime.agent.session.special_text import SpecialText, any_of

_TAIL = 16
"""Tokens at the end of a prompt among which an opened think block is looked for."""
_OPENED = re.compile(r"(<think(ing)?>|<seed:think>|\[THINK\]|◁think▷|<\|channel>thought)\s*$")
_STAND_IN_TOOL = tool("look")
_NEEDED = {
    "tool": "tools",
    "tools": "tools",
    "system": "system_anywhere",
    "tool, user": "user_after_tool",
    "assistant, user": "assistants_in_row",
}
"""The property of a shape that an addition needs to be shown as it is."""


@dataclass(frozen=True)
class _Delta:
    """The text after a turn: `cut` is the token at its beginning that ends the turn, if the template writes one."""

    cut: str
    rest: str
    marks: str | None


class ChatTemplate:
    """Probes the template of a tokenizer once; `refusal` says why its turns cannot be continued, if they cannot."""

    def __init__(self, tokenizer: Any, *, kwargs: Mapping[str, Any] = {}) -> None:
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer, kwargs)
        self._special = SpecialText(tokenizer, self._renderer.source)
        self._mark = f"Turn{secrets.token_hex(8)}"
        self._tools_in_turns = True
        self.shape = Shape()
        self.ending = Ending(Way.BARE)
        self._cuts = self._cut_pattern()
        self.refusal: str | None = self._probed()
        self._opening_ids = {self._special.ids[token] for token in self.ending.openings}
        self.stop_ids = frozenset(self._stop_ids())

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Ids of a whole conversation that asks for another turn; raises `TemplateRefused` in one sentence."""
        text, marks = self._rendered(messages, tools)
        return np.array(self._special.encode(text, marks), np.int32)

    def continuation(
        self, last: Message, ended_with: int | None, new: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> np.ndarray:
        """Ids to append after the sampled ids of the turn `last`, so that the model goes on after `new`.

        `ended_with` is the last sampled id if that is one of `stop_ids`, and None for a turn that was cut short. The
        token that the template has at the end of the turn is appended unless the sampled one takes its place.
        """
        delta = self._delta(last, new, tools)
        ids = self._special.encode(delta.cut + delta.rest, delta.marks)
        if delta.cut and self._is_ended(ended_with, delta.cut):
            ids = ids[1:]
        elif not delta.cut and ended_with is None and self._tokenizer.eos_token_id is not None:
            ids = [int(self._tokenizer.eos_token_id), *ids]
        return np.array(ids, np.int32)

    def starts_in_reasoning(self, prompt_ids: Sequence[int] | np.ndarray) -> bool:
        """Whether a prompt ends in a think block that the template opened."""
        tail = [int(id_) for id_ in prompt_ids[-_TAIL:]]
        return _OPENED.search(self._tokenizer.decode(tail, skip_special_tokens=False)) is not None

    def _is_ended(self, ended_with: int | None, cut: str) -> bool:
        """Any token that closes turns closes this one; one that opens what follows must be the very one."""
        if cut in self.ending.openings:
            return ended_with == self._special.ids[cut]
        return ended_with in {self._special.ids[token] for token in self.ending.cuts} - self._opening_ids

    def _delta(self, last: Message, new: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> _Delta:
        made = last.tool_calls if self.ending.way is not Way.BARE else ()
        calls = tuple(ToolCall(call.id, call.name, f'{{"mark": "{self._mark}"}}') for call in made)
        content = "" if calls and self.shape.calls else self._mark  # some templates show it after the results
        shown = tools if self._tools_in_turns or not tools else [_STAND_IN_TOOL]
        text, marks = self._rendered([asked("?"), said(content, *calls), *new], shown)
        at = text.rfind(self._mark)
        if at < 0:
            raise TemplateRefused("the model's chat template does not show what an assistant said")
        at += len(self._mark)
        if self.ending.way is Way.BARE:
            return _Delta("", text[at:], marks)
        if (found := self._cuts.search(text, at)) is None:
            raise TemplateRefused("the model's chat template does not end an assistant's turn with a token")
        return _Delta(found["turn"] or found["call"], text[found.end() :], marks)

    def _cut_pattern(self) -> re.Pattern[str]:
        """Finds the token that ends a turn, also where it comes, with only other tokens between, after a call's end."""
        ends_turn, ends_call = (
            any_of(token for token in self.ending.cuts if (token in self.ending.call_ends) is of_call).pattern
            for of_call in (False, True)
        )
        between = rf"(?:{self._special.pattern.pattern}|\s)*?"
        return re.compile(f"(?:(?:{ends_call}){between})?(?P<turn>{ends_turn})|(?P<call>{ends_call})")

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
        """The rendering, and the marks in text of control tokens that are not the template's.

        What the template refuses is tried with tools that say everything, then in the strictest form.
        """
        try:
            return self._render(self.shape, messages, tools)
        except TemplateRefused as refused:
            complete = [completed(tool) for tool in tools]
            for shape in (self.shape, self.shape.strictest()):
                with contextlib.suppress(TemplateRefused):
                    return self._render(shape, messages, complete)
            raise refused

    def _render(
        self, shape: Shape, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, str | None]:
        shaped = shape.of(messages)
        marks = self._special.marks_for([shaped, tools])
        if marks is not None:
            shaped, tools = self._special.broken(shaped, marks), self._special.broken(tools, marks)
        return self._renderer.text(shaped, tools), marks

    def _probed(self) -> str | None:
        if not self._renderer.source:
            return NO_TEMPLATE
        try:
            self.shape = Probe(self._renderer).settle()
            self.ending = find_ending(self._renderer, self.shape, self._special, self._tokenizer.eos_token)
        except TemplateRefused as refused:
            return f"{refused}: no turn of it can be continued"
        self._cuts = self._cut_pattern()
        for kind, field in _NEEDED.items():
            self._give_up(field, unless=kind)
        if not self.continues("tool") and not self.continues("user"):
            return "the model's chat template shows neither tool results nor questions after an assistant's turn"
        self._tools_in_turns = any(self._shows_tools_after(kind) for kind in ("tool", "user") if self.continues(kind))
        return None

    def continues(self, kind: str) -> bool:
        """Whether an addition of this kind (a key of `ADDITIONS`) is shown after a turn: all of it, once, in order."""
        last, new, words = ADDITIONS[kind]
        try:
            return in_order(self._delta(last, new, [_STAND_IN_TOOL]).rest, words)
        except TemplateRefused:
            return False

    def _give_up(self, field: str, *, unless: str) -> None:
        """Do without a property of the shape if that, and only that, lets an addition follow a turn."""
        probed = self.shape
        if not self.continues(unless):
            self.shape = replace(probed, **{field: False})
            if not self.continues(unless):
                self.shape = probed

    def _shows_tools_after(self, kind: str) -> bool:
        last, new, _ = ADDITIONS[kind]
        return self._delta(last, new, [tool("look")]) != self._delta(last, new, [tool("listen")])

    def _stop_ids(self) -> Iterator[int]:
        yield from (self._special.ids[token] for token in self.ending.stops)
        if self._tokenizer.eos_token_id is not None:
            yield int(self._tokenizer.eos_token_id)
