"""Fully asynchronous generation, under the path that flags and slime plugins use."""

from slime.rollout.sglang_rollout import generate_rollout_fully_async

__all__ = ["generate_rollout_fully_async"]
