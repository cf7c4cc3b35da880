"""Runner and weights of a fused model, whose weights have no transformers model code.

Invariant: no weight is copied. One product that uses several tensors of the folder reads a view over them, so these
must be contiguous in memory (see `supported_models`), and in-place updates of a tensor of the folder change the
product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from slime.engine.embedded.fused.supported_models import (
    EMBEDDING,
    FINAL_NORM,
    ExpertSpec,
    FusedModelSpec,
    expert_tensor_names,
    layer_tensor_names,
)
from slime.engine.embedded.model.attention import LayerShape
from slime.engine.embedded.model.experts import RoutedExperts
from slime.engine.embedded.model.runner import ModelRunner
from slime.models.heads import OutputHead


class FusedRunner(ModelRunner):
    """Owns the weights and KV slots of a fused model, whose steps run in a `CudaDecoder`, not here."""

    def __init__(self, weights: nn.Module, block: FusedModelSpec, table: np.ndarray) -> None:
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


@dataclass(frozen=True)
class LinearProduct:
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return x @ weight.T + bias.

        Of `meta` tensors, return an empty tensor: torch would import sympy, which takes seconds, to find the shape.
        """
        if x.is_meta:
            return x.new_empty(len(x), len(self.weight)) if out is None else out
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)


@dataclass(frozen=True)
class DenseMlp:
    """Weights of a dense SwiGLU layer."""

    gate_up: LinearProduct
    down: LinearProduct


@dataclass(frozen=True)
class MoeMlp:
    """Weights of a mixture-of-experts layer."""

    router: LinearProduct  # [E, H]
    gate_up: torch.Tensor  # [E, 2 * width, H]
    down: torch.Tensor  # [E, H, width]


@dataclass(frozen=True)
class FusedLayerWeights:
    """Weights of one decoder layer; window 0: full attention."""

    norm: torch.Tensor
    qkv: LinearProduct
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: LinearProduct
    mlp_norm: torch.Tensor
    mlp: DenseMlp | MoeMlp
    window: int


class FusedWeights:
    """All weights of a fused model, from the tensors of its folder."""

    def __init__(self, block: FusedModelSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        self.embedding = tensors[EMBEDDING]
        self.norm = tensors[FINAL_NORM]
        self.head = tensors[block.head_name]
        self.layers = [_layer_weights(block, layer, tensors) for layer in range(block.layers)]


def _layer_weights(block: FusedModelSpec, layer: int, tensors: Mapping[str, torch.Tensor]) -> FusedLayerWeights:
    def joined(projection: str, kind: str = "weight") -> torch.Tensor:
        return contiguous_view([tensors[name] for name in layer_tensor_names(layer, projection, kind)])

    def product(projection: str, has_bias: bool) -> LinearProduct:
        return LinearProduct(joined(projection), joined(projection, "bias") if has_bias else None)

    def sparse(experts: ExpertSpec) -> MoeMlp:
        gate_up, down = (
            contiguous_view([tensors[name] for name in expert_tensor_names(layer, experts.count, part)]).unflatten(
                0, (experts.count, -1)
            )
            for part in ("gate_up", "down")
        )
        return MoeMlp(product("router", has_bias=False), gate_up, down)

    return FusedLayerWeights(
        norm=joined("norm"),
        qkv=product("qkv", block.qkv_bias),
        q_norm=joined("q_norm") if block.qk_norm else None,
        k_norm=joined("k_norm") if block.qk_norm else None,
        out=product("out", block.out_bias),
        mlp_norm=joined("mlp_norm"),
        mlp=sparse(block.experts)
        if block.experts is not None and block.sparse[layer]
        else DenseMlp(product("gate_up", block.mlp_bias), product("down", block.mlp_bias)),
        window=block.windows[layer],
    )


def contiguous_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one view over contiguous tensors, concatenated along the first axis; ValueError if they are not."""
    first, after = tensors[0], tensors[0].data_ptr()
    rows = sum(tensor.shape[0] for tensor in tensors)
    if first.is_meta:
        return torch.empty(rows, *first.shape[1:], dtype=first.dtype, device="meta")
    for tensor in tensors:
        if tensor.data_ptr() != after or not tensor.is_contiguous() or tensor.shape[1:] != first.shape[1:]:
            raise ValueError("weights of one fused product are not contiguous in memory")
        after += tensor.nbytes
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
