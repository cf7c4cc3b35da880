"""One ratio a sequence.

GSPO (Zheng et al. 2025, "Group Sequence Policy Optimization", eq. 7): the ratio of every token of sequence i is
    s_i = exp(1 / |y_i| * sum_t (log pi(y_t) - log pi_old(y_t)))        over its unmasked tokens
and goes through the clipped surrogate as a token's ratio would. The gradient flows through the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slime.algorithms.segments import masked_means, spread


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """[R]: log s_i at every token of sequence i; 0 for a sequence that is masked as a whole."""
    return spread(masked_means(log_probs - old_log_probs, mask, lengths), lengths)
