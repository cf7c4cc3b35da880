"""The indexer of GLM-5's sparse attention over packed rows.

Invariant: parameters keep their names. It gets no gradient, in transformers' model as here: what it picks is a choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slime.train.backends.fsdp.packed_context import PackedContext
from slime.train.backends.sparse_attention import pick_tokens


def is_indexer(module: nn.Module) -> bool:
    """DeepSeek V3.2's rotates positions in another way."""
    return type(module).__name__ == "GlmMoeDsaIndexer"


class PackedIndexer(nn.Module):
    """Takes the place of transformers' module, with its parts."""

    wq_b: nn.Module
    wk: nn.Module
    k_norm: nn.Module
    weights_proj: nn.Module

    def __init__(self, indexer: Any, context: PackedContext) -> None:
        super().__init__()
        for name, child in indexer.named_children():
            self.add_module(name, child)
        self._context = context
        self._heads, self._count, self._rotated = indexer.n_heads, indexer.index_topk, indexer.qk_rope_head_dim

    @torch.no_grad()
    @torch.compiler.disable
    def forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *_: Any,
        **__: Any,
    ) -> Tensor:
        """[1, T, picks]: positions in each token's sequence; no picks where all tokens are meant."""
        layout = self._context.layout
        assert layout is not None, "an indexer ran before a packed layout was set"
        angles = [part[0, :, None, : self._rotated // 2] for part in position_embeddings]
        query = self._turned(self.wq_b(q_resid)[0].unflatten(-1, (self._heads, -1)), *angles)
        key = self._turned(self.k_norm(self.wk(hidden_states))[0][:, None], *angles)[:, 0]
        return pick_tokens(query, key, self.weights_proj(hidden_states)[0], layout, self._count)[None]

    def _turned(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Neighbours are turned in pairs; [T, heads, D], of which the first part has positions."""
        rotated, rest = states.split([self._rotated, states.shape[-1] - self._rotated], dim=-1)
        even, odd = rotated[..., 0::2], rotated[..., 1::2]
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin, rest], dim=-1)
