"""Mathematical answers under the path that slime plugins import them from, for code without `await`."""

from __future__ import annotations

from typing import Any

from slime.rollout.rewards.answers import last_boxed as extract_boxed_answer
from slime.rollout.rewards.blocking import judge_blocking

__all__ = ["extract_answer", "extract_boxed_answer", "grade_answer_verl"]

extract_answer = extract_boxed_answer


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    r"""Whether the last `\boxed{}` of the solution means the same as the ground truth."""
    answer = extract_boxed_answer(solution_str)
    return answer is not None and judge_blocking(lambda verifier: verifier.grade_answer(answer, ground_truth)) == 1.0
