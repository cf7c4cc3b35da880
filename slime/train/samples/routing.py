"""Which experts the tokens of a packed row go to, in every pass that repeats it.

Invariant: what is known of a token's experts is never overwritten by a later pass: an engine's choice, or the router's
own in the first pass over the row. Where nothing is known (the last token of a sequence, what follows the last sampled
token, padding) the router chooses each time; no token that is trained on depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

UNKNOWN = -1


class Routing:
    """Of one micro-batch. `given`: [T, layers, experts per token], int16, on the host, `UNKNOWN` where nothing is.

    None where the first pass decides, which leaves `recorded`: [t, experts per token] of this rank's tokens, by layer.
    `counted` are the choices of routers that were compared with what they had to do, and those that differed. No
    dataclass: FSDP hands a module copies of those, and what a pass records would be lost with them.
    """

    def __init__(self, given: Tensor | None = None) -> None:
        self.given = given
        self.recorded: dict[int, Tensor] = {}
        self.counted: Tensor | None = None

    def forget(self) -> None:
        """The next pass decides; what was given stays."""
        self.recorded = {}

    def count(self, own: Tensor, chosen: Tensor) -> None:
        """`own`: what routers would have chosen for the tokens of a layer, `chosen`: [t, k] what they had to."""
        known = (chosen >= 0).sum()
        differing = ((own[:, None, :] != chosen[:, :, None]).all(-1) & (chosen >= 0)).sum()
        found = torch.stack([known, differing]).to(torch.float64)
        self.counted = found if self.counted is None else self.counted + found


def given_experts(rows: Sequence[np.ndarray], lengths: Sequence[int], num_tokens: int) -> Tensor:
    """[num_tokens, layers, k] of sequences of these lengths side by side, each with its rows of the first tokens."""
    shape = rows[0].shape[1:]
    experts = np.full((num_tokens, *shape), UNKNOWN, dtype=np.int16)
    begin = 0
    for own, length in zip(rows, lengths, strict=True):
        experts[begin : begin + len(own)] = own
        begin += length
    return torch.from_numpy(experts)


def mismatch(routings: Sequence[Routing], device: torch.device) -> Tensor:
    """[2]: choices that were compared, and those that differed, since the last call."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for routing in routings:
        if routing.counted is not None:
            total += routing.counted
            routing.counted = None
    return total
