"""Retries timing-sensitive checks with longer time limits."""

from __future__ import annotations

from collections.abc import Callable


def with_more_time(check: Callable[[float], None], *times: float) -> None:
    """Calls `check` with each of these times in seconds until it passes. The last failure is raised."""
    for seconds in times[:-1]:
        try:
            return check(seconds)
        except AssertionError:
            continue
    return check(times[-1])
