"""The rollout function of supervised training, under the path that flags and slime plugins use."""

from slime.rollout.sft import generate_rollout

__all__ = ["generate_rollout"]
