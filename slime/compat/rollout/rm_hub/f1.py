"""Word overlap under the path that slime plugins import it from."""

from slime.rollout.rewards.simple import f1_score
from slime.rollout.rewards.simple import normalized as normalize_answer

__all__ = ["f1_score", "normalize_answer"]
