"""The nearest known name for a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name most like `name`, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """The end of an error sentence: `: did you mean X?`, or nothing."""
    match = nearest(name, known)
    return f": did you mean {prefix}{match}?" if match else ""
