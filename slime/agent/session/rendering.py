"""A chat template as a function from messages to text, and the one way in which it says no."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from slime.agent.session.limits import Refused
from slime.errors import UserError

NO_TEMPLATE = "the model's tokenizer has no chat template: add chat_template.jinja to its folder"
_OURS = ("conversation", "messages", "tools", "chat_template", "return_dict", "continue_final_message")
_SET_HERE = ("add_generation_prompt", "tokenize")
_RAISED = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class TemplateRefused(Refused):
    """The chat template does not take this conversation; one sentence."""


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
