"""Mathematical answers under the path that slime plugins import them from."""

from slime.rollout.rewards.answers import last_boxed as extract_answer
from slime.rollout.rewards.answers import last_boxed as extract_boxed_answer
from slime.rollout.rewards.blocking import boxed_answer_is as grade_answer_verl

__all__ = ["extract_answer", "extract_boxed_answer", "grade_answer_verl"]
