"""Sample hooks, under the import path of slime plugins."""

from slime.rollout.sglang_rollout import apply_rollout_sample_hooks

__all__ = ["apply_rollout_sample_hooks"]
