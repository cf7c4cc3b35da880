"""Word overlap under the path that slime plugins import it from."""

from slime.rollout.rewards.f1 import f1_score

__all__ = ["f1_score"]
