"""What a chat template takes and how it ends a turn, found by showing it small conversations.

Invariant: no family is known here. A form that the template refuses, or under which a text is missing, doubled or out
of its place, is not used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import jinja2

from slime.agent.messages import Message, ToolCall
from slime.agent.session.limits import TemplateRefused
from slime.agent.session.special_tokens import SpecialText
from slime.errors import UserError

# Conversations in the form that one chat template takes.
#
# Invariant: every text of the conversation is in what the template gets, in its order; what a template has no place
# for (a system message in the middle, a tool's result, two questions in a row) is put into a message that it has a
# place for.

_PARAGRAPH = "\n\n"
_NINE = re.compile("[A-Za-z0-9]{9}")


@dataclass(frozen=True)
class Shape:
    """What a template takes; the defaults are everything."""

    parts: bool = False
    """Contents as lists of parts; else as text."""
    mapped_arguments: bool = True
    """Arguments of calls as a mapping; else as JSON text."""
    empty_is_none: bool = False
    """The content of an assistant that only calls is None; else an empty string."""
    any_call_id: bool = True
    """Call ids of any form; else of nine letters and digits."""
    system_first: bool = True
    system_anywhere: bool = True
    users_in_row: bool = True
    assistants_in_row: bool = True
    assistant_first: bool = True
    calls: bool = True
    parallel_calls: bool = True
    calls_with_text: bool = True
    calls_with_text_and_reasoning: bool = True
    tools: bool = True
    """Results of tools in a role of their own."""
    user_after_tool: bool = True

    def strictest(self) -> Shape:
        """The form that asks least of a template whose refusal the probe did not foresee."""
        return replace(
            self,
            system_anywhere=False,
            users_in_row=False,
            assistants_in_row=False,
            assistant_first=False,
            calls=False,
            tools=False,
        )

    def of(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as a template of this shape takes them."""
        fitted: list[Message] = []
        for message in self._with_first_system(messages):
            for part in self._parts(message):
                self._append(fitted, part)
        return self._as_dicts(fitted)

    def _with_first_system(self, messages: Sequence[Message]) -> list[Message]:
        """System messages at the beginning become one, or the beginning of the first question."""
        count = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
        if not count:
            return list(messages)
        text = _PARAGRAPH.join(message.content for message in messages[:count])
        rest = list(messages[count:])
        if self.system_first:
            return [Message("system", text), *rest]
        if rest and rest[0].role == "user":
            return [replace(rest[0], content=text + _PARAGRAPH + rest[0].content), *rest[1:]]
        return [Message("user", text), *rest]

    def _parts(self, message: Message) -> list[Message]:
        """One message as those that the template has a place for."""
        if message.role == "tool" and not self.tools:
            return [Message("user", f"<tool_response>\n{message.content}\n</tool_response>")]
        if message.role != "assistant" or not message.tool_calls:
            return [message]
        if not self.calls:
            text = "\n".join([*filter(None, [message.content]), *map(_call_as_text, message.tool_calls)])
            return [replace(message, content=text, tool_calls=())]
        if message.content and not self.calls_with_text:
            without_text = Message("assistant", tool_calls=message.tool_calls)
            return [replace(message, tool_calls=()), *self._parts(without_text)]
        if message.content and message.reasoning and not self.calls_with_text_and_reasoning:
            message = replace(message, reasoning=message.reasoning + _PARAGRAPH + message.content, content="")
        if len(message.tool_calls) > 1 and not self.parallel_calls:
            first, *others = message.tool_calls
            alone = [Message("assistant", tool_calls=(call,)) for call in others]
            return [replace(message, tool_calls=(first,)), *alone]
        return [message]

    def _append(self, fitted: list[Message], message: Message) -> None:
        """Add a message, to its neighbour where the template does not take both in a row."""
        before = fitted[-1] if fitted else None
        if message.role == "system" and before is not None and not self.system_anywhere:
            message = Message("user", f"<system-reminder>\n{message.content}\n</system-reminder>")
        if before is None or before.role == "system":
            if message.role == "assistant" and not self.assistant_first:
                fitted.append(Message("user"))
        elif message.role == "user" and self._takes_in(before):
            message = replace(before, content=before.content + _PARAGRAPH + message.content)
            fitted.pop()
        elif message.role == before.role == "assistant" and not self.assistants_in_row:
            fitted.append(Message("user"))
        fitted.append(message)

    def _takes_in(self, before: Message) -> bool:
        """Whether a question has no place of its own after this message."""
        return (before.role == "user" and not self.users_in_row) or (before.role == "tool" and not self.user_after_tool)

    def _as_dicts(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        names: dict[str, str] = {}
        dicts: list[dict[str, Any]] = []
        for message in messages:
            entry: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.role == "assistant":
                names.update((call.id, call.name) for call in message.tool_calls)
                if message.reasoning is not None:
                    entry |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
                if message.tool_calls:
                    entry["tool_calls"] = [self._call(call) for call in message.tool_calls]
                    entry["content"] = message.content or (None if self.empty_is_none else "")
            elif message.role == "tool":
                name = message.name or names.get(message.tool_call_id or "")
                entry |= {"name": name} if name is not None else {}
                entry |= {"tool_call_id": self._id(message.tool_call_id)} if message.tool_call_id is not None else {}
            if self.parts:
                entry["content"] = [{"type": "text", "text": message.content}]
            dicts.append(entry)
        return dicts

    def _call(self, call: ToolCall) -> dict[str, Any]:
        value = _arguments(call)
        arguments = value if self.mapped_arguments else json.dumps(value, ensure_ascii=False)
        return {
            "id": self._id(call.id),
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _id(self, call_id: str) -> str:
        if self.any_call_id or _NINE.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:9]


def completed(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with the fields that some templates expect in every one."""
    nothing = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return {**tool, "function": {**nothing, **(tool.get("function") or {})}}


def _arguments(call: ToolCall) -> dict[str, Any]:
    """The value of a call's arguments; text that is no JSON object is shown under a name of its own."""
    try:
        value = json.loads(call.arguments or "{}")
    except ValueError:
        return {"arguments": call.arguments}
    return value if isinstance(value, dict) else {"arguments": value}


def _call_as_text(call: ToolCall) -> str:
    written = json.dumps({"name": call.name, "arguments": _arguments(call)}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


# A chat template as a function from messages to text, and the one way in which it says no.

NO_TEMPLATE = "the model's tokenizer has no chat template: add chat_template.jinja to its folder"
_OURS = ("conversation", "messages", "tools", "chat_template", "return_dict", "continue_final_message")
_SET_HERE = ("add_generation_prompt", "tokenize")
_RAISED = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class Renderer:
    """The tokenizer's template with the run's arguments for it."""

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
        taken = [name for name in kwargs if name in _OURS]
        if taken:
            raise UserError(f"--apply-chat-template-kwargs: {taken[0]} is not for the template; leave it out")
        self._tokenizer = tokenizer
        self._kwargs = {name: value for name, value in kwargs.items() if name not in _SET_HERE}
        template = tokenizer.chat_template
        self.source: str = "\n".join(template.values()) if isinstance(template, dict) else template or ""
        """The template's text; of several under names, all of them. Empty where the tokenizer has none."""

    def text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, ask: bool = True
    ) -> str:
        """The rendering, with the generation prompt if another turn is asked for."""
        if not self.source:
            raise TemplateRefused(NO_TEMPLATE)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=[dict(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=ask,
                    **self._kwargs,
                )
            )
        except _RAISED as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise TemplateRefused(f"the model's chat template refuses this conversation ({reason})") from error


def template_source(tokenizer: Any, *, tools: bool) -> str:
    """The text of the template that the tokenizer uses with or without tools; empty where it has none."""
    try:
        return str(tokenizer.get_chat_template(None, tools=[] if tools else None))
    except ValueError:  # no template, or several of which none is the default
        return ""


A, B, C, D = "Qanary", "Bzebra", "Cyclamen", "Dromedar"
"""Words that no template contains."""
_LONG_ID = "call_0f8e4a1c2b3d4e5f60718293"
_MORE_ENDS = ("<|eom_id|>",)
"""Tokens that end a turn, but are written by templates for tools of their own only."""
Conversation = tuple[Message, ...]


def tool(name: str) -> dict[str, Any]:
    """A tool of a stand-in conversation."""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def said(text: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    """An assistant's message."""
    return Message("assistant", text, reasoning, calls)


def asked(text: str) -> Message:
    return Message("user", text)


def call(value: str, id_: str = "abc123XYZ") -> ToolCall:
    return ToolCall(id_, "look", f'{{"place": "{value}"}}')


def result(text: str, id_: str = "abc123XYZ") -> Message:
    return Message("tool", text, tool_call_id=id_)


def system(text: str) -> Message:
    return Message("system", text)


def in_order(text: str, words: Iterable[str]) -> bool:
    """Whether each word is in the text once, one after the other."""
    places = [text.find(word) if text.count(word) == 1 else -1 for word in words]
    return -1 not in places and places == sorted(places)


PARALLEL = (call(B), call(C, "abc123XYW"))
RESULTS = (result(C), result(D, "abc123XYW"))
ADDITIONS: dict[str, tuple[Message, Conversation, tuple[str, ...]]] = {
    "tool": (said("", call(B)), (result(C),), (C,)),
    "tools": (said("", *PARALLEL), RESULTS, (C, D)),
    "user": (said(B), (asked(C),), (C,)),
    "system": (said(B), (system(C), asked(D)), (C, D)),
    "tool, user": (said("", call(B)), (result(C), asked(D)), (C, D)),
    "assistant, user": (said(B), (said(C), asked(D)), (C, D)),
}
"""What clients add to a turn: the turn, what comes after it, and the words of that."""


class Probe:
    """Shows conversations to a template and settles its shape, one property after the other."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.shape = Shape()

    def settle(self) -> Shape:
        """The most generous shape under which every word is shown in its place."""
        if not self._shown((asked(A),), (A,)):
            self.shape = replace(self.shape, parts=True)
        self._unless("system_first", ((system(A), asked(B)), (A, B)))
        self._unless("users_in_row", ((asked(A), asked(B)), (A, B)))
        self._unless("assistants_in_row", ((asked(A), said(B), said(C), asked(D)), (A, B, C, D)))
        self._unless("assistant_first", ((said(A), asked(B)), (A, B)))
        self._settle_calls()
        if self.shape.calls:
            self._unless("any_call_id", *self._answered(call(B, _LONG_ID)))
            self._unless("parallel_calls", ((asked(A), said("", *PARALLEL)), (A, B, C)))
            if not self._shown((asked(A), said("", *PARALLEL)), (A, B, C)):
                self.shape = replace(self.shape, calls=False)
            self._unless("calls_with_text", ((asked(A), said(B, call(C))), (A, C)))
            self._unless("calls_with_text_and_reasoning", ((asked(A), said(B, call(C), reasoning=D)), (A, C)))
        one, two = (asked(A), said("", call(B))), (asked(A), said("", *PARALLEL))
        self._unless("tools", ((*one, result(C)), (A, C)), ((*two, *RESULTS), (A, D)))
        self._unless("user_after_tool", ((*one, result(C), asked(D)), (A, C, D)))
        self._unless(
            "system_anywhere",
            ((asked(A), said(B), asked(C), system(D)), (A, B, C, D)),
            ((asked(A), said(B), system(C), asked(D)), (A, B, C, D)),
            ((*one, result(C), system(D)), (A, C, D)),
        )
        return self.shape

    def _unless(self, field: str, *trials: tuple[Conversation, tuple[str, ...]]) -> None:
        """Switch a property off if one of the trials shows that the template does not have it."""
        if not all(self._shown(*trial) for trial in trials):
            self.shape = replace(self.shape, **{field: False})

    def _settle_calls(self) -> None:
        """Arguments as a mapping or as text, no content as an empty one or as None: what shows a call as it is."""
        for empty_is_none in (False, True):
            for mapped in (True, False):
                self.shape = replace(self.shape, mapped_arguments=mapped, empty_is_none=empty_is_none)
                if any(self._shown(*trial, unlike=("'place'", '\\"place')) for trial in self._answered(call(B))):
                    return
        self.shape = replace(self.shape, calls=False, mapped_arguments=True, empty_is_none=False)

    def _answered(self, made: ToolCall) -> Iterator[tuple[Conversation, tuple[str, ...]]]:
        alone = (asked(A), said("", made))
        if self.shape.tools and self._shown((*alone, result(C, made.id)), (A, B, C)):
            yield (*alone, result(C, made.id)), (A, B, C)
        else:
            yield alone, (A, B)

    def _shown(self, messages: Conversation, words: Sequence[str], unlike: tuple[str, ...] = ()) -> bool:
        try:
            text = self._renderer.text(self.shape.of(messages))
        except TemplateRefused:
            return False
        return in_order(text, words) and not any(odd in text for odd in unlike)


class Way(Enum):
    """How the end of an assistant's turn is marked."""

    CLOSED = "a token closes it"
    OPENED = "the first token of the next message ends it"
    BARE = "by no token of the template"


@dataclass(frozen=True)
class Ending:
    """The tokens at the end of a turn: `cuts` are those after which its continuation begins, `stops` can be sampled.

    One of `openings` begins what follows, and no other token takes its place; any of the other cuts closes any turn.
    One of `call_ends` closes a call, and is a cut where the template writes no other one after it.
    """

    way: Way
    cuts: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()
    call_ends: tuple[str, ...] = ()


def find_ending(renderer: Renderer, shape: Shape, special: SpecialText, eos: str | None) -> Ending:
    """How turns of this template end; raises `TemplateRefused` where it does not show what an assistant said."""
    seen = _Seen(renderer, shape, special)
    alone, answered = seen.after((said(B),), ask=False), seen.after((said(B), asked(C)))
    if alone and seen.first_closing(alone, answered, eos) != seen.opening_a_question():
        return seen.closed(alone, answered, eos)
    if answered:
        seen.has_next = bool(alone)
        ends = seen.openings((said(B), asked(C)), (said("", call(B)), result(C)))
        others = seen.openings((said("", call(B)), asked(C)), (said(B), system(C)), (said(B), said(C)), (said(B),))
        cuts = _distinct([*ends, *others])
        return Ending(Way.OPENED, cuts, _distinct(ends), openings=cuts)
    return Ending(Way.BARE)


class _Seen:
    """The control tokens that a template writes around the words of a conversation."""

    def __init__(self, renderer: Renderer, shape: Shape, special: SpecialText) -> None:
        self._renderer = renderer
        self._shape = shape
        self._special = special
        self.has_next = False
        """Whether a turn that nothing follows is followed by the token that opens a question all the same."""

    def closed(self, alone: list[str], answered: list[str], eos: str | None) -> Ending:
        """A token closes turns: perhaps another one in history, perhaps a third after a call."""
        first = self.first_closing(alone, answered, eos)
        known = [first, *([] if first in answered else answered[:1])]
        after_call = self._closing_a_call(known)
        more = [token for token in _MORE_ENDS if token in self._special.ids and token in self._renderer.source]
        between_calls = self._between((asked(A), said("", *PARALLEL)), B, C)
        between_results = self._between((asked(A), said("", *PARALLEL), *RESULTS), RESULTS[0].content, D)
        return Ending(
            Way.CLOSED,
            cuts=_distinct([*known, *after_call, *more]),
            stops=_distinct([first, *(token for token in after_call if token not in between_calls), *more]),
            openings=tuple(token for token in after_call if token in between_results),
            call_ends=tuple(token for token in after_call if token in between_calls),
        )

    def first_closing(self, alone: list[str], answered: list[str], eos: str | None) -> str:
        """Of the tokens after a turn that nothing follows, the one that ends it."""
        both = [one for one, other in zip(alone, answered, strict=False) if one == other]
        return eos if eos is not None and eos in both else alone[0]

    def opening_a_question(self) -> str | None:
        before = self._tokens(self._text((asked(A),)).partition(A)[0])
        return before[-1] if before else None

    def after(self, messages: Conversation, *, ask: bool = True) -> list[str]:
        """The tokens between the word B of an assistant's turn and the word C of what follows."""
        return self._tokens(self._after(messages, ask=ask))

    def openings(self, *conversations: Conversation) -> list[str]:
        """The first token of what follows the first message of each conversation."""
        found = []
        for turn, *following in conversations:
            try:
                alone, whole = self.after((turn,), ask=False), self.after((turn, *following))
            except TemplateRefused:
                continue
            inside = len(alone) - self.has_next
            found += whole[inside : inside + 1]
        return found

    def _closing_a_call(self, known: Sequence[str]) -> list[str]:
        """The token that closes a turn with a call, where it is another one: the last after the call."""
        try:
            tokens = self.after((said("", call(B)),), ask=False)
        except TemplateRefused:
            return []
        return [] if set(tokens) & set(known) else tokens[-1:]

    def _between(self, messages: Conversation, word: str, other: str) -> list[str]:
        if not self._shape.parallel_calls:
            return []
        try:
            text = self._text(messages)
        except TemplateRefused:
            return []
        return self._tokens(text.rpartition(other)[0].rpartition(word)[2])

    def _after(self, messages: Conversation, *, ask: bool) -> str:
        _, found, rest = self._text((asked(A), *messages), ask=ask).rpartition(B)
        if not found:
            raise TemplateRefused("the model's chat template does not show what an assistant said")
        return rest.partition(C)[0]

    def _text(self, messages: Conversation, *, ask: bool = True) -> str:
        return self._renderer.text(self._shape.of(messages), ask=ask)

    def _tokens(self, text: str) -> list[str]:
        return self._special.pattern.findall(text)


def _distinct(tokens: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tokens))
