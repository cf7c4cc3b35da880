"""Dynamic sampling filters: keep a group when its rewards differ, std > 1e-6 (sample standard deviation, float64).

A group with one reward throughout has advantage 0 everywhere and teaches nothing (DAPO, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.data.sample import Sample
from slime.rollout.filter_hub.base_types import DynamicFilterOutput

LEAST_STD = 1e-6


def check_reward_nonzero_std(args: Any, samples: Sequence[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Drop groups whose rewards are all the same; the reason is ``zero_std_<reward>``."""
    rewards = [float(sample.get_reward_value(args)) for sample in samples if sample.reward is not None]
    if not rewards:
        return DynamicFilterOutput(keep=False, reason="no_reward")
    std = np.std(np.asarray(rewards, dtype=np.float64), ddof=1) if len(rewards) > 1 else 0.0
    if std > LEAST_STD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: Sequence[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """The same, but such a group is kept when the batch could not be filled without asking for more prompts."""
    output = check_reward_nonzero_std(args, samples)
    output.keep_when_insufficient = True
    return output
