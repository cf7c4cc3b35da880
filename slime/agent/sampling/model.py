"""The model as sessions know it: its chat template, how it ends a turn, and how its answers are read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from slime.agent.messages import TurnRequest
from slime.agent.sampling.turn import ParserFactory
from slime.agent.session.template import ChatTemplate
from slime.parsers.events import OutputParser
from slime.parsers.formats import Formats, formats_of, make_parser


class ChatModel:
    """A tokenizer and its templates, one for each set of template arguments, probed when it is first asked for."""

    def __init__(self, tokenizer: Any, *, context: int | None = None, formats: Formats | None = None) -> None:
        """Answers are read in these `formats`, and where they name none in those of the chat template."""
        self.tokenizer = tokenizer
        self.context = context
        """The most tokens that the model takes; None when nobody knows."""
        found = formats_of(tokenizer.chat_template or "")
        named = formats or Formats()
        self.formats = Formats(named.tool or found.tool, named.reasoning or found.reasoning)
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

    def _parser(self, template: ChatTemplate, request: TurnRequest, prompt_ids: np.ndarray) -> OutputParser:
        formats = self.formats
        if request.tool_choice == "none" or not request.tools:
            formats = dataclasses.replace(formats, tool=None)  # what looks like a call is text then
        in_reasoning = template.starts_in_reasoning(prompt_ids)
        return make_parser(formats, tools=request.tools, starts_in_reasoning=in_reasoning)
