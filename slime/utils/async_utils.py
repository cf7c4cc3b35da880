"""`run`: a coroutine from synchronous plugin code, on the rollout's event loop when there is one."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from slime.rollout.loop import LoopThread
from slime.rollout.runtime import newest_runtime

T = TypeVar("T")


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Run on the loop of the runtime created last, where its connections live; without one, on a loop of its own."""
    runtime = newest_runtime()
    if runtime is not None:
        return runtime.run(coro)
    loop_thread = LoopThread("slime-run")
    try:
        return loop_thread.run(coro)
    finally:
        loop_thread.close()
