"""DAPO's verdict under the path that slime plugins import it from."""

from slime.rollout.rewards.dapo import dapo_reward as compute_score

__all__ = ["compute_score"]
