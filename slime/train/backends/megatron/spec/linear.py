"""Norms and tensor-parallel linear layers with the parameters of Transformer Engine's layers.

Megatron marks a weight as tensor-parallel only where it also initialises it. Weights here are read from a folder, so
`mark_tensor_parallel` sets the marks. Without them the gradient norm treats a part of a matrix as a copy and skips it.
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
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from slime.errors import UserError


class TorchRmsNorm(nn.Module):
    """A root-mean-square norm with the signature of Megatron's norms; all tensor-parallel ranks have equal weights.

    Unlike Megatron's torch norm it supports sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = norm_weight(config, hidden_size)

    def forward(self, states: Tensor) -> Tensor:
        return rms_norm(states, self.weight, self.eps, self.zero_centered)


def norm_weight(config: TransformerConfig, hidden_size: int) -> nn.Parameter:
    """Create the scale of a norm; with sequence parallelism its gradient is summed over the tensor-parallel ranks."""
    if config.normalization != "RMSNorm":
        raise UserError(
            f"--normalization {config.normalization} needs Transformer Engine: install transformer_engine, or use a "
            "model with RMSNorm"
        )
    device = "cpu" if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
    neutral = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
    weight = nn.Parameter(neutral(hidden_size, dtype=config.params_dtype, device=device))
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


def rms_norm(states: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """Compute a root-mean-square norm; with `zero_centered` the scale is the weight plus one, in float32."""
    if not zero_centered:
        return functional.rms_norm(states, weight.shape, weight, eps)
    normed = functional.rms_norm(states.float(), weight.shape, None, eps)
    return (normed * (1 + weight.float())).to(states.dtype)


class NormColumnParallelLinear(ColumnParallelLinear):
    """A norm and a linear layer whose output is sharded over the tensor-parallel ranks."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **keywords: object) -> None:
        super().__init__(input_size, output_size, config=config, **keywords)
        self.layer_norm_weight = norm_weight(config, input_size)
        self.eps = config.layernorm_epsilon

    def forward(self, input_: Tensor, *args: object, **keywords: object) -> tuple[Tensor, Tensor | None]:
        zero_centered = self.config.layernorm_zero_centered_gamma
        normed = rms_norm(input_, self.layer_norm_weight, self.eps, zero_centered)
        result: tuple[Tensor, Tensor | None] = super().forward(normed, *args, **keywords)
        return result


def sum_gradient_over(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the same tensor; in backward its gradient is summed over the ranks of the group.

    Megatron's own function silently skips the sum if the gradient is not contiguous.
    """
    same: Tensor = _SumGradient.apply(states, group) if group.size() > 1 else states
    return same


class _SumGradient(torch.autograd.Function):
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
    """Mark the weights of the model that are parts of a sharded matrix."""
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
