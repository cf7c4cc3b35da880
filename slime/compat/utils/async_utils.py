"""Runs coroutines from synchronous plugin code, on the rollout's event loop if there is one."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

from slime.rollout.event_loop import LoopThread as AsyncLoopThread
from slime.rollout.runtime import newest_runtime

__all__ = ["AsyncLoopThread", "get_async_loop", "run"]

T = TypeVar("T")


def get_async_loop() -> AsyncLoopThread:
    """Return the loop thread of the newest runtime, which owns its connections; else the process's own (`.loop`)."""
    runtime = newest_runtime()
    return _own_loop() if runtime is None else runtime.loop_thread


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on that loop and wait for the result."""
    return get_async_loop().run(coro)


@cache
def _own_loop() -> AsyncLoopThread:
    return AsyncLoopThread("slime-run")
