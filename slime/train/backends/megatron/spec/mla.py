"""Multi-latent attention (DeepSeek V3, Kimi K2, Moonlight, GLM-4.7-Flash), with or without Transformer Engine.

Megatron's own layer supports no down projections except Transformer Engine's, so this module builds the layer and
Megatron's code computes it. Parameters have Transformer Engine's names and shapes: every tensor-parallel rank has the
down projections whole, and the norms of the latents belong to the up projections.

The sparse layers are GLM-5's latent attention to the tokens that an indexer selects; the indexer's parameters have
Megatron's names. Megatron's own sparse attention does not support packed rows and uses another scoring rule than the
model. The indexer is not trained: its selection has no gradient, also in transformers' model. A layer without an
indexer reuses the selection of the last layer before it that has one, so both must be in one pipeline stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
from slime.train.backends.megatron.spec.attention import CoreAttention, PackedRowParams, row_layout
from slime.train.backends.megatron.spec.linear import rms_norm, sum_gradient_over

if TYPE_CHECKING:
    import torch.distributed as dist
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec


class ReplicatedLinear(nn.Module):
    """A linear layer without bias that every tensor-parallel rank has whole: [.., input] to [.., output].

    Each rank computes the tokens it has. These are all tokens, or its part of the sequence, and in that case the
    gradients of the ranks are summed. The heads of this rank read the last `scattered` outputs without a layer in
    between that sums their gradients over the ranks, so this layer does it.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        config: MLATransformerConfig,
        ranks: dist.ProcessGroup,
        *,
        scattered: int = 0,
    ) -> None:
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
            output = torch.cat([kept, sum_gradient_over(read, self._ranks)], dim=-1)
        return output, None

    def backward_dw(self) -> None:
        """Weight gradients are computed in backward."""


class LatentAttention(MLASelfAttention):
    """Multi-latent attention that Megatron's layer computes.

    `latent_eps` is the epsilon of the latents' norms, which config.json does not name.
    """

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
        # Megatron's own initialisation requires layers of Transformer Engine's classes
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
        # attributes that Megatron's forward reads
        self.query_projection_size = config.v_head_dim * config.num_attention_heads
        self.q_head_dim = config.qk_head_dim + config.qk_pos_emb_head_dim
        self.key_hidden_size, self.val_hidden_size = self.q_head_dim, config.v_head_dim
        selective = config.recompute_granularity == "selective"
        self.recompute_up_proj = selective and "mla_up_proj" in config.recompute_modules
        self.qkv_up_checkpoint = None
        scale = _yarn_get_mscale(config.rotary_scaling_factor, config.mscale_all_dim)
        self.softmax_scale = scale * scale / math.sqrt(self.q_head_dim)
        self.cache_mla_latents = False
        self.rotary_pos_emb = rotary_embedding(config, self.pg_collection.cp)
        self._build_attention(config, submodules, cp_comm_type)
        self._build_projections(config, submodules)

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
            self.linear_q_down_proj = ReplicatedLinear(hidden, query_rank, config, ranks)
            self.linear_q_up_proj = self._up(submodules.linear_q_up_proj, query_rank, queries, "q_up_proj")
            self.linear_q_up_proj.eps = self.latent_eps
            self.q_layernorm = IdentityOp()
        latent, expanded = config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim)
        self.linear_kv_down_proj = ReplicatedLinear(hidden, latent + rope, config, ranks, scattered=rope)
        self.linear_kv_up_proj = self._up(submodules.linear_kv_up_proj, latent, expanded, "kv_up_proj")
        self.linear_kv_up_proj.eps = self.latent_eps
        self.kv_layernorm = IdentityOp()

    def _up(self, module: ModuleSpec | type, inputs: int, outputs: int, name: str) -> ColumnParallelLinear:
        """Build a projection whose output is sharded over the tensor-parallel ranks."""
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


def rotary_embedding(config: MLATransformerConfig, ranks: dist.ProcessGroup) -> nn.Module:
    """Build the rotary embedding for the part of queries and keys that has positions."""
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


class SparseLatentAttention(LatentAttention):
    """Latent attention whose core also reads the normalised latent of the queries."""

    def get_query_key_value_tensors(self, *args: object, **keywords: object) -> tuple[Tensor, ...]:
        query, key, value, latent, kv_latent = super().get_query_key_value_tensors(*args, **keywords)
        weight = self.linear_q_up_proj.layer_norm_weight
        return query, key, value, rms_norm(latent.detach(), weight.detach(), self.latent_eps, False), kv_latent


class SparseAttention(CoreAttention):
    """Core attention to selected tokens; `indexed` are the layers, from 0, with an indexer of their own."""

    def __init__(
        self, config: MLATransformerConfig, layer_number: int, *args: Any, indexed: Sequence[int], **keywords: Any
    ) -> None:
        super().__init__(config, layer_number, *args, **keywords)
        layer = layer_number - 1
        self.picker = max(other for other in indexed if other <= layer)
        self.indexer = Indexer(config, keywords["pg_collection"]) if self.picker == layer else None
        if config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules:
            raise UserError(
                "--recompute-modules core_attn cannot recompute sparse attention: use --recompute-granularity full, "
                "or leave core_attn out"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        x: Tensor | None = None,
        qr: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(packed_seq_params, PackedRowParams), "sparse attention requires packed rows"
        assert self.scale is not None
        if self.indexer is not None:
            assert x is not None
            assert qr is not None
            packed_seq_params.picked[self.picker] = self.indexer(x, qr, packed_seq_params)
        picked = packed_seq_params.picked.get(self.picker)
        if picked is None:
            raise UserError(
                f"a pipeline stage begins between layer {self.picker + 1}, whose indexer selects tokens for sparse "
                "attention, and a layer that reuses this selection: choose --pipeline-model-parallel-size or "
                "--decoder-first-pipeline-num-layers so that every stage begins with a layer that has an indexer"
            )
        return picked_attention(query, key, value, picked, row_layout(packed_seq_params), self.scale)


class Indexer(nn.Module):
    """Selects earlier tokens by scores from its own heads; every tensor-parallel rank has it whole."""

    def __init__(self, config: MLATransformerConfig, ranks: ProcessGroupCollection) -> None:
        super().__init__()
        self.config, self._ranks = config, ranks
        heads, width = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.linear_wq_b = ReplicatedLinear(config.q_lora_rank, heads * width, config, ranks.tp)
        self.linear_wk = ReplicatedLinear(config.hidden_size, width, config, ranks.tp)
        self.k_norm = nn.LayerNorm(width, eps=1e-6, dtype=config.params_dtype, device=self.linear_wk.weight.device)
        self.linear_weights_proj = ReplicatedLinear(config.hidden_size, heads, config, ranks.tp)
        self.rotary_pos_emb = rotary_embedding(config, ranks.cp)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, hidden: Tensor, latent: Tensor, params: PackedRowParams) -> Tensor:
        """Select the tokens to attend to, for all tokens of the row."""
        hidden, latent = hidden.flatten(0, -2), latent.flatten(0, -2)
        if self.config.sequence_parallel:
            hidden, latent = (
                gather_from_sequence_parallel_region(states, group=self._ranks.tp) for states in (hidden, latent)
            )
        layout = row_layout(params)
        query = self.linear_wq_b(latent)[0].unflatten(-1, (self.config.dsa_indexer_n_heads, -1))
        key = self.k_norm(self.linear_wk(hidden)[0])[:, None]
        turned = [self._turned(states, params, layout.max_length) for states in (query, key)]
        weights = self.linear_weights_proj(hidden)[0]
        return pick_tokens(turned[0], turned[1][:, 0], weights, layout, self.config.dsa_indexer_topk)

    def _turned(self, states: Tensor, params: PackedRowParams, longest: int) -> Tensor:
        """Rotate the first part of each head by position, as for the queries and keys of latent attention."""
        made = self.rotary_pos_emb(longest, packed_seq=True)
        angles, scale = made if isinstance(made, tuple) else (made, 1.0)
        bounds = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        result: Tensor = apply_rotary_pos_emb(
            states, angles, config=self.config, cu_seqlens=bounds, mscale=scale, cp_group=self._ranks.cp
        )
        return result
