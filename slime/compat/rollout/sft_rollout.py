"""Supervised training's rollout function under the path that flags and slime plugins name it by."""

from slime.rollout.sft import generate_rollout

__all__ = ["generate_rollout"]
