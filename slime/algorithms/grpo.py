"""From one reward per sample to one advantage per response token.

GRPO with outcome supervision (Shao et al. 2024, "DeepSeekMath"), and all that share it (Dr. GRPO, DAPO, GSPO, CISPO,
RLOO): A_t = r for every token of the response.
Invariant: the result has exactly the length of each response; masked tokens keep a value and are dropped by the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def grpo_advantages(rewards: Sequence[float], response_lengths: Sequence[int]) -> list[Tensor]:
    return [
        torch.full((length,), reward, dtype=torch.float32)
        for reward, length in zip(rewards, response_lengths, strict=True)
    ]
