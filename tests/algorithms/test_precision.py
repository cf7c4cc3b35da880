"""Algorithms return the dtype of their inputs, float32 or float64."""

from __future__ import annotations

import pytest
import torch

from slime.algorithms.advantages import (
    EstimatorInputs,
    gae,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    subtract_reverse_kl,
)
from slime.algorithms.importance import importance_weights, rejection_mask
from slime.algorithms.policy_loss import (
    KL_TYPES,
    approximate_kl,
    cispo_loss,
    clipped_policy_loss,
    clipped_value_loss,
    off_policy_sequence_mask,
    sequence_log_ratio,
)
from slime.algorithms.reduce import masked_means, segment_sums, spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", [torch.tensor([1, 0, 1]), torch.tensor([1.0, 0.0, 1.0])], ids=["int", "float"])
def test_input_dtype_is_preserved(dtype, mask) -> None:
    x, y, lengths = torch.tensor([-1.0, -2.0, -0.5], dtype=dtype), torch.tensor([-1.5, -1.0, -0.7], dtype=dtype), [2, 1]
    weights = importance_weights(x, y, mask, lengths, level="sequence", mode="clip", lower=0.5, upper=2.0)
    found = [
        segment_sums(x, lengths),
        masked_means(x, mask, lengths),
        spread(x[:2], lengths),
        *clipped_policy_loss(x, y, eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=3.0),
        *cispo_loss(x, y, x, eps_clip=1.0, eps_clip_high=0.2),
        sequence_log_ratio(x, y, mask, lengths),
        off_policy_sequence_mask(x, y, x, mask, lengths, delta=0.1),
        *(approximate_kl(x, y, kind, ratio=(x - y).exp()) for kind in KL_TYPES),
        weights.weights,
        weights.ratio,
        weights.out_of_bounds,
        rejection_mask(x, y, mask, lengths, level="geometric", lower=0.5, upper=2.0, veto_threshold=0.1),
        *clipped_value_loss(x, y, x, value_clip=0.2),
        *gae(x, y, mask, gamma=0.9, lambd=0.9),
        *reinforce_plus_plus_advantages(EstimatorInputs([1.0], [mask], [x], kl_coef=0.1, gamma=0.9))[0],
        *reinforce_plus_plus_baseline_advantages(EstimatorInputs([1.0], [mask], [x], kl_coef=0.1))[0],
        *subtract_reverse_kl([x], [y], [x], 0.5),
    ]
    assert {values.dtype for values in found} == {dtype}
