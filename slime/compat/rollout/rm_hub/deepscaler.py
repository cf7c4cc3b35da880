"""DeepScaleR's verdict under the path that slime plugins import it from."""

from slime.rollout.rewards.math import deepscaler_blocking as get_deepscaler_rule_based_reward

__all__ = ["get_deepscaler_rule_based_reward"]
