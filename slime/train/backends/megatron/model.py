"""This process's stages of a model, with weights that are still to be read.

Invariant: no weight is drawn at random or computed: what a stage is built with is memory as it was found, except norms
(neutral), biases of experts and a value head (zero). Whoever builds a model fills it from a folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from slime.models.families.tp_sharding import padded_vocab
from slime.train.backends.megatron.hooks import Hooks
from slime.train.backends.megatron.spec.linear import mark_tensor_parallel
from slime.train.backends.megatron.spec.provider import block_spec

_ARGUMENTS = (
    "max_sequence_length",
    "position_embedding_type",
    "rotary_percent",
    "rotary_base",
    "rope_scaling",
    "rope_scaling_factor",
    "seq_len_interpolation_factor",
)
"""Of GPTModel's own arguments, those that a family gives."""


def build_stages(
    config: TransformerConfig,
    fields: Mapping[str, Any],
    *,
    vocab_multiple: int = 128,
    value_head: bool = False,
    hooks: Hooks | None = None,
) -> list[GPTModel]:
    """One stage, or the interleaved ones of this process, in their order.

    `fields` is what the family says of the model; `vocab_multiple` is --make-vocab-size-divisible-by; `hooks` may have
    a function of the user's that makes stages.
    """
    virtual = config.virtual_pipeline_model_parallel_size
    stages = range(virtual) if virtual is not None and virtual > 1 else [None]
    return [_stage(config, fields, vocab_multiple, value_head, vp_stage, hooks) for vp_stage in stages]


def _stage(
    config: TransformerConfig,
    fields: Mapping[str, Any],
    vocab_multiple: int,
    value_head: bool,
    vp_stage: int | None,
    hooks: Hooks | None,
) -> GPTModel:
    alone = vp_stage is None
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=alone, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=alone, vp_stage=vp_stage)

    def default() -> GPTModel:
        return GPTModel(
            config,
            block_spec(config, fields, vp_stage),
            vocab_size=padded_vocab(fields["vocab_size"], vocab_multiple, config.tensor_model_parallel_size),
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=fields["share_embeddings_and_output_weights"] and not value_head,
            vp_stage=vp_stage,
            **{name: fields[name] for name in _ARGUMENTS if name in fields},
        )

    stage = default() if hooks is None else hooks.stage(config, first, last, vp_stage, default)
    if last and value_head:
        stage.output_layer = ValueHead(config)
    mark_tensor_parallel(stage)
    _mark_experts(stage, config)
    return stage if config.use_cpu_initialization else stage.cuda()  # routers are made on the host


def _mark_experts(stage: nn.Module, config: TransformerConfig) -> None:
    """Let gradients of experts be summed over the ranks that have the same ones.

    Megatron does so where there are several expert-parallel ranks; but those that cut all other matrices and have the
    same experts whole see other tokens each, too.
    """
    like_the_rest = (
        config.expert_model_parallel_size == 1
        and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
    )
    for name, parameter in stage.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = like_the_rest  # type: ignore[attr-defined]


class ValueHead(nn.Module):
    """One number a token in the place of the output layer, the same on all tensor-parallel ranks; zero at first."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
