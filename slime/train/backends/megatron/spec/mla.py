"""Multi-latent attention (DeepSeek V3, Kimi K2, Moonlight, GLM-4.7-Flash), with or without Transformer Engine.

Megatron's own layer knows no down projections but Transformer Engine's, so the layer is built here and computed there.
Parameters have Transformer Engine's names and shapes: down projections are whole on every tensor-parallel rank, and the
norms of the latents belong to the up projections.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding, _yarn_get_mscale
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from slime.train.backends.megatron.spec.linear import summed_gradient


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
