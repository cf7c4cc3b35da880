"""The nearest known name for a mistyped one, and one message for all that are not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name most like `name`, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """The end of an error sentence: `: did you mean X?`, or nothing."""
    match = nearest(name, known)
    return f": did you mean {prefix}{match}?" if match else ""


def one_message(sentences: Sequence[str], what: str) -> str:
    """All unknown names of one place at once: a sentence, or a line for each; `what` they are, in the plural."""
    distinct = list(dict.fromkeys(sentences))
    if len(distinct) == 1:
        return distinct[0]
    return "\n".join([f"{len(distinct)} {what} are not known here:", *(f"  {sentence}" for sentence in distinct)])
