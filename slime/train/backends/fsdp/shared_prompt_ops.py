"""From tokens that are computed once to all of a row, and back, with gradients (`SharedPrompts`).

Invariant: the gradients of a token's copies are added up in the order of the row, in float32, so the numbers are those
of the last run.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from slime.train.samples.packing import SharedPrompts


def spread(computed: Tensor, shared: SharedPrompts) -> Tensor:
    """[t, ...] to [T, ...]: every token of the row has what its like computed."""
    return cast(Tensor, _Spread.apply(computed, shared))


def take_first(states: Tensor, shared: SharedPrompts) -> Tensor:
    """[T, ...] to [t, ...]: of copies, which are equal, the first; what becomes of the others does not matter."""
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
    """[T, ...] to [t, ...]: the sum over the copies of each computed token."""
    if grad.is_cuda:
        from slime.train.backends.fsdp.fused.kernels import add_copies  # with Triton, which only a GPU needs

        return add_copies(grad, shared.copies, shared.starts)
    total = torch.zeros(len(shared.first), *grad.shape[1:], dtype=torch.float32)
    return total.index_add_(0, shared.place, grad.float()).to(grad.dtype)


def to_first_copies(grad: Tensor, shared: SharedPrompts) -> Tensor:
    """[t, ...] to [T, ...]: the first copy of each computed token has what it has, the others zeros."""
    if grad.is_cuda:
        from slime.train.backends.fsdp.fused.kernels import put_first

        return put_first(grad, shared.place, shared.first)
    whole = grad.new_zeros(len(shared.place), *grad.shape[1:])
    return whole.index_copy_(0, shared.first, grad)
