"""The experts that a rank has, as one layer with a matrix each: the parameters of Transformer Engine's grouped layers.

Invariant: rows come sorted by expert, `tokens[e]` of them for expert e. What crosses ranks is the token dispatcher's
business: a rank brings its columns (or rows) of each matrix, cut over the expert-tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.utils import divide
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional


class _GroupedLinear(nn.Module):
    cut: int
    """The dimension of a matrix that is cut over the expert-tensor-parallel ranks."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        bias: bool = False,
        skip_bias_add: bool = False,
        pg_collection: Any = None,
        **_keywords: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.skip_bias_add = num_gemms, skip_bias_add
        ranks = pg_collection.expt_tp.size()
        if self.cut == 0:
            output_size = divide(output_size, ranks)
        else:
            input_size = divide(input_size, ranks)
        device = "cpu" if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        for expert in range(num_gemms):
            weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
            self._add(f"weight{expert}", weight)
            if bias:
                row = nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype, device=device))
                self._add(f"bias{expert}", row)
        self.has_bias = bias

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        set_tensor_model_parallel_attributes(
            parameter, is_parallel=True, dim=min(self.cut, parameter.dim() - 1), stride=1
        )
        self.register_parameter(name, parameter)

    def forward(self, states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, list[nn.Parameter] | None]:
        weights = [self.get_parameter(f"weight{expert}") for expert in range(self.num_gemms)]
        biases = [self.get_parameter(f"bias{expert}") for expert in range(self.num_gemms)] if self.has_bias else None
        added = biases if biases is not None and not self.skip_bias_add else None
        if _on_tensor_cores(states):
            output = _grouped_product(states, weights, tokens)
            if added is not None:
                output = output + torch.cat([row.expand(count, -1) for row, count in zip(added, tokens, strict=True)])
        else:
            pieces = states.split(list(tokens))
            output = torch.cat(
                [
                    functional.linear(piece, weight, None if added is None else added[expert])
                    for expert, (piece, weight) in enumerate(zip(pieces, weights, strict=True))
                ]
            )
        return output, biases if self.skip_bias_add else None


class ColumnGroupedLinear(_GroupedLinear):
    cut = 0


class RowGroupedLinear(_GroupedLinear):
    cut = 1


def _on_tensor_cores(states: Tensor) -> bool:
    return states.is_cuda and states.dtype == torch.bfloat16 and hasattr(functional, "grouped_mm")


def _grouped_product(states: Tensor, weights: Sequence[Tensor], tokens: Sequence[int]) -> Tensor:
    """All experts in one launch."""
    ends = torch.tensor(tokens, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    stacked = torch.stack(list(weights)).transpose(1, 2)
    product: Tensor = functional.grouped_mm(states, stacked, offs=ends.to(states.device, non_blocking=True))
    return product
