"""DAPO's reward, under the import path of slime plugins."""

from slime.rollout.rewards.math import dapo_reward as compute_score
from slime.rollout.rewards.math import normalize_final_answer

__all__ = ["compute_score", "normalize_final_answer"]
