"""Reference forward of a fused model in plain torch, against which the kernels are checked when a model is loaded.

It rounds where transformers' eager code rounds, keeps no state between calls and is not optimised for speed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from slime.engine.embedded.fused.supported_models import (
    EMBEDDING,
    FINAL_NORM,
    FusedModelSpec,
    expert_tensor_names,
    layer_tensor_names,
)


class ReferenceModel:
    """Computes logits of whole sequences from the tensors of a model folder, which need not be contiguous."""

    def __init__(self, block: FusedModelSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        self._block = block
        self._tensors = tensors

    @torch.inference_mode()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits `[B, T, V]` of `ids [B, T]`."""
        block, tensors = self._block, self._tensors
        x = F.embedding(ids, tensors[EMBEDDING])
        angles = block.rope.tables(block.head_dim, ids.shape[1], x.dtype, x.device)
        for layer in range(block.layers):
            x = x + self._attention(layer, self._norm(x, layer_tensor_names(layer, "norm")[0]), angles)
            y = self._norm(x, layer_tensor_names(layer, "mlp_norm")[0])
            if block.sparse[layer]:
                x = x + self._experts(layer, y.flatten(0, 1)).view(y.shape)
            else:
                gate, up = self._products(layer, "gate_up", y)
                x = x + self._products(layer, "down", F.silu(gate) * up)[0]
        return (self._norm(x, FINAL_NORM) @ tensors[block.head_name].t()).float()

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        full = x.float()
        full = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + self._block.eps)
        return self._tensors[name] * full.to(x.dtype)

    def _products(self, layer: int, projection: str, x: torch.Tensor) -> list[torch.Tensor]:
        found = zip(layer_tensor_names(layer, projection), layer_tensor_names(layer, projection, "bias"), strict=True)
        return [F.linear(x, self._tensors[weight], self._tensors.get(bias)) for weight, bias in found]

    def _attention(self, layer: int, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        block = self._block
        q, k, v = (part.unflatten(-1, (-1, block.head_dim)) for part in self._products(layer, "qkv", x))
        if block.qk_norm:
            q, k = (
                self._norm(q, layer_tensor_names(layer, "q_norm")[0]),
                self._norm(k, layer_tensor_names(layer, "k_norm")[0]),
            )
        q, k, v = (part.transpose(1, 2) for part in (_rotate(q, angles), _rotate(k, angles), v))
        k, v = (part.repeat_interleave(block.heads // block.kv_heads, 1) for part in (k, v))
        key = torch.arange(x.shape[1], device=x.device)
        seen = key <= key[:, None]
        if window := block.windows[layer]:
            seen &= key > key[:, None] - window
        scores = (q @ k.transpose(2, 3)) * block.head_dim**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32).to(x.dtype)
        return self._products(layer, "out", (weights @ v).transpose(1, 2).flatten(2))[0]

    def _experts(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        facts = self._block.experts
        assert facts is not None
        probs = (x @ self._tensors[layer_tensor_names(layer, "router")[0]].t()).softmax(-1, dtype=torch.float32)
        weights, index = probs.topk(facts.topk, -1)
        if facts.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        gate_up = expert_tensor_names(layer, facts.count, "gate_up")
        down = expert_tensor_names(layer, facts.count, "down")
        out = torch.zeros_like(x)
        for expert in index.unique().tolist():
            token, at = (index == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ self._tensors[name].t() for name in gate_up[2 * expert : 2 * expert + 2])
            found = (F.silu(gate) * up) @ self._tensors[down[expert]].t()
            out.index_add_(0, token, found * weights[token, at, None])
        return out


def _rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate x `[B, T, heads, dim]`; the two halves of a head are the coordinates of its rotation planes."""
    cos, sin = (torch.cat([table, table], -1)[:, None] for table in angles)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
