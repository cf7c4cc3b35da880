"""Tensor-parallel linear layers with the parameters that Transformer Engine's have.

Megatron marks a weight as tensor-parallel only where it also initialises it; weights here are read from a folder, so
the marks are set apart. Without them the gradient norm takes a part of a matrix for a copy of it, and skips it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn

from slime.train.backends.megatron.spec.norm import norm_weight, rms_norm


class NormColumnParallelLinear(ColumnParallelLinear):
    """A norm and a linear layer whose output is cut over the tensor-parallel ranks."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **keywords: Any) -> None:
        super().__init__(input_size, output_size, config=config, **keywords)
        self.layer_norm_weight = norm_weight(config, input_size)
        self.eps = config.layernorm_epsilon

    def forward(self, input_: Tensor, *args: Any, **keywords: Any) -> tuple[Tensor, Tensor | None]:
        zero_centered = self.config.layernorm_zero_centered_gamma
        normed = rms_norm(input_, self.layer_norm_weight, self.eps, zero_centered)
        result: tuple[Tensor, Tensor | None] = super().forward(normed, *args, **keywords)
        return result


def summed_gradient(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same tensor; its gradient is the sum of those of the group's ranks.

    Megatron's own function for it gives a gradient back unsummed, without a word, when that is not contiguous.
    """
    same: Tensor = _SummedGradient.apply(states, group) if group.size() > 1 else states
    return same


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        total = upstream[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def mark_tensor_parallel(model: nn.Module) -> None:
    """Mark the weights of the model that are parts of a matrix."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            cut = 0
        elif isinstance(module, RowParallelLinear):
            cut = 1
        else:
            continue
        weight = module.weight
        if weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=cut, stride=1)
