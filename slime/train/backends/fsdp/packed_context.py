"""Context of the packed row that is in a model's forward, as its layers read it, and GLM-5's indexer over packed rows.

Invariant: the indexer's parameters keep their names. It gets no gradient, as in transformers' model, since picking
tokens is a choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slime.train.backends.attention import pick_tokens
from slime.train.backends.delta_kernels import DeltaKernels, delta_kernels
from slime.train.samples.packing import PackedLayout, SharedPrompts
from slime.train.topology import Ranks


class PackedContext:
    """Layout of the row in the forward, with the number of layers that mix tokens and have read it.

    With several `ranks` each has a part of the row's tokens (`exchange_tokens_for_heads`). `is_indexed`: indexers pick
    the tokens that attention reads. With `shared` prompts, layers compute each of their tokens once, and attention gets
    all copies (`shared_prompt_ops.py`).
    """

    def __init__(self, gdn_backend: str | None = None) -> None:
        self.layout: PackedLayout | None = None
        self.shared: SharedPrompts | None = None
        self.reads = 0
        self.ranks: Ranks | None = None
        self.is_indexed = False
        self._gdn_backend = gdn_backend
        self._kernels: DeltaKernels | None = None

    @property
    def sharing(self) -> Ranks | None:
        """The ranks that share this row; None if this rank has the whole row."""
        return self.ranks if self.ranks is not None and self.ranks.size > 1 else None

    def begin(self, layout: PackedLayout, shared: SharedPrompts | None = None) -> None:
        """Start a forward over a row."""
        self.layout, self.shared = layout, shared
        self.reads = 0
        self._kernels = None

    def read(self) -> PackedLayout:
        """The row's layout, for a layer that mixes tokens; counts the read."""
        if self.layout is None:
            raise RuntimeError("a layer ran before a packed layout was set")
        self.reads += 1
        return self.layout

    def delta_kernels(self, device: torch.device) -> DeltaKernels:
        """Kernels for the row's gated delta nets, made on the first call for a row."""
        layout = self.read()
        if self._kernels is None:
            self._kernels = delta_kernels(self._gdn_backend, layout.lengths, device)
        return self._kernels


def is_indexer(module: nn.Module) -> bool:
    """Return True for GLM-5's indexer; DeepSeek V3.2's rotates positions in another way."""
    return type(module).__name__ == "GlmMoeDsaIndexer"


class PackedIndexer(nn.Module):
    """Replaces transformers' indexer, with the same child modules."""

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
        *_: object,
        **__: object,
    ) -> Tensor:
        """Pick positions in each token's sequence: [1, T, picks], with zero picks if attention reads all tokens."""
        layout = self._context.layout
        assert layout is not None, "an indexer ran before a packed layout was set"
        angles = [part[0, :, None, : self._rotated // 2] for part in position_embeddings]
        query = self._turned(self.wq_b(q_resid)[0].unflatten(-1, (self._heads, -1)), *angles)
        key = self._turned(self.k_norm(self.wk(hidden_states))[0][:, None], *angles)[:, 0]
        return pick_tokens(query, key, self.weights_proj(hidden_states)[0], layout, self._count)[None]

    def _turned(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first part of [T, heads, D] by its position, in pairs of neighbouring elements."""
        rotated, rest = states.split([self._rotated, states.shape[-1] - self._rotated], dim=-1)
        even, odd = rotated[..., 0::2], rotated[..., 1::2]
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin, rest], dim=-1)
