"""For tests in which a short time has to pass, and in which other things happen under the same limit."""

from __future__ import annotations

from collections.abc import Callable


def with_more_time(check: Callable[[float], None], *times: float) -> None:
    """Check with the first of these times, in seconds, with which it holds; what the last one says counts."""
    for seconds in times[:-1]:
        try:
            return check(seconds)
        except AssertionError:
            continue
    return check(times[-1])
