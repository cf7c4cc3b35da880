"""Finding the answer in a response and reading plain numbers; text in, text out, nothing evaluated."""

from __future__ import annotations

import re
from fractions import Fraction

_BRACES = re.compile(r"(?P<boxed>\\f?boxed\s*\{)|\\boxed\s+(?P<bare>[^\s${}]+)|\\.|[{}]", re.DOTALL)
_LONGEST_NUMBER = 1000
_NUMBER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:(?:,|\{,\}|\\,|\\ | )\d{3})+)(?:\.\d*)?|[+-]?\.\d+")
_GROUPING = re.compile(r"\{,\}|\\,|\\ |[, ]")
_END_OF_THINKING = "</think>"


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` (or `\fboxed{...}`, or `\boxed 5`); None without one.

    One pass, whatever the text: models that fail like to repeat an opening brace thousands of times.
    """
    last_start, content = -1, None
    open_braces: list[tuple[bool, int]] = []
    for match in _BRACES.finditer(text):
        if match["boxed"]:
            open_braces.append((True, match.end()))
        elif match["bare"]:
            last_start, content = match.start("bare"), match["bare"]
        elif match[0] == "{":
            open_braces.append((False, match.end()))
        elif match[0] == "}" and open_braces:
            is_boxed, start = open_braces.pop()
            if is_boxed and start > last_start:
                last_start, content = start, text[start : match.start()].strip()
    return content


def marked_answer(label: str) -> str:
    """The answer of a label that shows its working: what follows the last `####`, as in GSM8K; else the whole label."""
    return label.rpartition("####")[2].strip()


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; the whole text without one."""
    return text.rpartition(_END_OF_THINKING)[2]


def plain_number(text: str) -> Fraction | None:
    """The exact value of an integer or decimal as people write them (`-1,234.50`, `$7`, `1{,}000`), else None."""
    bare = text.strip().strip("$").strip().removeprefix("\\$").rstrip(".").strip()
    if len(bare) > _LONGEST_NUMBER or not _NUMBER.fullmatch(bare):
        return None
    return Fraction(_GROUPING.sub("", bare))
