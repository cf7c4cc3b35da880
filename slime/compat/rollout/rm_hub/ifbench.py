"""Instruction following under the path that slime plugins import it from."""

from slime.rollout.rewards.ifbench import ifbench_reward as compute_ifbench_reward

__all__ = ["compute_ifbench_reward"]
