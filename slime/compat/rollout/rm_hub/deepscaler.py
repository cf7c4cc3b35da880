"""DeepScaleR's reward, under the import path of slime plugins."""

from slime.rollout.rewards.math import deepscaler_blocking as get_deepscaler_rule_based_reward

__all__ = ["get_deepscaler_rule_based_reward"]
