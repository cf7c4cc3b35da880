"""`--rm-type deepscaler`: the boxed answer after the thinking, 1.0 or 0.0; a response that never ended its thinking
(no `</think>`, no `###Response`) has no answer. What follows the last `</think>` counts, or what stands between the
first `###Response` and the next."""

from __future__ import annotations

from typing import Any

from slime.rollout.rewards.answers import last_boxed
from slime.rollout.rewards.math import MathVerifier

_END_OF_THINKING = "</think>"
_RESPONSE = "###Response"


async def deepscaler_reward(verifier: MathVerifier, response: str, label: Any) -> float:
    """Judge the last boxed answer that follows the end of thinking."""
    if _END_OF_THINKING in response:
        solution = response.rpartition(_END_OF_THINKING)[2]
    elif _RESPONSE in response:
        solution = response.split(_RESPONSE)[1]
    else:
        return 0.0
    answer = last_boxed(solution)
    return 0.0 if answer is None or label == "" else await verifier.grade_answer(answer, label)
