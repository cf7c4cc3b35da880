"""Registry of tool-call and reasoning formats, their detection from a chat template, and the parser for them.

The names are SGLang's (`--tool-call-parser`, `--reasoning-parser`), including all its aliases of a format.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slime.errors import UserError
from slime.models.parsers.calls import ToolFormat
from slime.models.parsers.events import OutputParser
from slime.models.parsers.harmony import HarmonyParser, harmony_opening
from slime.models.parsers.json_calls import DeepSeekV3, DeepSeekV31, Hermes, KimiK2, Llama3, Mistral
from slime.models.parsers.output import REASONING_FORMATS, AnswerParser
from slime.models.parsers.pythonic import Pythonic
from slime.models.parsers.xml_calls import Dsml, Glm45, Invoke, Qwen3Coder
from slime.storage.json_types import JsonMapping

Tools = Sequence[JsonMapping]

_TOOL_FORMATS: dict[str, Callable[[Tools], ToolFormat]] = {
    **dict.fromkeys(("hermes", "qwen", "qwen25"), Hermes),
    **dict.fromkeys(("qwen3_coder", "nanbeige", "step3p5"), Qwen3Coder),
    **dict.fromkeys(("glm", "glm45", "glm47"), Glm45),
    "deepseekv3": DeepSeekV3,
    "deepseekv31": DeepSeekV31,
    "deepseekv32": Dsml,
    "kimi_k2": KimiK2,
    "llama3": Llama3,
    "minimax-m2": Invoke,
    "mistral": Mistral,
    "pythonic": Pythonic,
}
HARMONY = "gpt-oss"
TOOL_CALL_PARSERS = tuple(sorted([*_TOOL_FORMATS, HARMONY]))
REASONING_PARSERS = tuple(sorted([*REASONING_FORMATS, HARMONY]))


@dataclass(frozen=True)
class Formats:
    """A model's formats of tool calls and reasoning, by SGLang's names; None leaves them in the text."""

    tool: str | None = None
    reasoning: str | None = None

    def check(self) -> None:
        """Raise UserError for an unknown name."""
        for name, known, flag in (
            (self.tool, TOOL_CALL_PARSERS, "tool-call-parser"),
            (self.reasoning, REASONING_PARSERS, "reasoning-parser"),
        ):
            if name is not None and name not in known:
                raise UserError(f"{flag} {name}: unknown name; choose one of {', '.join(known)}")


def detect_formats(chat_template: str) -> Formats:
    """Detect the formats that a chat template writes, by the marks in its text."""
    tool = next((name for name, marks in _TOOL_MARKS if all(mark in chat_template for mark in marks)), None)
    if tool == HARMONY:
        return Formats(tool, HARMONY)
    reasoning = next((name for name, mark in _REASONING_MARKS if mark in chat_template), None)
    if reasoning == "deepseek-v3" and "think>" not in chat_template:
        return Formats(tool, None)
    if reasoning == "qwen3":
        reasoning = {"glm45": "glm45", "kimi_k2": "kimi_k2"}.get(tool or "", reasoning)
    return Formats(tool, reasoning)


def formats_from_flags(carried: JsonMapping) -> Formats:
    """The formats that a run's SGLang flags name; a name that only SGLang knows is ignored here and applies to its
    servers only."""
    tool, reasoning = carried.get("sglang_tool_call_parser"), carried.get("sglang_reasoning_parser")
    return Formats(
        tool if tool in TOOL_CALL_PARSERS else None,
        reasoning if reasoning in REASONING_PARSERS else None,
    )


_TOOL_MARKS = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseekv32", ("<｜DSML｜",)),
    ("deepseekv3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseekv31", ("<｜tool▁calls▁begin｜>",)),
    ("minimax-m2", ("<minimax:tool_call>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3", ('"parameters": dictionary',)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ('{"name": "', '"parameters": ')),
    ("pythonic", ("<|python_start|>",)),
)
"""Marks that identify the templates of each format. The first match wins, so specific formats precede general ones."""


_REASONING_MARKS = (
    ("kimi", "◁think▷"),
    ("mistral", "[THINK]"),
    ("deepseek-r1", "<｜Assistant｜><think>"),
    ("deepseek-v3", "<｜Assistant｜>"),
    ("qwen3", "</think>"),
    ("qwen3", "<think>"),
)


def make_parser(
    formats: Formats,
    *,
    tools: Tools = (),
    starts_in_reasoning: bool = False,
    ids: Callable[[], str] | None = None,
) -> OutputParser:
    """Create a parser for one answer.

    `tools` are function schemas in OpenAI's form, which give values without quotes their types.
    `starts_in_reasoning`: the prompt ends inside a think block. Without a tool format calls stay in the text; without a
    reasoning format reasoning does.
    """
    formats.check()
    if HARMONY in (formats.tool, formats.reasoning):
        return HarmonyParser(reads_calls=formats.tool is not None, ids=ids or call_id)
    tool = _TOOL_FORMATS[formats.tool](tools) if formats.tool is not None else ToolFormat(())
    think = REASONING_FORMATS[formats.reasoning] if formats.reasoning is not None else None
    thinking = think is not None and (starts_in_reasoning or think.always)
    return AnswerParser(tool, think, thinking=thinking, ids=ids or call_id)


def opens_reasoning(formats: Formats, prompt: str) -> bool:
    """True if a prompt ends inside a think block."""
    think = REASONING_FORMATS.get(formats.reasoning or "")
    return think is not None and prompt.rstrip().endswith(think.begin)


def call_opening(formats: Formats, name: str | None, *, starts_in_reasoning: bool) -> str:
    """The text which, at the end of a prompt, makes the model call the tool with this name, or any tool for None.

    It closes the think block of an answer that would begin with reasoning.
    """
    formats.check()
    if formats.tool is None:
        raise ValueError("there is no tool format")
    if formats.tool == HARMONY:
        return harmony_opening(name)
    think = REASONING_FORMATS.get(formats.reasoning or "")
    is_thinking = think is not None and (starts_in_reasoning or think.always)
    ends = f"\n{think.end}\n\n" if think is not None and is_thinking else ""
    return ends + _TOOL_FORMATS[formats.tool](()).opening(name)


def call_id() -> str:
    """A new call id: unique and unguessable."""
    return f"call_{secrets.token_hex(12)}"
