"""Conversions between computed tokens and all tokens of a row with shared prompts (`SharedPrompts`), with gradients.

Invariant: the gradients of a token's copies are added up in the order of the row, in float32, so results are
reproducible between runs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from slime.train.samples.packing import SharedPrompts


def expand_to_row(computed: Tensor, shared: SharedPrompts) -> Tensor:
    """Copy computed tokens [t, ...] to all tokens of the row [T, ...]."""
    return cast(Tensor, _Spread.apply(computed, shared))


def select_first_copies(states: Tensor, shared: SharedPrompts) -> Tensor:
    """Select the first of each token's copies, which are equal: [T, ...] to [t, ...]. The others get no gradient."""
    return cast(Tensor, _TakeFirst.apply(states, shared))


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, computed: Tensor, shared: SharedPrompts) -> Tensor:
        ctx.shared = shared
        return computed.index_select(0, shared.place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return sum_of_copies(grads[0], ctx.shared), None


class _TakeFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, shared: SharedPrompts) -> Tensor:
        ctx.shared = shared
        return states.index_select(0, shared.first)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return to_first_copies(grads[0], ctx.shared), None


def sum_of_copies(grad: Tensor, shared: SharedPrompts) -> Tensor:
    """Sum over the copies of each computed token: [T, ...] to [t, ...]."""
    if grad.is_cuda:
        from slime.train.backends.fsdp.fused.kernels import add_copies  # imports Triton, needed only on a GPU

        return add_copies(grad, shared.copies, shared.starts)
    total = torch.zeros(len(shared.first), *grad.shape[1:], dtype=torch.float32)
    return total.index_add_(0, shared.place, grad.float()).to(grad.dtype)


def to_first_copies(grad: Tensor, shared: SharedPrompts) -> Tensor:
    """Put each computed token at its first copy, and zeros at the others: [t, ...] to [T, ...]."""
    if grad.is_cuda:
        from slime.train.backends.fsdp.fused.kernels import put_first

        return put_first(grad, shared.place, shared.first)
    whole = grad.new_zeros(len(shared.place), *grad.shape[1:])
    return whole.index_copy_(0, shared.first, grad)
