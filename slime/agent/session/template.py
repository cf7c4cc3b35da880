"""A model's chat template for sessions: renders whole prompts, and continuations of sampled turns.

`ChatTemplate` renders prompts and continuations; `ChatModel` has the templates of a tokenizer and the parsers of its
answers.

Invariant: the ids of a sampled turn are never read, changed or re-tokenized. The messages that a client adds are
rendered after a stand-in for the conversation, an assistant turn with a mark in it; the continuation is the text after
the token that ends the marked turn. So its cost depends only on the new messages, and templates that rewrite earlier
turns (they drop earlier reasoning) rewrite only the stand-in.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from slime.agent.messages import Message, ToolCall, TurnRequest
from slime.agent.session.limits import PromptExceedsContext
from slime.agent.session.special_tokens import SpecialTokenEncoder, iter_texts, longest_match_pattern
from slime.agent.session.template_probe import (
    ADDITIONS,
    NO_TEMPLATE,
    Renderer,
    TemplateRefused,
    TemplateShape,
    TurnEnding,
    TurnEndStyle,
    assistant_message,
    complete_tool,
    find_ending,
    in_order,
    probe_shape,
    template_source,
    tool,
    user_message,
)
from slime.models.parsers.events import OutputParser
from slime.models.parsers.formats import TOOL_CALL_PARSERS, Formats, detect_formats, make_parser
from slime.storage.json_types import JsonMapping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_TAIL = 16
"""Number of tokens at the end of a prompt that are searched for an opened think block."""
_OPENED = re.compile(r"(<think(ing)?>|<seed:think>|\[THINK\]|◁think▷|<\|channel>thought)\s*$")
_STAND_IN_TOOL = tool("look")
_REQUIRED_PROPERTY = {
    "tool": "tools",
    "tools": "tools",
    "system": "system_anywhere",
    "tool, user": "user_after_tool",
    "assistant, user": "assistants_in_row",
}
"""The property of a shape that an addition needs to be rendered without conversion."""


class ChatTemplate:
    """A tokenizer's chat template, probed once; `refusal` is the reason if its turns cannot be continued."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, kwargs: Mapping[str, object] = {}) -> None:
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer, kwargs)
        self._special = SpecialTokenEncoder(tokenizer, self._renderer.source)
        self._mark = f"Turn{secrets.token_hex(8)}"
        self._tools_in_turns = True
        self.shape = TemplateShape()
        self.ending = TurnEnding(TurnEndStyle.BARE)
        self._cuts = self._cut_pattern()
        self.refusal: str | None = self._probed()
        self._opening_ids = {self._special.ids[token] for token in self.ending.openings}
        stop_ids = {self._special.ids[token] for token in self.ending.stops}
        if tokenizer.eos_token_id is not None:
            stop_ids.add(int(tokenizer.eos_token_id))
        self.stop_ids = frozenset(stop_ids)

    def prompt(self, messages: Sequence[Message], tools: Sequence[JsonMapping]) -> np.ndarray:
        """Return the ids of a whole conversation with the generation prompt, or raise `TemplateRefused`."""
        text, marks = self._rendered(messages, tools)
        return np.array(self._special.encode(text, marks), np.int32)

    def continuation(
        self, last: Message, ended_with: int | None, new: Sequence[Message], tools: Sequence[JsonMapping]
    ) -> np.ndarray:
        """Return the ids to append after the sampled ids of the turn `last`: `new` and the generation prompt.

        `ended_with` is the last sampled id if that is one of `stop_ids`, and None for a turn that was cut short. The
        template's token for the end of the turn is appended unless the sampled token replaces it. Any token that closes
        turns replaces it, but a token that begins the next message is replaced only by itself.
        """
        cut, rest, marks = self._delta(last, new, tools)
        ids = self._special.encode(cut + rest, marks)
        if cut:
            if cut in self.ending.openings:
                is_ended = ended_with == self._special.ids[cut]
            else:
                is_ended = ended_with in {self._special.ids[token] for token in self.ending.cuts} - self._opening_ids
            if is_ended:
                ids = ids[1:]
        elif ended_with is None and self._tokenizer.eos_token_id is not None:
            ids = [int(self._tokenizer.eos_token_id), *ids]
        return np.array(ids, np.int32)

    def _delta(
        self, last: Message, new: Sequence[Message], tools: Sequence[JsonMapping]
    ) -> tuple[str, str, str | None]:
        """Return the token that ends the turn `last`, if the template writes one, the text after it, and the marks."""
        made = last.tool_calls if self.ending.way is not TurnEndStyle.BARE else ()
        calls = tuple(ToolCall(call.id, call.name, f'{{"mark": "{self._mark}"}}') for call in made)
        content = "" if calls and self.shape.calls else self._mark  # some templates render it after the results
        shown = tools if self._tools_in_turns or not tools else [_STAND_IN_TOOL]
        text, marks = self._rendered([user_message("?"), assistant_message(content, *calls), *new], shown)
        at = text.rfind(self._mark)
        if at < 0:
            raise TemplateRefused("the model's chat template does not render the text of assistant messages")
        at += len(self._mark)
        if self.ending.way is TurnEndStyle.BARE:
            return "", text[at:], marks
        if (found := self._cuts.search(text, at)) is None:
            raise TemplateRefused("the model's chat template does not end an assistant turn with a token")
        return found["turn"] or found["call"], text[found.end() :], marks

    def _cut_pattern(self) -> re.Pattern[str]:
        """Compile a pattern for the token that ends a turn, also after a call's end and other control tokens."""
        ends_turn, ends_call = (
            longest_match_pattern(
                token for token in self.ending.cuts if (token in self.ending.call_ends) is of_call
            ).pattern
            for of_call in (False, True)
        )
        between = rf"(?:{self._special.pattern.pattern}|\s)*?"
        return re.compile(f"(?:(?:{ends_call}){between})?(?P<turn>{ends_turn})|(?P<call>{ends_call})")

    def _rendered(self, messages: Sequence[Message], tools: Sequence[JsonMapping]) -> tuple[str, str | None]:
        """Render messages to text, and return the marks in the text of control tokens of the messages.

        If the template refuses them, try again with completed tools, then with the strictest shape.
        """
        refused: TemplateRefused | None = None
        for shape, completes in ((self.shape, False), (self.shape, True), (self.shape.strictest(), True)):
            try:
                shaped, given = shape.of(messages), [complete_tool(tool) for tool in tools] if completes else tools
                marks = self._special.marks_for([shaped, given])
                if marks is not None:
                    shaped, given = self._special.broken(shaped, marks), self._special.broken(given, marks)
                return self._renderer.text(shaped, given), marks
            except TemplateRefused as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _probed(self) -> str | None:
        if not self._renderer.source:
            return NO_TEMPLATE
        try:
            self.shape = probe_shape(self._renderer)
            self.ending = find_ending(self._renderer, self.shape, self._special, self._tokenizer.eos_token)
        except TemplateRefused as refused:
            return f"{refused}: its turns cannot be continued"
        self._cuts = self._cut_pattern()
        for kind, field in _REQUIRED_PROPERTY.items():  # switch a property off if exactly that makes the addition work
            probed = self.shape
            if not self.continues(kind):
                self.shape = replace(probed, **{field: False})
                if not self.continues(kind):
                    self.shape = probed
        if not self.continues("tool") and not self.continues("user"):
            return "the model's chat template renders neither tool results nor user messages after an assistant turn"
        self._tools_in_turns = any(
            self._delta(*ADDITIONS[kind][:2], [tool("look")]) != self._delta(*ADDITIONS[kind][:2], [tool("listen")])
            for kind in ("tool", "user")
            if self.continues(kind)
        )
        return None

    def continues(self, kind: str) -> bool:
        """Return whether all words of an addition (a key of `ADDITIONS`) are rendered once, in order, after a turn."""
        last, new, words = ADDITIONS[kind]
        try:
            return in_order(self._delta(last, new, [_STAND_IN_TOOL])[1], words)
        except TemplateRefused:
            return False


CHARACTERS_PER_TOKEN = 8
"""More than the average of prompts in any language and in code."""
_PIECE_CHARACTERS = 16384
_BORDER_TOKENS = 64


class ChatModel:
    """A tokenizer and its chat templates, one for each set of template arguments, each probed on first use."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, context: int | None = None, formats: Formats | None = None
    ) -> None:
        """Answers are parsed in these `formats`; formats that are not named are taken from the chat template."""
        self.tokenizer = tokenizer
        self.context = context
        """The model's context length in tokens; None if unknown."""
        named = formats or Formats()
        named.check()
        self.sources = {offers: template_source(tokenizer, tools=offers) for offers in (False, True)}
        """The text of the template for a request, by whether the request offers tools."""
        self.formats = {
            offers: Formats(named.tool or found.tool, named.reasoning or found.reasoning)
            for offers, found in ((offers, detect_formats(source)) for offers, source in self.sources.items())
        }
        """The formats of an answer, by whether its request offers tools."""
        self.warning: str | None = None
        """The reason why tool calls stay text, set by the first request with tools; None if they are parsed."""
        self._templates: dict[str, ChatTemplate] = {}

    def template(self, kwargs: JsonMapping) -> ChatTemplate:
        """Return the chat template with these arguments."""
        key = json.dumps(kwargs, sort_keys=True, default=repr)
        if key not in self._templates:
            self._templates[key] = ChatTemplate(self.tokenizer, kwargs=dict(kwargs))
        return self._templates[key]

    def check_length(self, request: TurnRequest, context: int | None) -> None:
        """Raise `PromptExceedsContext` if a request has more tokens than the context; stop as soon as that is certain.

        Only a request with many more characters than usual prompts of this length is checked. Its pieces are tokenized
        separately, which adds a few tokens at each border (`_BORDER_TOKENS`).
        """
        if context is None:
            return
        if len(request.messages) > context:
            raise PromptExceedsContext(len(request.messages), context - 1)
        texts = [text for message in request.messages for text in (message.content, message.reasoning or "")]
        texts += [call.arguments for message in request.messages for call in message.tool_calls]
        if _renders_tools(self.sources[True]):
            texts.append("\n".join(iter_texts(request.tools)))
        characters = sum(map(len, texts))
        if characters <= CHARACTERS_PER_TOKEN * context:
            return
        tokens = seen = 0
        for text in texts:
            for start in range(0, len(text), _PIECE_CHARACTERS):
                piece = text[start : start + _PIECE_CHARACTERS]
                tokens += max(0, self._token_count(piece) - _BORDER_TOKENS)
                seen += len(piece)
                if tokens > context:
                    raise PromptExceedsContext(round(tokens * characters / seen), context - 1)

    def _token_count(self, text: str) -> int:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if self.tokenizer.is_fast:
            return len(self.tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def parser(self, request: TurnRequest, prompt_ids: Sequence[int] | np.ndarray) -> OutputParser:
        """Return a parser for the answer to a request whose prompt has these ids."""
        offers_tools = bool(request.tools)
        formats = self.formats[offers_tools]
        if request.tool_choice == "none" or not offers_tools:
            formats = replace(formats, tool=None)  # text that looks like a call stays text
        elif formats.tool is None and self.warning is None:
            self.warning = _tool_call_warning(self.sources[True])
            logger.warning("%s", self.warning)
        tail = self.tokenizer.decode([int(id_) for id_ in prompt_ids[-_TAIL:]], skip_special_tokens=False)
        in_reasoning = _OPENED.search(tail) is not None  # in a think block that the template opened
        return make_parser(formats, tools=request.tools, starts_in_reasoning=in_reasoning)


@lru_cache
def _renders_tools(source: str) -> bool:
    return re.search(r"\btools\b", re.sub(r"{#.*?#}", "", source, flags=re.DOTALL)) is not None


def _tool_call_warning(source: str) -> str:
    flag = f"--sglang-tool-call-parser ({', '.join(TOOL_CALL_PARSERS)})"
    if not _renders_tools(source):
        return (
            "the model's chat template does not render tools, so the model does not see the tools of clients and its "
            f"tool calls stay text. Use a template that renders tools, and name the format of calls with {flag}"
        )
    return (
        "the model's chat template writes tool calls in an unknown format, so tool calls stay text. If the model "
        f"writes one of the known formats, name it with {flag}"
    )
