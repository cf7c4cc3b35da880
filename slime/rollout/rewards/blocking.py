"""Verdicts of the math verifier for synchronous code, wherever it runs: on an event loop's thread too.

One verifier serves all such calls of a process, so that its workers start once; they end with the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from slime.rollout.rewards.math import MathVerifier


def judge_blocking(ask: Callable[[MathVerifier], Coroutine[Any, Any, float]]) -> float:
    """Wait for what `ask` asks of the verifier; the calling thread does nothing else meanwhile."""
    with ThreadPoolExecutor(1, thread_name_prefix="reward-blocking") as thread:
        return thread.submit(asyncio.run, ask(_shared_verifier())).result()


@cache
def _shared_verifier() -> MathVerifier:
    return MathVerifier()
