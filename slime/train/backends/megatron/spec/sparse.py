"""GLM-5's latent attention to the tokens that an indexer picks; the indexer's parameters have Megatron's names.

Megatron's own sparse attention takes no packed rows and scores by another rule than the model's. The indexer is not
trained: picking has no gradient, in transformers' model neither. Layers without an indexer read what the last one
before them picked, so both are on one stage of the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from slime.errors import UserError
from slime.train.backends.megatron.spec.attention import CoreAttention, RowParams, layout_of
from slime.train.backends.megatron.spec.mla import LatentAttention, WholeLinear, rotary_embedding
from slime.train.backends.megatron.spec.norm import rms_norm
from slime.train.backends.sparse_attention import pick_tokens, picked_attention


class SparseLatentAttention(LatentAttention):
    """Latent attention whose core reads the normed latent of the queries too."""

    def get_query_key_value_tensors(self, *args: Any, **keywords: Any) -> tuple[Tensor, ...]:
        query, key, value, latent, kv_latent = super().get_query_key_value_tensors(*args, **keywords)
        weight = self.linear_q_up_proj.layer_norm_weight
        return query, key, value, rms_norm(latent.detach(), weight.detach(), self.latent_eps, False), kv_latent


class SparseAttention(CoreAttention):
    """`indexed`: the layers, from 0, that pick tokens themselves."""

    def __init__(
        self, config: MLATransformerConfig, layer_number: int, *args: Any, indexed: Sequence[int], **keywords: Any
    ) -> None:
        super().__init__(config, layer_number, *args, **keywords)
        layer = layer_number - 1
        self.picker = max(other for other in indexed if other <= layer)
        self.indexer = Indexer(config, keywords["pg_collection"]) if self.picker == layer else None
        if config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules:
            raise UserError(
                "--recompute-modules core_attn cannot repeat sparse attention: use --recompute-granularity full, or "
                "leave core_attn out"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        x: Tensor | None = None,
        qr: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(packed_seq_params, RowParams), "sparse attention takes packed rows"
        assert self.scale is not None
        if self.indexer is not None:
            assert x is not None
            assert qr is not None
            packed_seq_params.picked[self.picker] = self.indexer(x, qr, packed_seq_params)
        picked = packed_seq_params.picked.get(self.picker)
        if picked is None:
            raise UserError(
                f"a stage of the pipeline begins between layer {self.picker + 1}, which picks the tokens that sparse "
                "attention reads, and a layer that takes its picks: choose --pipeline-model-parallel-size or "
                "--decoder-first-pipeline-num-layers so that stages begin with a layer that picks"
            )
        return picked_attention(query, key, value, picked, layout_of(packed_seq_params), self.scale)


class Indexer(nn.Module):
    """Scores of earlier tokens, by heads of its own; whole on every tensor-parallel rank."""

    def __init__(self, config: MLATransformerConfig, ranks: Any) -> None:
        super().__init__()
        self.config, self._ranks = config, ranks
        heads, width = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.linear_wq_b = WholeLinear(config.q_lora_rank, heads * width, config, ranks.tp)
        self.linear_wk = WholeLinear(config.hidden_size, width, config, ranks.tp)
        self.k_norm = nn.LayerNorm(width, eps=1e-6, dtype=config.params_dtype, device=self.linear_wk.weight.device)
        self.linear_weights_proj = WholeLinear(config.hidden_size, heads, config, ranks.tp)
        self.rotary_pos_emb = rotary_embedding(config, ranks.cp)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, hidden: Tensor, latent: Tensor, params: RowParams) -> Tensor:
        """The picks of all tokens of the row."""
        hidden, latent = hidden.flatten(0, -2), latent.flatten(0, -2)
        if self.config.sequence_parallel:
            hidden, latent = (
                gather_from_sequence_parallel_region(states, group=self._ranks.tp) for states in (hidden, latent)
            )
        layout = layout_of(params)
        query = self.linear_wq_b(latent)[0].unflatten(-1, (self.config.dsa_indexer_n_heads, -1))
        key = self.k_norm(self.linear_wk(hidden)[0])[:, None]
        turned = [self._turned(states, params, layout.max_length) for states in (query, key)]
        weights = self.linear_weights_proj(hidden)[0]
        return pick_tokens(turned[0], turned[1][:, 0], weights, layout, self.config.dsa_indexer_topk)

    def _turned(self, states: Tensor, params: RowParams, longest: int) -> Tensor:
        """With positions in the first part of each head, as in the queries and keys of latent attention."""
        made = self.rotary_pos_emb(longest, packed_seq=True)
        angles, scale = made if isinstance(made, tuple) else (made, 1.0)
        bounds = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        result: Tensor = apply_rotary_pos_emb(
            states, angles, config=self.config, cu_seqlens=bounds, mscale=scale, cp_group=self._ranks.cp
        )
        return result
