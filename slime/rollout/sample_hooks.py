"""Sample hooks under the path that slime plugins import them from."""

from slime.rollout.functions import apply_rollout_sample_hooks

__all__ = ["apply_rollout_sample_hooks"]
