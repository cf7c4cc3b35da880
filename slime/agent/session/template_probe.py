"""Probes a chat template with small conversations: which messages it renders, and how it ends a turn.

`TemplateShape` says which forms of messages the template renders, and converts conversations to them. `Renderer`
renders messages to text, `probe_shape` finds the shape, and `find_ending` finds the tokens that end a turn.

Invariants: nothing here depends on the model family. A form is not used if the template refuses it, or if a text is
then missing, duplicated or out of order. Every text of a conversation is passed to the template, in its order: a
message that the template cannot render (a system message in the middle, a tool's result, two user messages in a row)
becomes part of a message that it can render.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import jinja2

from slime.agent.messages import Message, ToolCall
from slime.agent.session.limits import TemplateRefused
from slime.agent.session.special_tokens import SpecialTokenEncoder
from slime.errors import UserError
from slime.storage.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PARAGRAPH = "\n\n"
_NINE = re.compile("[A-Za-z0-9]{9}")


@dataclass(frozen=True)
class TemplateShape:
    """The forms of messages that a template renders; by default all of them."""

    parts: bool = False
    """Contents are lists of parts, else text."""
    mapped_arguments: bool = True
    """Arguments of calls are a mapping, else JSON text."""
    empty_is_none: bool = False
    """The content of an assistant message with calls only is None, else an empty string."""
    any_call_id: bool = True
    """Call ids may have any form, else nine letters and digits."""
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
    """Tool results have their own role."""
    user_after_tool: bool = True

    def strictest(self) -> TemplateShape:
        """Return the most restrictive shape, for conversations that the template refuses unexpectedly."""
        return replace(
            self,
            system_anywhere=False,
            users_in_row=False,
            assistants_in_row=False,
            assistant_first=False,
            calls=False,
            tools=False,
        )

    def of(self, messages: Sequence[Message]) -> list[JsonObject]:
        """Convert messages to the form that a template of this shape renders."""
        fitted: list[Message] = []
        for message in self._with_first_system(messages):
            for part in self._parts(message):
                self._append(fitted, part)
        names: dict[str, str] = {}
        dicts: list[JsonObject] = []
        for message in fitted:
            entry: JsonObject = {"role": message.role, "content": message.content}
            if message.role == "assistant":
                names.update((call.id, call.name) for call in message.tool_calls)
                if message.reasoning is not None:
                    entry |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
                if message.tool_calls:
                    calls = []
                    for call in message.tool_calls:
                        value = _arguments(call)
                        arguments = value if self.mapped_arguments else json.dumps(value, ensure_ascii=False)
                        function = {"name": call.name, "arguments": arguments}
                        calls.append({"id": self._id(call.id), "type": "function", "function": function})
                    entry["tool_calls"] = calls
                    entry["content"] = message.content or (None if self.empty_is_none else "")
            elif message.role == "tool":
                name = message.name or names.get(message.tool_call_id or "")
                entry |= {"name": name} if name is not None else {}
                entry |= {"tool_call_id": self._id(message.tool_call_id)} if message.tool_call_id is not None else {}
            if self.parts:
                entry["content"] = [{"type": "text", "text": message.content}]
            dicts.append(entry)
        return dicts

    def _with_first_system(self, messages: Sequence[Message]) -> list[Message]:
        """Join the system messages at the beginning into one, or into the first user message."""
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
        """Split one message into messages that the template renders."""
        if message.role == "tool" and not self.tools:
            return [Message("user", f"<tool_response>\n{message.content}\n</tool_response>")]
        if message.role != "assistant" or not message.tool_calls:
            return [message]
        if not self.calls:
            texts = [message.content] if message.content else []
            for call in message.tool_calls:
                written = json.dumps({"name": call.name, "arguments": _arguments(call)}, ensure_ascii=False)
                texts.append(f"<tool_call>\n{written}\n</tool_call>")
            return [replace(message, content="\n".join(texts), tool_calls=())]
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
        """Append a message; join it with the previous one, or separate them, if the template requires that."""
        before = fitted[-1] if fitted else None
        if message.role == "system" and before is not None and not self.system_anywhere:
            message = Message("user", f"<system-reminder>\n{message.content}\n</system-reminder>")
        if before is None or before.role == "system":
            if message.role == "assistant" and not self.assistant_first:
                fitted.append(Message("user"))
        elif message.role == "user" and (
            (before.role == "user" and not self.users_in_row) or (before.role == "tool" and not self.user_after_tool)
        ):
            message = replace(before, content=before.content + _PARAGRAPH + message.content)
            fitted.pop()
        elif message.role == before.role == "assistant" and not self.assistants_in_row:
            fitted.append(Message("user"))
        fitted.append(message)

    def _id(self, call_id: str) -> str:
        if self.any_call_id or _NINE.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:9]


def complete_tool(tool: JsonMapping) -> JsonObject:
    """Return a tool with the fields that some templates require."""
    nothing = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return {**tool, "function": {**nothing, **(tool.get("function") or {})}}


def _arguments(call: ToolCall) -> JsonObject:
    """Return the value of a call's arguments; anything but a JSON object becomes the value of "arguments"."""
    try:
        value = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return {"arguments": call.arguments}
    return value if isinstance(value, dict) else {"arguments": value}


NO_TEMPLATE = "the model's tokenizer has no chat template: add chat_template.jinja to its folder"
_RESERVED_KWARGS = ("conversation", "messages", "tools", "chat_template", "return_dict", "continue_final_message")
_OVERRIDDEN_KWARGS = ("add_generation_prompt", "tokenize")
_RAISED = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class Renderer:
    """Renders messages with the tokenizer's chat template and the run's template arguments."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: JsonMapping) -> None:
        taken = [name for name in kwargs if name in _RESERVED_KWARGS]
        if taken:
            raise UserError(f"--apply-chat-template-kwargs: {taken[0]} is not for the template: remove it")
        self._tokenizer = tokenizer
        self._kwargs = {name: value for name, value in kwargs.items() if name not in _OVERRIDDEN_KWARGS}
        template = tokenizer.chat_template
        self.source: str = "\n".join(template.values()) if isinstance(template, dict) else template or ""
        """The text of the template, or of all its named templates; empty if the tokenizer has no template."""

    def text(self, messages: Sequence[JsonMapping], tools: Sequence[JsonMapping] = (), *, ask: bool = True) -> str:
        """Render messages to text, with the generation prompt if `ask` is set."""
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


def template_source(tokenizer: PreTrainedTokenizerBase, *, tools: bool) -> str:
    """Return the text of the template that the tokenizer uses with or without tools; empty if it has none."""
    try:
        return str(tokenizer.get_chat_template(None, tools=[] if tools else None))
    except ValueError:  # no template, or named templates without a default
        return ""


A, B, C, D = "Qanary", "Bzebra", "Cyclamen", "Dromedar"
"""Words that occur in no template."""
_LONG_ID = "call_0f8e4a1c2b3d4e5f60718293"
_MORE_ENDS = ("<|eom_id|>",)
"""Tokens that end a turn, but that templates write for built-in tools only."""
ProbeMessages = tuple[Message, ...]


def tool(name: str) -> JsonObject:
    """Make the schema of a tool for a probe conversation."""
    parameters: JsonObject = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def assistant_message(text: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    """Make an assistant message."""
    return Message("assistant", text, reasoning, calls)


def user_message(text: str) -> Message:
    return Message("user", text)


def call(value: str, id_: str = "abc123XYZ") -> ToolCall:
    return ToolCall(id_, "look", f'{{"place": "{value}"}}')


def result(text: str, id_: str = "abc123XYZ") -> Message:
    return Message("tool", text, tool_call_id=id_)


def system(text: str) -> Message:
    return Message("system", text)


def in_order(text: str, words: Iterable[str]) -> bool:
    """Return whether the text contains each word exactly once, in this order."""
    places = [text.find(word) if text.count(word) == 1 else -1 for word in words]
    return -1 not in places and places == sorted(places)


PARALLEL = (call(B), call(C, "abc123XYW"))
RESULTS = (result(C), result(D, "abc123XYW"))
ADDITIONS: dict[str, tuple[Message, ProbeMessages, tuple[str, ...]]] = {
    "tool": (assistant_message("", call(B)), (result(C),), (C,)),
    "tools": (assistant_message("", *PARALLEL), RESULTS, (C, D)),
    "user": (assistant_message(B), (user_message(C),), (C,)),
    "system": (assistant_message(B), (system(C), user_message(D)), (C, D)),
    "tool, user": (assistant_message("", call(B)), (result(C), user_message(D)), (C, D)),
    "assistant, user": (assistant_message(B), (assistant_message(C), user_message(D)), (C, D)),
}
"""Kinds of additions to a turn: the turn, the messages that a client adds, and the words in these messages."""


def probe_shape(renderer: Renderer) -> TemplateShape:
    """Find the least restrictive shape with which every word is rendered in its place, one property at a time."""
    shape = TemplateShape()

    def is_shown(messages: ProbeMessages, words: Sequence[str], unlike: tuple[str, ...] = ()) -> bool:
        try:
            text = renderer.text(shape.of(messages))
        except TemplateRefused:
            return False
        return in_order(text, words) and not any(odd in text for odd in unlike)

    def require(field: str, *trials: tuple[ProbeMessages, tuple[str, ...]]) -> None:
        """Switch a property of the shape off unless all trials succeed."""
        nonlocal shape
        if not all(is_shown(*trial) for trial in trials):
            shape = replace(shape, **{field: False})

    def called(made: ToolCall) -> tuple[ProbeMessages, tuple[str, ...]]:
        alone = (user_message(A), assistant_message("", made))
        answered = (*alone, result(C, made.id)), (A, B, C)
        return answered if shape.tools and is_shown(*answered) else (alone, (A, B))

    if not is_shown((user_message(A),), (A,)):
        shape = replace(shape, parts=True)
    require("system_first", ((system(A), user_message(B)), (A, B)))
    require("users_in_row", ((user_message(A), user_message(B)), (A, B)))
    in_row = (user_message(A), assistant_message(B), assistant_message(C), user_message(D))
    require("assistants_in_row", (in_row, (A, B, C, D)))
    require("assistant_first", ((assistant_message(A), user_message(B)), (A, B)))

    # The form of arguments (mapping or text) and of missing content ("" or None) in which calls are rendered.
    for empty_is_none, mapped in ((False, True), (False, False), (True, True), (True, False)):
        shape = replace(shape, mapped_arguments=mapped, empty_is_none=empty_is_none)
        if is_shown(*called(call(B)), unlike=("'place'", '\\"place')):
            break
    else:
        shape = replace(shape, calls=False, mapped_arguments=True, empty_is_none=False)
    one, two = (
        (user_message(A), assistant_message("", call(B))),
        (user_message(A), assistant_message("", *PARALLEL)),
    )
    if shape.calls:
        require("any_call_id", called(call(B, _LONG_ID)))
        require("parallel_calls", (two, (A, B, C)))
        if not is_shown(two, (A, B, C)):
            shape = replace(shape, calls=False)
        require("calls_with_text", ((user_message(A), assistant_message(B, call(C))), (A, C)))
        with_reasoning = (user_message(A), assistant_message(B, call(C), reasoning=D))
        require("calls_with_text_and_reasoning", (with_reasoning, (A, C)))
    require("tools", ((*one, result(C)), (A, C)), ((*two, *RESULTS), (A, D)))
    require("user_after_tool", ((*one, result(C), user_message(D)), (A, C, D)))
    require(
        "system_anywhere",
        ((user_message(A), assistant_message(B), user_message(C), system(D)), (A, B, C, D)),
        ((user_message(A), assistant_message(B), system(C), user_message(D)), (A, B, C, D)),
        ((*one, result(C), system(D)), (A, C, D)),
    )
    return shape


class TurnEndStyle(Enum):
    """The ways in which a template marks the end of an assistant turn."""

    CLOSED = "a token closes it"
    OPENED = "the first token of the next message ends it"
    BARE = "by no token of the template"


@dataclass(frozen=True)
class TurnEnding:
    """The tokens at the end of a turn: a continuation begins after one of `cuts`, and `stops` can be sampled.

    A cut in `openings` begins the next message and cannot be replaced by another token; any other cut closes any turn.
    A token in `call_ends` closes a call, and is a cut if the template writes no other cut after it.
    """

    way: TurnEndStyle
    cuts: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()
    call_ends: tuple[str, ...] = ()


def find_ending(renderer: Renderer, shape: TemplateShape, special: SpecialTokenEncoder, eos: str | None) -> TurnEnding:
    """Find the tokens that end turns; raises `TemplateRefused` if the template does not render assistant messages."""
    tokens_in = special.pattern.findall

    def text_of(messages: ProbeMessages, *, ask: bool = True) -> str:
        return renderer.text(shape.of(messages), ask=ask)

    def after(messages: ProbeMessages, *, ask: bool = True) -> list[str]:
        """Return the tokens between the word B of an assistant turn and the word C of what follows."""
        _, found, rest = text_of((user_message(A), *messages), ask=ask).rpartition(B)
        if not found:
            raise TemplateRefused("the model's chat template does not render the text of assistant messages")
        return tokens_in(rest.partition(C)[0])

    def between(messages: ProbeMessages, word: str, other: str) -> list[str]:
        with suppress(TemplateRefused):
            if shape.parallel_calls:
                return tokens_in(text_of(messages).rpartition(other)[0].rpartition(word)[2])
        return []

    alone = after((assistant_message(B),), ask=False)
    answered = after((assistant_message(B), user_message(C)))
    if alone:
        # Does the first of them close the turn, or does it open a user message, which the template writes last?
        both = [one for one, other in zip(alone, answered, strict=False) if one == other]
        first = eos if eos is not None and eos in both else alone[0]
        before_user = tokens_in(text_of((user_message(A),)).partition(A)[0])
        if first not in before_user[-1:]:
            # A token closes turns, perhaps another one in the history, and a third one after a call.
            known = [first, *([] if first in answered else answered[:1])]
            after_call: list[str] = []
            with suppress(TemplateRefused):
                after_call = after((assistant_message("", call(B)),), ask=False)
            after_call = [] if set(after_call) & set(known) else after_call[-1:]
            more = [token for token in _MORE_ENDS if token in special.ids and token in renderer.source]
            called = (user_message(A), assistant_message("", *PARALLEL))
            between_calls = between(called, B, C)
            between_results = between((*called, *RESULTS), RESULTS[0].content, D)
            return TurnEnding(
                TurnEndStyle.CLOSED,
                cuts=_distinct([*known, *after_call, *more]),
                stops=_distinct([first, *(token for token in after_call if token not in between_calls), *more]),
                openings=tuple(token for token in after_call if token in between_results),
                call_ends=tuple(token for token in after_call if token in between_calls),
            )
    if not answered:
        return TurnEnding(TurnEndStyle.BARE)
    found: list[str] = []  # the first token after the first message of each conversation
    ends: list[str] = []
    for number, (turn, *following) in enumerate(_OPENED_TURNS):
        with suppress(TemplateRefused):
            inside = len(after((turn,), ask=False)) - bool(alone)
            found += after((turn, *following))[inside : inside + 1]
        if number == 1:  # a user message and a tool's result can be sampled as ends
            ends = list(found)
    return TurnEnding(TurnEndStyle.OPENED, _distinct(found), _distinct(ends), openings=_distinct(found))


_OPENED_TURNS: tuple[ProbeMessages, ...] = (
    (assistant_message(B), user_message(C)),
    (assistant_message("", call(B)), result(C)),
    (assistant_message("", call(B)), user_message(C)),
    (assistant_message(B), system(C)),
    (assistant_message(B), assistant_message(C)),
    (assistant_message(B),),
)


def _distinct(tokens: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tokens))
