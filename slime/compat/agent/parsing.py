"""Parses a complete model response, under upstream slime's name.

New code feeds a response to `slime.models.parsers` while it is generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.models.parsers.events import gathered
from slime.models.parsers.formats import Formats, make_parser


@dataclass
class ParsedModelOutput:
    """A parsed response. `tool_uses` have `id`, `name` and, as a mapping, `input`, like the blocks of Anthropic's API.

    A response with a call that cannot be parsed is `ill_formed`, and that call stays in its text.
    """

    reasoning: str = ""
    text: str = ""
    tool_uses: list[dict[str, Any]] = field(default_factory=list)
    ill_formed: bool = False


def parse_model_output(
    text: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> ParsedModelOutput:
    """Parse a response with special tokens, by SGLang's format names; parts without a format stay in the text."""
    parser = make_parser(Formats(tool_parser, reasoning_parser), tools=tools or ())
    output = gathered([*parser.feed(text), *parser.end()])
    uses = [{"id": call.id, "name": call.name, "input": json.loads(call.arguments)} for call in output.calls]
    return ParsedModelOutput(output.reasoning or "", output.text, uses, output.ill_formed)
