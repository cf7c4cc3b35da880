"""exp of a log-ratio that can always be differentiated.

Invariant: the ratio is finite in float32. An infinite one would turn the zero gradient of a clipped or masked token
into nan (0 * inf); log-ratios above MAX_LOG_RATIO are therefore read as MAX_LOG_RATIO.
"""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 80.0


def finite_ratio(log_ratio: Tensor) -> Tensor:
    """exp(min(log_ratio, 80)); exp(80) is 5.5e34, float32 ends at 3.4e38."""
    return log_ratio.clamp_max(MAX_LOG_RATIO).exp()
