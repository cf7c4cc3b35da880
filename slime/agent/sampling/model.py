"""The model as sessions know it: its chat template, how it ends a turn, and how its answers are read."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from slime.agent.messages import TurnRequest
from slime.agent.sampling.turn import ParserFactory
from slime.agent.session.limits import PromptTooLong
from slime.agent.session.rendering import template_source
from slime.agent.session.special_text import texts_in
from slime.agent.session.template import ChatTemplate
from slime.models.parsers.events import OutputParser
from slime.models.parsers.formats import TOOL_CALL_PARSERS, Formats, formats_of, make_parser

_CHARACTERS_PER_TOKEN = 8
"""More than prompts have on average, in any language and in code."""
_PIECE_CHARACTERS = 16384
_BORDER_TOKENS = 64

logger = logging.getLogger(__name__)


class ChatModel:
    """A tokenizer and its templates, one for each set of template arguments, probed when it is first asked for."""

    def __init__(self, tokenizer: Any, *, context: int | None = None, formats: Formats | None = None) -> None:
        """Answers are read in these `formats`, and where they name none in those of the chat template."""
        self.tokenizer = tokenizer
        self.context = context
        """The most tokens that the model takes; None when nobody knows."""
        named = formats or Formats()
        named.check()
        self.sources = {offers: template_source(tokenizer, tools=offers) for offers in (False, True)}
        """The text of the template that renders a request, by whether the request offers tools."""
        self.formats = {
            offers: Formats(named.tool or found.tool, named.reasoning or found.reasoning)
            for offers, found in ((offers, formats_of(source)) for offers, source in self.sources.items())
        }
        """The formats of an answer, by whether its request offers tools."""
        self.warning: str | None = None
        """Why tool calls stay text, once a request has offered tools; None where they are read."""
        self._templates: dict[str, ChatTemplate] = {}

    def template(self, kwargs: Mapping[str, Any]) -> ChatTemplate:
        """The chat template under these arguments."""
        key = json.dumps(kwargs, sort_keys=True, default=repr)
        if key not in self._templates:
            self._templates[key] = ChatTemplate(self.tokenizer, kwargs=dict(kwargs))
        return self._templates[key]

    def parsers(self, template: ChatTemplate) -> ParserFactory:
        """What makes the parser of an answer under this template."""
        return partial(self._parser, template)

    def check_length(self, request: TurnRequest, context: int) -> None:
        """Raise `PromptTooLong` where a request has more tokens than the context; stops as soon as that is certain.

        Only a request with many more characters than prompts of this length usually have is looked at. Its pieces are
        tokenized apart, which makes a few tokens more at each border (`_BORDER_TOKENS`).
        """
        if len(request.messages) > context:
            raise PromptTooLong(len(request.messages), context - 1)
        texts = [text for message in request.messages for text in (message.content, message.reasoning or "")]
        texts += [call.arguments for message in request.messages for call in message.tool_calls]
        if _renders_tools(self.sources[True]):
            texts.append("\n".join(texts_in(request.tools)))
        characters = sum(map(len, texts))
        if characters <= _CHARACTERS_PER_TOKEN * context:
            return
        tokens = seen = 0
        for text in texts:
            for start in range(0, len(text), _PIECE_CHARACTERS):
                piece = text[start : start + _PIECE_CHARACTERS]
                tokens += max(0, self._token_count(piece) - _BORDER_TOKENS)
                seen += len(piece)
                if tokens > context:
                    raise PromptTooLong(round(tokens * characters / seen), context - 1)

    def _token_count(self, text: str) -> int:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if self.tokenizer.is_fast:
            return len(self.tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def _parser(self, template: ChatTemplate, request: TurnRequest, prompt_ids: np.ndarray) -> OutputParser:
        offers_tools = bool(request.tools)
        formats = self.formats[offers_tools]
        if request.tool_choice == "none" or not offers_tools:
            formats = dataclasses.replace(formats, tool=None)  # what looks like a call is text then
        elif formats.tool is None and self.warning is None:
            self.warning = _why_calls_stay_text(self.sources[True])
            logger.warning("%s", self.warning)
        in_reasoning = template.starts_in_reasoning(prompt_ids)
        return make_parser(formats, tools=request.tools, starts_in_reasoning=in_reasoning)


def _renders_tools(source: str) -> bool:
    return re.search(r"\btools\b", re.sub(r"{#.*?#}", "", source, flags=re.DOTALL)) is not None


def _why_calls_stay_text(source: str) -> str:
    flag = f"--sglang-tool-call-parser ({', '.join(TOOL_CALL_PARSERS)})"
    if not _renders_tools(source):
        return (
            "the model's chat template does not render tools: the model does not see the tools that clients offer, and "
            f"its tool calls stay text; use a template that renders tools, and name the format of calls with {flag}"
        )
    return (
        "the model's chat template writes tool calls in no format that is read here: tool calls stay text; if the "
        f"model writes one of these formats, name it with {flag}"
    )
