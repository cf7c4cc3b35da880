"""`--rm-type deepscaler`: the boxed answer after the thinking, 1.0 or 0.0; a response that never ended its thinking
(no `</think>`, no `###Response`) has no answer."""

from __future__ import annotations

from typing import Any

from slime.rollout.rewards.answers import last_boxed
from slime.rollout.rewards.math import MathVerifier

_END_OF_THINKING = ("</think>", "###Response")


async def deepscaler_reward(verifier: MathVerifier, response: str, label: Any) -> float:
    """Judge the last boxed answer that follows the end of thinking."""
    for marker in _END_OF_THINKING:
        if marker in response:
            answer = last_boxed(response.rpartition(marker)[2])
            return 0.0 if answer is None else await verifier.grade_answer(answer, label)
    return 0.0
