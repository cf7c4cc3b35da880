"""Values of samples as text for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def prompt_text(prompt: Any) -> str:
    """A prompt as one text; of messages one after the other, each with its role."""
    if not isinstance(prompt, list | tuple):
        return value_text(prompt)
    return "\n".join(
        f"{message.get('role')}: {value_text(message.get('content'))}"
        if isinstance(message, Mapping)
        else value_text(message)
        for message in prompt
    )


def value_text(value: Any) -> str:
    """A label, a reward or the like: texts as they are, nothing for None, everything else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def visible(text: str) -> str:
    """`text` without characters that a terminal obeys, or cannot show: these are written as escapes."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1] for character in text
    )
