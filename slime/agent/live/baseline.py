"""Rewards of answers to different questions, less what the others of the batch got.

Live traffic has one answer a prompt, so there is no group to compare with. The other exchanges of the batch are the
group: `r_i = R_i - mean_{j != i} R_j`. The baseline of an answer does not depend on that answer, so the gradient stays
unbiased; it has no state, so a run that is killed and resumed has the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.data.sample import Sample


def traffic_baseline(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """`--custom-reward-post-process-path`: (raw rewards, rewards); a sample that failed has 0 and no say."""
    raw = [0.0 if _failed(sample) else float(sample.get_reward_value(args)) for sample in samples]
    counted = [value for value, sample in zip(raw, samples, strict=True) if not _failed(sample)]
    total, others = sum(counted), len(counted) - 1
    if others < 1:
        return raw, [0.0] * len(raw)
    return raw, [
        0.0 if _failed(sample) else value - (total - value) / others for value, sample in zip(raw, samples, strict=True)
    ]


def _failed(sample: Sample) -> bool:
    return sample.status is Sample.Status.FAILED or sample.reward is None or sample.remove_sample
