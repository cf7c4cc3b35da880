"""The table of chat templates in docs/agents.md matches the probe.

`python -m tests.agent.test_template_page` writes the table.
"""

from __future__ import annotations

import re
from pathlib import Path

from slime.agent.messages import Message
from slime.agent.session.template import ChatTemplate
from slime.agent.session.template_probe import TurnEndStyle
from tests.agent.families import FAMILIES, family_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
_TABLE = re.compile(r"(<!-- made by [^>]* -->\n).*?(<!-- end -->)", re.DOTALL)
_HEAD = "| template | turn ends with | tool results | later system message | calls | earlier turns |\n"
NAMES = {
    "qwen2_5": "Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_instruct": "Qwen3 Instruct 2507",
    "qwen3_coder": "Qwen3 Coder",
    "qwen3_5": "Qwen3.5",
    "llama3_1": "Llama 3.1",
    "glm4": "GLM-4",
    "glm4_5": "GLM-4.5",
    "deepseek_v3": "DeepSeek V3",
    "kimi_k2": "Kimi K2",
    "gpt_oss": "gpt-oss",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
    "nemotron": "Nemotron 3",
    "mistral": "Mistral",
    "plain": "plain text",
}


def row(family: str) -> str:
    template = ChatTemplate(family_tokenizer(family))
    shape, ending = template.shape, template.ending
    tokens = ", ".join(f"`{token}`".replace("|", "\\|") for token in ending.stops)
    ends = f"{tokens} (of the next turn)" if ending.way is TurnEndStyle.OPENED else tokens or "no token"
    cells = [
        NAMES[family],
        ends,
        "native" if shape.tools else "user message",
        "native" if shape.system_anywhere else "reminder",
        calls(template),
        "kept" if keeps_history(template, family) else "rewritten",
    ]
    return f"| {' | '.join(cells)} |\n"


def calls(template: ChatTemplate) -> str:
    shape = template.shape
    if not shape.calls:
        return "text"
    arguments = "mapping" if shape.mapped_arguments else "JSON text"
    return (
        arguments
        + ("" if shape.parallel_calls else ", one per turn")
        + ("" if shape.any_call_id else ", 9-character ids")
    )


def keeps_history(template: ChatTemplate, family: str) -> bool:
    """Return true if another question leaves the rendering unchanged up to the end of the turn."""
    said = [Message("system", "S"), Message("user", "Q"), Message("assistant", "A", "because")]
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    render = family_tokenizer(family).apply_chat_template
    short = render(template.shape.of(said), tools=tools, tokenize=False)
    ends = [short.rfind(token) + len(token) for token in template.ending.cuts if token in short]
    until = short[: max(ends)] if template.ending.way is TurnEndStyle.CLOSED else short
    return bool(
        render(template.shape.of([*said, Message("user", "Q2")]), tools=tools, tokenize=False).startswith(until)
    )


def page() -> str:
    table = _HEAD + "|---" * 6 + "|\n" + "".join(map(row, NAMES))
    return _TABLE.sub(lambda match: match[1] + table + match[2], PAGE.read_text())


def test_table_on_the_page_matches_the_probe() -> None:
    assert page() == PAGE.read_text()


def test_every_unsimplified_family_has_a_name() -> None:
    assert set(FAMILIES) - set(NAMES) == {"deepseek_r1", "llama3", "marked"}  # simplified, for other tests


if __name__ == "__main__":
    PAGE.write_text(page())
