"""Which tokens of a rendered conversation the assistant wrote: the loss mask of supervised training.

Invariant: the tokens are those of rendering the whole conversation once; the mask is 1 on what the model would have
sampled (content, reasoning, tool calls, the token that ends the turn) and 0 on everything else: headers, other roles,
the line break after the end of a turn, turns with `step_loss_mask` 0.

No format is known here; the chat template is asked, in one of three ways:
1. It marks what the assistant wrote itself (`{% generation %}`).
2. A turn is what the rendering that ends with it has beyond the rendering that asks for it (the generation prompt).
3. Where the template rewrites history, so that these are no prefixes of the whole (Qwen3 drops earlier thinking,
   DeepSeek opens it only in the generation prompt): the turn is rendered once more with a marker for its content. It
   ends where the text after the marker's turn begins, and starts after its header, which is the part of the generation
   prompt that the whole conversation has there.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import jinja2

from slime.data.chat_template import ASSISTANT, Message, checked_messages
from slime.errors import UserError

Span = tuple[int, int]

DROP_KEY = "step_loss_mask"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKER = "\ue000turn\ue001"  # private-use characters: no template and no data has them
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError)


@dataclass(frozen=True)
class TurnMask:
    """A conversation as tokens, with 1 for each token to train on."""

    token_ids: list[int]
    loss_mask: list[int]

    @property
    def response_length(self) -> int:
        """Tokens from the first one to train on to the end."""
        return len(self.loss_mask) - self.loss_mask.index(1) if 1 in self.loss_mask else 0


def mask_turns(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> TurnMask:
    """Tokens and loss mask of a conversation; every assistant turn counts unless it says `step_loss_mask: 0`."""
    conversation = Conversation(tokenizer, messages, tools, template_kwargs or {})
    if conversation.marks_generation and (masked := conversation.by_generation()) is not None:
        return masked
    return conversation.by_spans()


class Conversation:
    """One conversation under one template: its renderings, and where its turns are in the whole."""

    def __init__(
        self,
        tokenizer: Any,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools) if tools else None
        self._options = {key: value for key, value in template_kwargs.items() if key != "add_generation_prompt"}
        self.messages: list[Message] = [
            {key: value for key, value in message.items() if key != DROP_KEY}
            for message in checked_messages(messages, "this conversation")
        ]
        self.turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        self.dropped = {i for i in self.turns if messages[i].get(DROP_KEY) == 0}
        try:
            self.text = self._render(self.messages)
        except _REFUSALS as error:
            raise UserError(f"the chat template refuses this conversation ({error})") from error

    @property
    def marks_generation(self) -> bool:
        """Whether the template itself says what the assistant wrote."""
        template = self._tokenizer.get_chat_template(None, tools=self._tools)
        return _GENERATION_TAG.search(template) is not None

    def by_generation(self) -> TurnMask | None:
        """The template's own marks; None where a turn is to be dropped and marks cannot be told apart by turn."""
        rendered = self._tokenizer.apply_chat_template(
            self.messages,
            tools=self._tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._options,
        )
        token_ids, mask = list(rendered["input_ids"]), [int(bit) for bit in rendered["assistant_masks"]]
        if self.dropped:
            runs = list(_runs(mask))
            if len(runs) != len(self.turns):
                return None
            for turn, (start, end) in zip(self.turns, runs, strict=True):
                if turn in self.dropped:
                    mask[start:end] = [0] * (end - start)
        return TurnMask(token_ids, mask)

    def by_spans(self) -> TurnMask:
        """Turns located in the text, then in its tokens: a token counts when it begins within a turn."""
        spans = self.spans()
        edges = [edge for span in spans for edge in span]
        token_ids, starts = token_starts(self._tokenizer, self.text, edges)
        mask = [0] * len(token_ids)
        for turn, (begin, end) in zip(self.turns, spans, strict=True):
            if turn not in self.dropped:
                first, last = bisect_left(starts, begin), bisect_left(starts, end)
                mask[first:last] = [1] * (last - first)
        return TurnMask(token_ids, mask)

    def spans(self) -> list[Span]:
        """Where each assistant turn is in the text."""
        found: list[Span] = []
        for turn in self.turns:
            begin = found[-1][1] if found else 0
            span = self._by_prefix(turn) or self._by_marker(turn, begin)
            found.append(self._without_tail(span))
        return found

    def _by_prefix(self, turn: int) -> Span | None:
        try:
            asked = self._render(self.messages[:turn], add_generation_prompt=True)
            answered = self._render(self.messages[: turn + 1])
        except _REFUSALS:  # a template that takes only whole conversations
            return None
        fits = self.text.startswith(answered) and answered.startswith(asked)
        return (len(asked), len(answered)) if fits else None

    def _by_marker(self, turn: int, begin: int) -> Span:
        for marked in self._marked(turn):
            try:
                whole, until = self._render(marked), self._render(marked[: turn + 1])
            except _REFUSALS:
                continue
            after, tail = whole.partition(_MARKER)[2], until.partition(_MARKER)[2]
            rest = after.removeprefix(tail)
            shown_once = whole.count(_MARKER) == until.count(_MARKER) == 1
            if shown_once and after.startswith(tail) and self.text.endswith(rest):
                end = len(self.text) - len(rest)
                return min(self._after_header(turn, begin, _common_prefix(self.text, whole)), end), end
        raise self._unknown(turn)

    def _marked(self, turn: int) -> Iterator[list[Message]]:
        """The messages with a marker in this turn: for its content, or for the name of its first tool call."""
        message = self.messages[turn]
        variants: list[Message] = [{**message, "content": _MARKER}]
        if message.get("tool_calls"):
            first, *others = message["tool_calls"]
            named = {**first, "function": {**first["function"], "name": _MARKER}} if "function" in first else first
            variants.append({**message, "tool_calls": [named, *others]})
        for variant in variants:
            yield [*self.messages[:turn], variant, *self.messages[turn + 1 :]]

    def _after_header(self, turn: int, begin: int, common: int) -> int:
        """Where the text after a turn's header starts: within [begin, common], what does not depend on its content."""
        header, asked = self._header(turn)
        if not header:
            goes_on = self.text.startswith(asked) and len(asked) <= common  # directly after a tool's result
            return len(asked) if goes_on else common
        region = self.text[begin:common]
        for length in range(len(header), 0, -1):
            part = header[:length]
            at = region.rfind(part)
            if at >= 0 and (length == len(header) or any(token in part for token in self._special_tokens)):
                return begin + at + length
        raise self._unknown(turn)

    def _header(self, turn: int) -> tuple[str, str]:
        """The generation prompt before a turn, alone and with all that comes before it."""
        for messages in (self.messages[:turn], self.messages):  # some templates refuse to render nothing at all
            try:
                before, asked = self._render(messages), self._render(messages, add_generation_prompt=True)
            except _REFUSALS:
                continue
            if asked.startswith(before):
                return asked[len(before) :], asked
        raise self._unknown(turn)

    def _without_tail(self, span: Span) -> Span:
        """A turn ends with the token that closes it; a line break after that is the template's."""
        start, end = span
        stripped = self.text[start:end].rstrip()
        if stripped.endswith(tuple(self._special_tokens)):
            return start, start + len(stripped)
        return span

    @cached_property
    def _special_tokens(self) -> set[str]:
        added = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        return added | set(self._tokenizer.all_special_tokens)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages),
            tools=self._tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._options,
        )

    def _unknown(self, turn: int) -> UserError:
        return UserError(
            f"the chat template does not show what the assistant wrote in message {turn}: give the tokenizer a "
            "template that marks it with {% generation %}"
        )


def token_starts(tokenizer: Any, text: str, edges: Sequence[int]) -> tuple[list[int], list[int]]:
    """Token ids of a text, nothing added, and the character each token begins at.

    A tokenizer that cannot tell encodes the text in pieces cut at `edges`; tokens then begin with their piece.
    """
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [start for start, _ in encoded["offset_mapping"]]
    whole = list(tokenizer.encode(text, add_special_tokens=False))
    token_ids: list[int] = []
    starts: list[int] = []
    cuts = [0, *edges, len(text)]
    for start, end in pairwise(cuts):
        piece = tokenizer.encode(text[start:end], add_special_tokens=False)
        token_ids += piece
        starts += [start] * len(piece)
    if token_ids != whole:
        raise UserError("this tokenizer joins a turn with its header into one token: use its fast version")
    return token_ids, starts


def _runs(mask: Sequence[int]) -> Iterator[Span]:
    """Ranges of ones."""
    start = None
    for position, bit in enumerate([*mask, 0]):
        if bit and start is None:
            start = position
        elif not bit and start is not None:
            yield start, position
            start = None


def _common_prefix(left: str, right: str) -> int:
    length = min(len(left), len(right))
    return next((i for i in range(length) if left[i] != right[i]), length)
