"""Tensor-parallel linear layers with the parameters that Transformer Engine's have.

Megatron marks a weight as tensor-parallel only where it also initialises it; weights here are read from a folder, so
the marks are set apart. Without them the gradient norm takes a part of a matrix for a copy of it, and skips it.
"""

from __future__ import annotations

from typing import Any

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

    def forward(self, input_: Tensor, *args: Any, **keywords: Any) -> tuple[Tensor, Tensor | None]:
        config = self.config
        normed = rms_norm(
            input_, self.layer_norm_weight, config.layernorm_epsilon, config.layernorm_zero_centered_gamma
        )
        result: tuple[Tensor, Tensor | None] = super().forward(normed, *args, **keywords)
        return result


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
