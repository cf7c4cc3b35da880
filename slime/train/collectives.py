"""Collectives that gradients go through.

Invariant: the backward of each gives a rank the gradient of what the rank put in, for a loss that all ranks compute
alike. So parameters get on each rank the gradient of its own part, and the sum over ranks is that of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from slime.train.topology import Ranks


def exchange(blocks: Tensor, ranks: Ranks) -> Tensor:
    """[n, ...] to [n, ...]: block r goes to rank r, and block r of the result came from it (an all-to-all)."""
    exchanged: Tensor = _Exchange.apply(blocks, ranks)
    return exchanged


def gather_parts(own: Tensor, counts: Sequence[int], ranks: Ranks) -> Tensor:
    """The rows of all ranks in their order, on every rank; rank r brings `counts[r]` of them, which all ranks know."""
    if ranks.size == 1:
        return own
    whole: Tensor = _GatherParts.apply(own, tuple(counts), ranks)
    return whole


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _all_to_all(blocks, ranks)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(upstream[0], ctx.ranks), None


def _all_to_all(blocks: Tensor, ranks: Ranks) -> Tensor:
    sent = blocks.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks.group)
    return received


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: tuple[int, ...], ranks: Ranks) -> Tensor:
        begin = sum(counts[: ranks.rank])
        ctx.own = slice(begin, begin + counts[ranks.rank])
        longest = max(counts)
        sent = pad(own, (0, 0) * (own.dim() - 1) + (0, longest - len(own))).contiguous()
        received = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(received, sent, group=ranks.group)
        return torch.cat([block[:count] for block, count in zip(received, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        return upstream[0][ctx.own], None, None
