"""Verdicts of the math verifier for code without `await`, wherever it runs: on an event loop's thread too.

One verifier serves all such calls of a process, so that its workers start once; they end with the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from slime.rollout.rewards.answers import last_boxed
from slime.rollout.rewards.deepscaler import deepscaler_reward
from slime.rollout.rewards.math import MathVerifier


def deepscaler_blocking(response: str, label: Any) -> float:
    """1.0 when the boxed answer after the thinking is the label, else 0.0."""
    return _judged(lambda verifier: deepscaler_reward(verifier, response, label))


def boxed_answer_is(solution_str: str, ground_truth: Any) -> bool:
    r"""Whether the last `\boxed{}` of the solution means the same as the ground truth; an empty one is never met."""
    answer = last_boxed(solution_str)
    return answer is not None and ground_truth not in (None, "") and answer_is(answer, ground_truth)


def answer_is(given_answer: str | None, ground_truth: Any) -> bool:
    """Whether an answer that was extracted already means the same as the ground truth."""
    if given_answer is None:
        return False
    return _judged(lambda verifier: verifier.grade_answer(given_answer, ground_truth)) == 1.0


def _judged(ask: Callable[[MathVerifier], Coroutine[Any, Any, float]]) -> float:
    """Wait for what `ask` asks of the verifier; the calling thread does nothing else meanwhile."""
    with ThreadPoolExecutor(1, thread_name_prefix="reward-blocking") as thread:
        return thread.submit(asyncio.run, ask(_shared_verifier())).result()


@cache
def _shared_verifier() -> MathVerifier:
    return MathVerifier()
