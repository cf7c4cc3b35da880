"""On-policy distillation under the path that flags name it by."""

from slime.rollout.distillation import post_process_rewards, reward_func

__all__ = ["post_process_rewards", "reward_func"]
