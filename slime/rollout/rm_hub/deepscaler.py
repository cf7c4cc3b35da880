"""DeepScaleR's verdict under the path that slime plugins import it from, for code without `await`."""

from __future__ import annotations

from typing import Any

from slime.rollout.rewards.blocking import judge_blocking
from slime.rollout.rewards.deepscaler import deepscaler_reward

__all__ = ["get_deepscaler_rule_based_reward"]


def get_deepscaler_rule_based_reward(response: str, label: Any) -> float:
    """1.0 when the boxed answer after the thinking is the label, else 0.0."""
    return judge_blocking(lambda verifier: deepscaler_reward(verifier, response, label))
