"""Mathematical answers under the path that slime plugins import them from."""

from slime.rollout.rewards.answers import last_boxed
from slime.rollout.rewards.blocking import answer_is as grade_answer_mathd
from slime.rollout.rewards.blocking import answer_is as grade_answer_sympy
from slime.rollout.rewards.blocking import boxed_answer_is as grade_answer_verl

__all__ = ["extract_answer", "extract_boxed_answer", "grade_answer_mathd", "grade_answer_sympy", "grade_answer_verl"]


def extract_answer(passage: str) -> str | None:
    r"""The content of the last `\boxed{}`; None without one."""
    return last_boxed(passage)


def extract_boxed_answer(solution: str) -> str | None:
    r"""The content of the last `\boxed{}`; None without one."""
    return last_boxed(solution)
