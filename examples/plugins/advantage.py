"""Advantages of one's own: the reward on every token, fading towards the start of the response.

--custom-advantage-function-path examples/plugins/advantage.py
"""

import torch


def advantage(args, rollout_data):
    """Set `advantages` and `returns`: one tensor for each sample, one number for each response token."""
    advantages = []
    for reward, length in zip(rollout_data["rewards"], rollout_data["response_lengths"], strict=True):
        tokens_to_go = torch.arange(length - 1, -1, -1, dtype=torch.float32)
        advantages.append(reward * 0.99**tokens_to_go)
    rollout_data["advantages"] = advantages
    rollout_data["returns"] = [values.clone() for values in advantages]
