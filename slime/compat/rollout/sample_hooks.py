"""Sample hooks under the path that slime plugins import them from."""

from slime.rollout.sglang_rollout import apply_rollout_sample_hooks

__all__ = ["apply_rollout_sample_hooks"]
