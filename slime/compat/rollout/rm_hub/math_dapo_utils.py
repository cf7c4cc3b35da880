"""DAPO's verdict under the path that slime plugins import it from."""

from slime.rollout.rewards.math import dapo_reward as compute_score
from slime.rollout.rewards.math import normalize_final_answer

__all__ = ["compute_score", "normalize_final_answer"]
