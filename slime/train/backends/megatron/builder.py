"""Builds this process's Megatron stages for a Hugging Face folder, and reads their weights.

Invariant: no weight is initialised at random. A stage is built with uninitialised memory, except norms (neutral), the
biases of experts and a value head (zero). The caller of `build_stages` fills it from a folder.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from slime.config import Config
from slime.config.initial_weights import InitialWeights
from slime.models.families.tp_sharding import padded_vocab
from slime.models.families.weight_map import Fields
from slime.models.heads import OutputHead
from slime.models.tensor_sources import Source
from slime.models.torch_dist.hugging_face import checkpoint_sources
from slime.train.backends.megatron.backend import MegatronBackend
from slime.train.backends.megatron.config import transformer_config
from slime.train.backends.megatron.cpu_runtime import prepare
from slime.train.backends.megatron.embedding_and_head import (
    OUTPUT_WEIGHT,
    Head,
    emit_hidden_states,
    freeze_padding_lookups,
)
from slime.train.backends.megatron.layout import Layout
from slime.train.backends.megatron.pipeline import StagedModel
from slime.train.backends.megatron.plugin_hooks import MegatronHooks
from slime.train.backends.megatron.process_groups import form_groups
from slime.train.backends.megatron.routing_replay import MegatronRoutingReplay
from slime.train.backends.megatron.spec.linear import mark_tensor_parallel
from slime.train.backends.megatron.spec.provider import block_spec
from slime.train.backends.megatron.weights import ModelFolder, read_masters, read_weights
from slime.train.checkpoints.folder import CheckpointFolder
from slime.train.timers import RankProgress
from slime.train.topology import Ranks

_GPT_MODEL_FIELDS = (
    "max_sequence_length",
    "position_embedding_type",
    "rotary_percent",
    "rotary_base",
    "rope_scaling",
    "rope_scaling_factor",
    "seq_len_interpolation_factor",
)
"""Arguments of GPTModel that a family's fields may set."""


def build_stages(
    config: TransformerConfig,
    fields: Fields,
    *,
    vocab_multiple: int = 128,
    value_head: bool = False,
    hooks: MegatronHooks | None = None,
) -> list[GPTModel]:
    """Build the stage of this process, or its interleaved stages in order.

    `fields` are the family's fields of the model, `vocab_multiple` is --make-vocab-size-divisible-by, and `hooks` may
    have the user's model provider.
    """
    virtual = config.virtual_pipeline_model_parallel_size
    stages = []
    for vp_stage in range(virtual) if virtual is not None and virtual > 1 else [None]:
        alone = vp_stage is None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=alone, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=alone, vp_stage=vp_stage)

        def default(first: bool = first, last: bool = last, vp_stage: int | None = vp_stage) -> GPTModel:
            return GPTModel(
                config,
                block_spec(config, fields, vp_stage),
                vocab_size=padded_vocab(fields["vocab_size"], vocab_multiple, config.tensor_model_parallel_size),
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=fields["share_embeddings_and_output_weights"] and not value_head,
                vp_stage=vp_stage,
                **{name: fields[name] for name in _GPT_MODEL_FIELDS if name in fields},
            )

        stage = default() if hooks is None else hooks.stage(config, first, last, vp_stage, default)
        if last and value_head:
            stage.output_layer = MegatronValueHead(config)
        mark_tensor_parallel(stage)
        # Gradients of experts are summed over the ranks with the same experts. Megatron does this only with several
        # expert-parallel ranks, but ranks that shard all other matrices and have the same experts whole also need it,
        # since they see different tokens
        like_the_rest = (
            config.expert_model_parallel_size == 1
            and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        )
        for name, parameter in stage.named_parameters():
            if ".mlp.experts." in name:
                parameter.allreduce = like_the_rest
        # routers are created on the host
        stages.append(stage if config.use_cpu_initialization else stage.cuda())
    return stages


class MegatronValueHead(nn.Module):
    """An output layer of one number per token, equal on all tensor-parallel ranks; its weight starts at zero."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))


class MegatronBuilder:
    """Builds the models of a run: trained ones with float32 master weights, frozen ones in the compute dtype."""

    def __init__(self, config: Config, world: Ranks, *, compute_dtype: torch.dtype, progress: RankProgress) -> None:
        self._config = config
        self._compute_dtype = compute_dtype
        self.progress = progress
        if world.device.type == "cpu":
            prepare()
        num_layers = self._folder(InitialWeights()).fields["num_layers"]
        self.groups = form_groups(Layout.from_config(config, num_layers=num_layers, world=world.size), world)
        self.topology = self.groups.topology
        model_parallel_cuda_manual_seed(config.seed)
        self._hooks = MegatronHooks(config)
        self._hooks.after_init()

    def policy(self, config: Config, start: InitialWeights) -> MegatronBackend:
        folder = self._folder(start)
        return self._trained(config, start, folder, self._policy_head(folder))

    def critic(self, config: Config, start: InitialWeights) -> MegatronBackend:
        return self._trained(config, start, self._folder(start), Head())

    def _trained(self, config: Config, start: InitialWeights, folder: ModelFolder, head: Head) -> MegatronBackend:
        model = self._model(config, folder, head)
        if not start.resumes:  # otherwise the checkpoint has all weights
            self._read(model, folder)
        backend = MegatronBackend(
            config,
            model,
            folder,
            progress=self.progress,
            hooks=self._hooks,
            load_frozen=self._load_frozen,
            like_policy=partial(self._model, config, folder, head),
        )
        if not start.resumes:
            read_masters(backend.masters, folder, self.groups, without=_parameters_without_source(head))
        return backend

    def _load_frozen(self, source: InitialWeights) -> StagedModel:
        folder = self._folder(source)
        model = self._model(self._config, folder, self._policy_head(folder))
        self._read(model, folder)
        return model

    def _model(self, config: Config, folder: ModelFolder, head: Head) -> StagedModel:
        """Build the stages of a model without reading their weights."""
        settings = transformer_config(
            folder.fields,
            config,
            self.groups.layout,
            compute_dtype=self._compute_dtype,
            device=self.topology.device,
        )
        stages = build_stages(
            settings,
            {**folder.fields, "qwen_gdn_backend": config.qwen_gdn_backend},
            vocab_multiple=folder.vocab_multiple,
            value_head=head.output is None,
            hooks=self._hooks,
        )
        if self.groups.is_last_stage:
            emit_hidden_states(stages[-1])
        padding = folder.config.get_text_config().pad_token_id
        if stages[0].pre_process and padding is not None:
            freeze_padding_lookups(stages[0], padding % folder.fields["vocab_size"], self.groups.tensor)
        repeats = config.use_routing_replay and head.output is not None
        return StagedModel(
            stages, stages, head, self.groups, MegatronRoutingReplay(stages, self.groups) if repeats else None
        )

    def _read(self, model: StagedModel, folder: ModelFolder) -> None:
        read_weights(model.stages, folder, self.groups, self.progress, without=_parameters_without_source(model.head))

    def _policy_head(self, folder: ModelFolder) -> Head:
        config = self._config
        sampled = config.loss_type != "sft_loss"  # SFT data was not sampled at a temperature
        return Head(
            folder.fields["vocab_size"],
            OutputHead.from_config(folder.config),
            temperature=config.rollout_temperature if sampled else 1.0,
            chunk_rows=config.log_probs_chunk_size,
        )

    def _folder(self, source: InitialWeights) -> ModelFolder:
        config = self._config
        return ModelFolder.read(
            Path(str(source.hf_folder or config.hf_checkpoint)),
            vocab_multiple=config.make_vocab_size_divisible_by,
            trust_remote_code=config.trust_remote_code,
            instead=partial(self._override_sources, source) if source.folder not in (None, source.hf_folder) else None,
        )

    def _override_sources(self, source: InitialWeights, folder: ModelFolder) -> dict[str, Source]:
        """Return the tensors of the checkpoint that a model starts from; a resumed checkpoint is loaded later."""
        if source.megatron is not None:
            return checkpoint_sources(folder.path, source.megatron)
        if source.checkpoint is None or source.resumes:
            return {}
        return CheckpointFolder(source.checkpoint).weight_sources(folder.config, folder.shapes, self._config)


def _parameters_without_source(head: Head) -> tuple[str, ...]:
    """Return the parameters that no folder has: a new value head stays zero."""
    return (OUTPUT_WEIGHT,) if head.output is None else ()
