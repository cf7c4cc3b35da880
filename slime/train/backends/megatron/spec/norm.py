"""Root-mean-square norms whose weights are equal on all tensor-parallel ranks."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from slime.errors import UserError


class Norm(nn.Module):
    """The signature of Megatron's norms; unlike Megatron's torch norm it may have a part of the sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = norm_weight(config, hidden_size)

    def forward(self, states: Tensor) -> Tensor:
        return rms_norm(states, self.weight, self.eps, self.zero_centered)


def norm_weight(config: TransformerConfig, hidden_size: int) -> nn.Parameter:
    """The scale of a norm; with sequence parallelism its gradient is summed over the tensor-parallel ranks."""
    if config.normalization != "RMSNorm":
        raise UserError(
            f"--normalization {config.normalization} has no layer outside Transformer Engine: install "
            "transformer_engine, or use a model with RMSNorm"
        )
    device = "cpu" if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
    neutral = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
    weight = nn.Parameter(neutral(hidden_size, dtype=config.params_dtype, device=device))
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


def rms_norm(states: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """`zero_centered`: the scale is one more than the weight, added in float32."""
    if not zero_centered:
        return functional.rms_norm(states, weight.shape, weight, eps)
    normed = functional.rms_norm(states.float(), weight.shape, None, eps)
    return (normed * (1 + weight.float())).to(states.dtype)
