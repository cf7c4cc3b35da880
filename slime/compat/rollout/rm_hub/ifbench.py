"""Instruction-following reward (IFBench), under the import path of slime plugins."""

from slime.rollout.rewards.ifbench import ifbench_reward as compute_ifbench_reward

__all__ = ["compute_ifbench_reward"]
