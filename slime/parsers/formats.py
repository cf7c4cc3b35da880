"""Which formats a model writes, and the parser for them.

The names are SGLang's (`--tool-call-parser`, `--reasoning-parser`), all of its names for a format included.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.errors import UserError
from slime.parsers.answer import AnswerParser
from slime.parsers.calls import ToolFormat
from slime.parsers.events import OutputParser
from slime.parsers.hermes import Hermes
from slime.parsers.qwen3_coder import Qwen3Coder
from slime.parsers.reasoning import THINK

Tools = Sequence[Mapping[str, Any]]

_TOOL_FORMATS: dict[str, Callable[[Tools], ToolFormat]] = {
    **dict.fromkeys(("hermes", "qwen", "qwen25"), lambda tools: Hermes()),
    **dict.fromkeys(("qwen3_coder", "nanbeige", "step3p5"), Qwen3Coder),
}
TOOL_CALL_PARSERS = tuple(sorted(_TOOL_FORMATS))
REASONING_PARSERS = tuple(sorted(THINK))


@dataclass(frozen=True)
class Formats:
    """How a model writes tool calls and reasoning, by SGLang's names; None where they are to stay in the text."""

    tool: str | None = None
    reasoning: str | None = None

    def check(self) -> None:
        """Refuse names that nobody knows."""
        for name, known, flag in (
            (self.tool, TOOL_CALL_PARSERS, "tool-call-parser"),
            (self.reasoning, REASONING_PARSERS, "reasoning-parser"),
        ):
            if name is not None and name not in known:
                raise UserError(f"{flag} {name}: there is none of this name; choose one of {', '.join(known)}")


def formats_of(chat_template: str) -> Formats:
    """The formats that a chat template writes, by its text."""
    tool = next((name for name, marks in _TOOL_SIGNS if all(mark in chat_template for mark in marks)), None)
    return Formats(tool, _reasoning_of(chat_template, tool))


_TOOL_SIGNS = (
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
)
"""Of each format what its templates have in them; the first that fits, so the special before the general."""


def _reasoning_of(chat_template: str, tool: str | None) -> str | None:
    if "</think>" in chat_template:
        return "qwen3"
    return None


def make_parser(
    formats: Formats,
    *,
    tools: Tools = (),
    starts_in_reasoning: bool = False,
    ids: Callable[[], str] | None = None,
) -> OutputParser:
    """A parser for one answer.

    `tools` are function schemas in OpenAI's form, by which values without quotes get their types.
    `starts_in_reasoning`: the prompt ends inside of a think block. Without a tool format calls stay in the text, and
    without one for reasoning so does that.
    """
    formats.check()
    tool = _TOOL_FORMATS[formats.tool](tools) if formats.tool is not None else ToolFormat()
    think = THINK[formats.reasoning] if formats.reasoning is not None else None
    thinking = think is not None and (starts_in_reasoning or think.always)
    return AnswerParser(tool, think, thinking=thinking, ids=ids or call_id)


def call_id() -> str:
    """A new id: unique, and not to be guessed."""
    return f"call_{secrets.token_hex(12)}"
