"""Loss masks for supervised training: finds the assistant's tokens in a rendered conversation.

Invariant: the tokens are those of rendering the whole conversation once; the mask is 1 on what the model would have
sampled (content, reasoning, tool calls, the token that ends the turn) and 0 on everything else: headers, other roles,
the line break after the end of a turn, turns with `step_loss_mask` 0.

The code knows no chat format; it locates turns with the chat template, in one of three ways:
1. The template itself marks what the assistant wrote (`{% generation %}`).
2. A turn is the difference between the rendering that ends with it and the rendering that ends with its generation
   prompt.
3. If the template rewrites history, so that these renderings are not prefixes of the whole (Qwen3 drops earlier
   thinking, DeepSeek opens it only in the generation prompt), the turn is rendered again with a marker as its content.
   The turn ends where the text after the marked turn begins. It starts after its header, which is the part of the
   generation prompt that the whole conversation contains at that place.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import jinja2

from slime.data.chat_template import ASSISTANT, Message, normalize_messages
from slime.errors import UserError
from slime.storage.json_types import JsonMapping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TextRange = tuple[int, int]

DROP_KEY = "step_loss_mask"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKER = "\ue000turn\ue001"  # private-use characters, which templates and data do not contain
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError)


@dataclass(frozen=True)
class TurnMask:
    """The tokens of a conversation, and a mask with 1 for each token to train on."""

    token_ids: list[int]
    loss_mask: list[int]

    @property
    def response_length(self) -> int:
        """Number of tokens from the first trained one to the end."""
        return len(self.loss_mask) - self.loss_mask.index(1) if 1 in self.loss_mask else 0


def mask_turns(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[JsonMapping],
    *,
    tools: Sequence[object] | None = None,
    template_kwargs: JsonMapping | None = None,
) -> TurnMask:
    """Return tokens and loss mask of a conversation; assistant turns with `step_loss_mask: 0` are masked."""
    conversation = RenderedConversation(tokenizer, messages, tools, template_kwargs or {})
    template = tokenizer.get_chat_template(None, tools=list(tools) if tools else None)
    marks_turns = _GENERATION_TAG.search(template) is not None
    return (conversation.by_generation() if marks_turns else None) or conversation.by_spans()


class RenderedConversation:
    """A conversation rendered by one chat template; locates its assistant turns in the rendered text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[JsonMapping],
        tools: Sequence[object] | None,
        template_kwargs: JsonMapping,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools) if tools else None
        self._options = {key: value for key, value in template_kwargs.items() if key != "add_generation_prompt"}
        self.messages: list[Message] = [
            {key: value for key, value in message.items() if key != DROP_KEY}
            for message in normalize_messages(messages, "this conversation")
        ]
        self.turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        self.dropped = {i for i in self.turns if messages[i].get(DROP_KEY) == 0}
        try:
            self.text = self._render(self.messages)
        except _REFUSALS as error:
            raise UserError(f"the chat template refuses this conversation ({error})") from error

    def by_generation(self) -> TurnMask | None:
        """Build the mask from the template's own marks; None if a turn is dropped but marks do not match turns."""
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
            bits = pairwise([0, *mask, 0])
            edges = [place for place, (left, right) in enumerate(bits) if bool(left) != bool(right)]
            runs = list(zip(edges[::2], edges[1::2], strict=True))
            if len(runs) != len(self.turns):
                return None
            for turn, (start, end) in zip(self.turns, runs, strict=True):
                if turn in self.dropped:
                    mask[start:end] = [0] * (end - start)
        return TurnMask(token_ids, mask)

    def by_spans(self) -> TurnMask:
        """Locate turns in the text, then in its tokens: a token counts if it begins within a turn."""
        spans: list[TextRange] = []
        for turn in self.turns:
            begin = spans[-1][1] if spans else 0
            start, end = self._by_prefix(turn) or self._by_marker(turn, begin)
            stripped = self.text[start:end].rstrip()
            if stripped.endswith(tuple(self._special_tokens)):
                end = start + len(stripped)  # a line break after the token that closes a turn is the template's
            spans.append((start, end))
        token_ids, starts = token_starts(self._tokenizer, self.text, [edge for span in spans for edge in span])
        mask = [0] * len(token_ids)
        for turn, (begin, end) in zip(self.turns, spans, strict=True):
            if turn not in self.dropped:
                first, last = bisect_left(starts, begin), bisect_left(starts, end)
                mask[first:last] = [1] * (last - first)
        return TurnMask(token_ids, mask)

    def _by_prefix(self, turn: int) -> TextRange | None:
        try:
            asked = self._render(self.messages[:turn], add_generation_prompt=True)
            answered = self._render(self.messages[: turn + 1])
        except _REFUSALS:  # the template renders only whole conversations
            return None
        fits = self.text.startswith(answered) and answered.startswith(asked)
        return (len(asked), len(answered)) if fits else None

    def _by_marker(self, turn: int, begin: int) -> TextRange:
        """Locate a turn by a marker in place of its content, or of the name of its first tool call."""
        message = self.messages[turn]
        variants: list[Message] = [{**message, "content": _MARKER}]
        if message.get("tool_calls"):
            first, *others = message["tool_calls"]
            named = {**first, "function": {**first["function"], "name": _MARKER}} if "function" in first else first
            variants.append({**message, "tool_calls": [named, *others]})
        for variant in variants:
            marked = [*self.messages[:turn], variant, *self.messages[turn + 1 :]]
            try:
                whole, until = self._render(marked), self._render(marked[: turn + 1])
            except _REFUSALS:
                continue
            after, tail = whole.partition(_MARKER)[2], until.partition(_MARKER)[2]
            rest = after.removeprefix(tail)
            shown_once = whole.count(_MARKER) == until.count(_MARKER) == 1
            if shown_once and after.startswith(tail) and self.text.endswith(rest):
                end = len(self.text) - len(rest)
                length = min(len(self.text), len(whole))
                common = next((i for i in range(length) if self.text[i] != whole[i]), length)
                return min(self._after_header(turn, begin, common), end), end
        raise self._unknown(turn)

    def _after_header(self, turn: int, begin: int, common: int) -> int:
        """Return the position after a turn's header: within [begin, common], the part independent of its content."""
        for messages in (self.messages[:turn], self.messages):  # some templates refuse to render an empty list
            try:
                before, asked = self._render(messages), self._render(messages, add_generation_prompt=True)
            except _REFUSALS:
                continue
            if asked.startswith(before):
                header = asked[len(before) :]
                break
        else:
            raise self._unknown(turn)
        if not header:
            directly = self.text.startswith(asked) and len(asked) <= common  # directly after a tool's result
            return len(asked) if directly else common
        region = self.text[begin:common]
        for length in range(len(header), 0, -1):
            part = header[:length]
            at = region.rfind(part)
            if at >= 0 and (length == len(header) or any(token in part for token in self._special_tokens)):
                return begin + at + length
        raise self._unknown(turn)

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


def token_starts(tokenizer: PreTrainedTokenizerBase, text: str, edges: Sequence[int]) -> tuple[list[int], list[int]]:
    """Encode a text without special tokens; return the token ids and the character at which each token begins.

    A tokenizer without offsets encodes the text in pieces cut at `edges`; tokens then begin where their piece begins.
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
