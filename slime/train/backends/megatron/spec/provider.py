"""Layer specs of a model, built from Transformer Engine's modules or from modules of plain torch.

Invariant: parameters have the same names and shapes with both, so weights and checkpoints are interchangeable.
`config.transformer_impl` selects one. The modules of plain torch here are a router and grouped linear layers, which
compute all experts of a rank as one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.utils import divide
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn
from torch.nn import functional

from slime.models.families.weight_map import Fields
from slime.train.backends.megatron.spec.attention import CoreAttention, GatedSelfAttention
from slime.train.backends.megatron.spec.gated_delta_net import GatedDeltaNet
from slime.train.backends.megatron.spec.linear import NormColumnParallelLinear, TorchRmsNorm
from slime.train.backends.megatron.spec.mla import LatentAttention, SparseAttention, SparseLatentAttention

WithBias = tuple[Tensor, Tensor | None]


class SandwichLayer(TransformerLayer):
    """A transformer layer that normalises the outputs of attention and MLP before adding them (GLM-4).

    The norms `post_self_attn_layernorm` and `post_mlp_layernorm` are between a block and the residual.
    """

    def __init__(self, config: TransformerConfig, *args: object, **keywords: object) -> None:
        super().__init__(config, *args, **keywords)
        self.post_self_attn_layernorm = TorchRmsNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = TorchRmsNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda = _norm_before_add(self.post_self_attn_layernorm)
        self.mlp_bda = _norm_before_add(self.post_mlp_layernorm)


def _norm_before_add(norm: nn.Module) -> Callable[..., Callable[..., Tensor]]:
    """Return Megatron's bias, dropout and residual addition with a norm before them."""

    def make(training: bool, fused: bool) -> Callable[..., Tensor]:
        add = get_bias_dropout_add(training, fused)

        def norm_and_add(output_with_bias: WithBias, residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            result: Tensor = add((norm(output if bias is None else output + bias), None), residual, dropout)
            return result

        return norm_and_add

    return make


class _GroupedLinear(nn.Module):
    """The linear layers of a rank's experts, with the parameters of Transformer Engine's grouped layers.

    Invariant: rows are sorted by expert, `tokens[e]` of them for expert e. This layer does no communication, which the
    token dispatcher does; each rank has its columns (or rows) of every matrix.
    """

    cut: int
    """The dimension of a matrix that is sharded over the expert-tensor-parallel ranks."""

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
        **_keywords: object,
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
        if states.is_cuda and states.dtype == torch.bfloat16 and hasattr(functional, "grouped_mm"):
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


def _grouped_product(states: Tensor, weights: Sequence[Tensor], tokens: Sequence[int]) -> Tensor:
    """Multiply by the matrices of all experts in one kernel launch on tensor cores."""
    ends = torch.tensor(tokens, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    stacked = torch.stack(list(weights)).transpose(1, 2)
    product: Tensor = functional.grouped_mm(states, stacked, offs=ends.to(states.device, non_blocking=True))
    return product


_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class TorchRouter(TopKRouter):
    """A router that computes its scores with torch.

    Megatron's own `gating` refers to Transformer Engine's matrix product even if that is not installed.
    """

    def gating(self, input: Tensor) -> Tensor:
        """Compute the scores of the experts in the router's dtype, by default that of the hidden states."""
        dtype = _DTYPES.get(self.config.moe_router_dtype or "", input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(input.to(dtype), self.weight.to(dtype), bias)


@dataclass(frozen=True)
class LayerModules:
    """The module classes of a layer, all from one implementation."""

    norm: type
    norm_column: type
    column: type
    row: type
    core_attention: type
    grouped_column: type
    grouped_row: type
    router: type


TORCH_MODULES = LayerModules(
    norm=TorchRmsNorm,
    norm_column=NormColumnParallelLinear,
    column=ColumnParallelLinear,
    row=RowParallelLinear,
    core_attention=CoreAttention,
    grouped_column=ColumnGroupedLinear,
    grouped_row=RowGroupedLinear,
    router=TorchRouter,
)


def select_modules(config: TransformerConfig) -> LayerModules:
    """Return the module classes that `--transformer-impl` selects."""
    if config.transformer_impl != "transformer_engine":
        return TORCH_MODULES
    from megatron.core.extensions import transformer_engine as te

    return LayerModules(
        norm=te.TENorm,
        norm_column=te.TELayerNormColumnParallelLinear,
        column=te.TEColumnParallelLinear,
        row=te.TERowParallelLinear,
        core_attention=te.TEDotProductAttention,
        grouped_column=te.TEColumnParallelGroupedLinear,
        grouped_row=te.TERowParallelGroupedLinear,
        router=TopKRouter,
    )


def block_spec(config: TransformerConfig, fields: Fields, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers of one pipeline stage, and the norm at the end of the last stage."""
    modules = select_modules(config)
    written = config.pipeline_model_parallel_layout
    if written is not None:
        layers = list(written.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage))
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        layers = list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)))
    specs = [layer_spec(config, fields, layer, modules) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=modules.norm)


def layer_spec(config: TransformerConfig, fields: Fields, layer: int, modules: LayerModules) -> ModuleSpec:
    """Return the spec of layer `layer` of the model, from 0."""
    has_experts = config.num_moe_experts is not None
    if has_experts:
        frequency = config.moe_layer_freq
        has_experts = bool(frequency[layer]) if isinstance(frequency, list) else layer % frequency == 0
    if has_experts:
        experts = MLPSubmodules(linear_fc1=modules.grouped_column, linear_fc2=modules.grouped_row)
        shared = MLPSubmodules(linear_fc1=modules.column, linear_fc2=modules.row)
        mlp = ModuleSpec(
            module=MoELayer,
            submodules=MoESubmodules(
                router=modules.router,
                experts=ModuleSpec(module=TEGroupedMLP, submodules=experts),
                shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=shared),
            ),
        )
    else:
        linears = MLPSubmodules(linear_fc1=modules.norm_column, linear_fc2=modules.row)
        mlp = ModuleSpec(module=MLP, submodules=linears)
    return ModuleSpec(
        module=SandwichLayer if fields.get("post_self_attn_layernorm") else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=modules.norm if config.multi_latent_attention else IdentityOp,
            self_attention=attention_spec(config, fields, layer, modules),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=modules.norm if has_experts else IdentityOp,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def attention_spec(config: TransformerConfig, fields: Fields, layer: int, modules: LayerModules) -> ModuleSpec:
    """Return the token mixer of layer `layer`; except for latent attention, it includes the norm before it."""
    if config.multi_latent_attention:
        indexed = fields.get("dsa_indexer_layers")
        core = ModuleSpec(module=SparseAttention, params={"indexed": indexed}) if indexed else modules.core_attention
        return ModuleSpec(
            module=SparseLatentAttention if indexed else LatentAttention,
            params={"attn_mask_type": AttnMaskType.causal, "latent_eps": fields["latent_layernorm_epsilon"]},
            submodules=MLASelfAttentionSubmodules(
                linear_q_proj=modules.column,
                linear_q_up_proj=modules.norm_column,
                linear_kv_up_proj=modules.norm_column,
                core_attention=core,
                linear_proj=modules.row,
            ),
        )
    if fields.get("experimental_attention_variant") == "gated_delta_net" and fields["linear_attention_freq"][layer]:
        return ModuleSpec(
            module=GatedDeltaNet,
            params={"backend": fields.get("qwen_gdn_backend")},
            submodules=GatedDeltaNetSubmodules(in_proj=modules.norm_column, out_proj=modules.row),
        )
    head_norm = modules.norm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=GatedSelfAttention if config.attention_output_gate else SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=modules.norm_column,
            core_attention=modules.core_attention,
            linear_proj=modules.row,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
