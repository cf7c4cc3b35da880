"""Models of Hugging Face folders, cut over the ranks as the flags say."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from slime.config import Config
from slime.config.initial_weights import Start
from slime.models.heads import OutputHead
from slime.models.tensor_sources import Source
from slime.models.torch_dist.hugging_face import read_in_place_of
from slime.train.backends.megatron.backend import MegatronBackend
from slime.train.backends.megatron.cpu_runtime import prepare
from slime.train.backends.megatron.groups import form_groups
from slime.train.backends.megatron.heads import (
    OUTPUT_WEIGHT,
    Head,
    PolicyHead,
    ValueHead,
    hand_on_hidden,
    leave_padding,
)
from slime.train.backends.megatron.hooks import Hooks
from slime.train.backends.megatron.layout import Layout
from slime.train.backends.megatron.model import build_stages
from slime.train.backends.megatron.passes import StagedModel
from slime.train.backends.megatron.replay import Routers
from slime.train.backends.megatron.settings import transformer_config
from slime.train.backends.megatron.weights import ModelFolder, read_masters, read_weights
from slime.train.checkpoints.folder import CheckpointFolder
from slime.train.progress import Progress
from slime.train.topology import Ranks


class MegatronBuilder:
    """Master weights are float32; what is frozen is in the compute dtype."""

    def __init__(self, config: Config, world: Ranks, *, compute_dtype: torch.dtype, progress: Progress) -> None:
        self._config = config
        self._compute_dtype = compute_dtype
        self.progress = progress
        if world.device.type == "cpu":
            prepare()
        num_layers = self._folder(Start()).fields["num_layers"]
        self.groups = form_groups(Layout.from_config(config, num_layers=num_layers, world=world.size), world)
        self.topology = self.groups.topology
        model_parallel_cuda_manual_seed(config.seed)
        self._hooks = Hooks(config)
        self._hooks.initialised()

    def policy(self, config: Config, start: Start) -> MegatronBackend:
        folder = self._folder(start)
        return self._trained(config, start, folder, self._policy_head(folder))

    def critic(self, config: Config, start: Start) -> MegatronBackend:
        return self._trained(config, start, self._folder(start), ValueHead())

    def _trained(self, config: Config, start: Start, folder: ModelFolder, head: Head) -> MegatronBackend:
        model = self._model(config, folder, head)
        if not start.resumes:  # else the checkpoint has all weights
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
            read_masters(backend.masters, folder, self.groups, without=_new(head))
        return backend

    def _load_frozen(self, source: Start) -> StagedModel:
        folder = self._folder(source)
        model = self._model(self._config, folder, self._policy_head(folder))
        self._read(model, folder)
        return model

    def _model(self, config: Config, folder: ModelFolder, head: Head) -> StagedModel:
        """Stages whose weights are not read yet."""
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
            value_head=isinstance(head, ValueHead),
            hooks=self._hooks,
        )
        if self.groups.is_last_stage:
            hand_on_hidden(stages[-1])
        padding = folder.config.get_text_config().pad_token_id
        if stages[0].pre_process and padding is not None:
            leave_padding(stages[0], padding % folder.fields["vocab_size"], self.groups.tensor)
        repeats = config.use_routing_replay and not isinstance(head, ValueHead)
        return StagedModel(stages, stages, head, self.groups, Routers(stages, self.groups) if repeats else None)

    def _read(self, model: StagedModel, folder: ModelFolder) -> None:
        read_weights(model.stages, folder, self.groups, self.progress, without=_new(model.head))

    def _policy_head(self, folder: ModelFolder) -> PolicyHead:
        config = self._config
        sampled = config.loss_type != "sft_loss"  # answers that were read were sampled at no temperature
        return PolicyHead(
            folder.fields["vocab_size"],
            OutputHead.from_config(folder.config),
            temperature=config.rollout_temperature if sampled else 1.0,
            chunk_rows=config.log_probs_chunk_size,
        )

    def _folder(self, source: Start) -> ModelFolder:
        config = self._config
        return ModelFolder.read(
            Path(str(source.hf_folder or config.hf_checkpoint)),
            vocab_multiple=config.make_vocab_size_divisible_by,
            trust_remote_code=config.trust_remote_code,
            instead=partial(self._instead, source) if source.folder not in (None, source.hf_folder) else None,
        )

    def _instead(self, source: Start, folder: ModelFolder) -> dict[str, Source]:
        """The tensors of a checkpoint whose weights a model starts from; what is resumed is put in later."""
        if source.megatron is not None:
            return read_in_place_of(folder.path, source.megatron)
        if source.checkpoint is None or source.resumes:
            return {}
        return CheckpointFolder(source.checkpoint).weight_sources(folder.config, folder.shapes, self._config)


def _new(head: Head) -> tuple[str, ...]:
    """What no folder has: a new value head stays zero."""
    return (OUTPUT_WEIGHT,) if isinstance(head, ValueHead) else ()
