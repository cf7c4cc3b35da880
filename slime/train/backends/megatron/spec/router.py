"""The router of a layer of experts, without Transformer Engine's product."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import functional

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(TopKRouter):
    """Megatron's own product refers to Transformer Engine's whether or not it is installed."""

    def gating(self, input: Tensor) -> Tensor:
        """The scores of the experts, in the router's dtype; by default that of the hidden states."""
        dtype = _DTYPES.get(self.config.moe_router_dtype or "", input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(input.to(dtype), self.weight.to(dtype), bias)
