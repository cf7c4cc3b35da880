"""Upstream slime's name for reading a whole answer of a model; new code feeds `slime.models.parsers` as the answer comes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.models.parsers.events import gathered
from slime.models.parsers.formats import Formats, make_parser


@dataclass
class ParsedModelOutput:
    """What a model said. `tool_uses` have `id`, `name` and, as a mapping, `input`, like the blocks of Anthropic's API.

    An answer with a call that cannot be read is `ill_formed`, and that call is in its text.
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
    """Read an answer, special tokens included, by SGLang's names of its formats; what has no name stays in the text."""
    parser = make_parser(Formats(tool_parser, reasoning_parser), tools=tools or ())
    output = gathered([*parser.feed(text), *parser.end()])
    uses = [{"id": call.id, "name": call.name, "input": json.loads(call.arguments)} for call in output.calls]
    return ParsedModelOutput(output.reasoning or "", output.text, uses, output.ill_formed)
