"""The slots of a model that has weights and no code."""

from __future__ import annotations

import numpy as np
from torch import nn

from slime.engine.embedded.fused.families import Block
from slime.engine.embedded.model.attention import LayerShape
from slime.engine.embedded.model.experts import RoutedExperts
from slime.engine.embedded.model.runner import ModelRunner
from slime.models.heads import OutputHead


class FusedRunner(ModelRunner):
    """Steps of it go through a `CudaDecoder` with a `FusedBody`; it is no decoder itself."""

    def __init__(self, weights: nn.Module, block: Block, table: np.ndarray) -> None:
        self._hold(weights, table)
        self.context.shapes = {
            layer: LayerShape(block.kv_heads, block.head_dim, block.head_dim) for layer in range(block.layers)
        }
        self.experts = RoutedExperts(self.context, block.layers)
        if block.experts is not None:
            self.experts.expect(block.experts.topk, block.experts.count)
        self._head = OutputHead()
        self._projection = nn.Linear(block.hidden, block.vocab, bias=False, device="meta")
        self._projection.weight = weights.get_parameter(block.head_name)
