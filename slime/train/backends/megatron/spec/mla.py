"""Multi-latent attention (DeepSeek V3, Kimi K2, Moonlight, GLM-4.7-Flash), with or without Transformer Engine.

Megatron's own layer knows no down projections but Transformer Engine's, so the layer is built here and computed there.
Parameters have Transformer Engine's names and shapes: down projections are whole on every tensor-parallel rank, and the
norms of the latents belong to the up projections.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings import (
    RotaryEmbedding,
    YarnRotaryEmbedding,
    _yarn_get_mscale,
    apply_rotary_pos_emb,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from slime.errors import UserError
from slime.train.backends.attention import pick_tokens, picked_attention
from slime.train.backends.megatron.spec.attention import CoreAttention, RowParams, layout_of
from slime.train.backends.megatron.spec.linear import rms_norm, summed_gradient


class WholeLinear(nn.Module):
    """A linear layer that every tensor-parallel rank has whole: [.., input] to [.., output], and no bias.

    Each rank computes the tokens it has: all of them, or its part of the sequence, and then the gradients of the ranks
    are summed. The last `scattered` outputs are read by the heads of this rank without a layer in between that would
    sum their gradients, so that is done here.
    """

    def __init__(self, inputs: int, outputs: int, config: Any, ranks: Any, *, scattered: int = 0) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._ranks, self._outputs = ranks, outputs
        self._scattered = 0 if config.sequence_parallel or ranks.size() == 1 else scattered

    def forward(self, states: Tensor) -> tuple[Tensor, None]:
        output = functional.linear(states, self.weight)
        if self._scattered:
            kept, read = output.split([self._outputs - self._scattered, self._scattered], dim=-1)
            output = torch.cat([kept, summed_gradient(read, self._ranks)], dim=-1)
        return output, None

    def backward_dw(self) -> None:
        """Weight gradients are computed in backward."""


class LatentAttention(MLASelfAttention):
    """Computed by Megatron's layer; `latent_eps` is that of the latents' norms, which config.json does not name."""

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        latent_eps: float = 1e-6,
    ) -> None:
        # Megatron's own initialisation asks Transformer Engine's classes about the layers it made
        Attention.__init__(
            self,
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )
        self.latent_eps = latent_eps
        self._set_facts(config)
        self.rotary_pos_emb = rotary_embedding(config, self.pg_collection.cp)
        self._build_attention(config, submodules, cp_comm_type)
        self._build_projections(config, submodules)

    def _set_facts(self, config: MLATransformerConfig) -> None:
        """What Megatron's forward looks at."""
        self.query_projection_size = config.v_head_dim * config.num_attention_heads
        self.q_head_dim = config.qk_head_dim + config.qk_pos_emb_head_dim
        self.key_hidden_size, self.val_hidden_size = self.q_head_dim, config.v_head_dim
        selective = config.recompute_granularity == "selective"
        self.recompute_up_proj = selective and "mla_up_proj" in config.recompute_modules
        self.qkv_up_checkpoint = None
        scale = _yarn_get_mscale(config.rotary_scaling_factor, config.mscale_all_dim)
        self.softmax_scale = scale * scale / math.sqrt(self.q_head_dim)
        self.cache_mla_latents = False

    def _build_attention(
        self, config: MLATransformerConfig, submodules: MLASelfAttentionSubmodules, cp_comm_type: str | None
    ) -> None:
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=self.layer_number,
            attn_mask_type=self.attn_mask_type,
            attention_type=self.attention_type,
            softmax_scale=self.softmax_scale,
            k_channels=self.q_head_dim,
            v_channels=config.v_head_dim,
            cp_comm_type=cp_comm_type,
            pg_collection=self.pg_collection,
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            self.query_projection_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
            tp_group=self.pg_collection.tp,
        )

    def _build_projections(self, config: MLATransformerConfig, submodules: MLASelfAttentionSubmodules) -> None:
        hidden, heads, ranks = config.hidden_size, config.num_attention_heads, self.pg_collection.tp
        query_rank, rope = config.q_lora_rank, config.qk_pos_emb_head_dim
        queries = heads * self.q_head_dim
        if query_rank is None:
            self.linear_q_proj = self._up(submodules.linear_q_proj, hidden, queries, "q_proj")
        else:
            self.linear_q_down_proj = WholeLinear(hidden, query_rank, config, ranks)
            self.linear_q_up_proj = self._up(submodules.linear_q_up_proj, query_rank, queries, "q_up_proj")
            self.linear_q_up_proj.eps = self.latent_eps
            self.q_layernorm = IdentityOp()
        latent, expanded = config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim)
        self.linear_kv_down_proj = WholeLinear(hidden, latent + rope, config, ranks, scattered=rope)
        self.linear_kv_up_proj = self._up(submodules.linear_kv_up_proj, latent, expanded, "kv_up_proj")
        self.linear_kv_up_proj.eps = self.latent_eps
        self.kv_layernorm = IdentityOp()

    def _up(self, module: Any, inputs: int, outputs: int, name: str) -> Any:
        """A projection whose output is cut over the tensor-parallel ranks."""
        return build_module(
            module,
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name=name,
            tp_group=self.pg_collection.tp,
        )


def rotary_embedding(config: MLATransformerConfig, ranks: Any) -> nn.Module:
    """Of the part of queries and keys that has positions."""
    size = config.qk_pos_emb_head_dim
    if config.rope_type == "rope":
        return RotaryEmbedding(
            size, rotary_percent=config.rotary_percent, rotary_base=config.rotary_base, cp_group=ranks
        )
    return YarnRotaryEmbedding(
        size,
        rotary_base=config.rotary_base,
        scaling_factor=config.rotary_scaling_factor,
        original_max_position_embeddings=config.original_max_position_embeddings,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
        mscale=config.mscale,
        mscale_all_dim=config.mscale_all_dim,
        cp_group=ranks,
    )


# GLM-5's latent attention to the tokens that an indexer picks; the indexer's parameters have Megatron's names.
#
# Megatron's own sparse attention takes no packed rows and scores by another rule than the model's. The indexer is not
# trained: picking has no gradient, in transformers' model neither. Layers without an indexer read what the last one
# before them picked, so both are on one stage of the pipeline.


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
