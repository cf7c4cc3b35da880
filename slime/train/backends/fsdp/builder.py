"""Models of Hugging Face folders, sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slime.config import Config
from slime.config.batch import copy_size
from slime.config.initial_weights import Start, base_path
from slime.models.tensor_sources import Held
from slime.train.backends.fsdp.backend import FSDPBackend
from slime.train.backends.fsdp.check import check_packed
from slime.train.backends.fsdp.loading import load_critic, load_policy
from slime.train.backends.fsdp.lora import lora_of, put_adapter, train_head
from slime.train.backends.fsdp.packed_model import PackedModel, PolicyModel, ValueModel
from slime.train.backends.fsdp.topology import shard_ranks
from slime.train.checkpoints.folder import CheckpointFolder
from slime.train.progress import Progress
from slime.train.topology import Ranks


class FSDPBuilder:
    """Master weights are float32; what is frozen is in the compute dtype."""

    def __init__(self, config: Config, world: Ranks, *, compute_dtype: torch.dtype, progress: Progress) -> None:
        self._config = config
        self._compute_dtype = compute_dtype
        self.progress = progress
        sharded = shard_ranks(world, copy_size=copy_size(config), context_size=config.context_parallel_size)
        self.topology, self._mesh = sharded.topology, sharded.mesh
        self._checked: set[str] = set()  # configs

    def policy(self, config: Config, start: Start) -> FSDPBackend:
        module = self._load(start, self._held_in(config))
        if module.routers is not None:
            module.routers.check()
        return self._trained(
            config,
            start,
            module,
            lambda source: self._load(source, self._compute_dtype),
        )

    def critic(self, config: Config, start: Start) -> FSDPBackend:
        module = load_critic(config, start, self._held_in(config))
        self._check(module)
        module.share_rows(self.topology.context)
        return self._trained(config, start, module, _loads_nothing)

    def _held_in(self, config: Config) -> torch.dtype:
        """The dtype of the weights: float32 for those that are trained, or what they are used in beside an adapter."""
        return torch.float32 if lora_of(config) is None else self._compute_dtype

    def _trained(
        self, config: Config, start: Start, module: PackedModel, load_frozen: Callable[[Start], PolicyModel]
    ) -> FSDPBackend:
        lora, layers = lora_of(config), None
        if lora is not None:
            patterns = {"freeze": config.freeze_params_name_list, "only_train": config.only_train_params_name_list}
            layers = put_adapter(module.model, lora, **patterns)
            values = layers.start_values(config.seed, config.lora_load)
            module.sources |= {name: Held(value) for name, value in values}
        elif start.resumes:  # the checkpoint has all weights
            module.read_nothing()
        if layers is not None and isinstance(module, ValueModel):
            train_head(module.model)
        return FSDPBackend(
            config,
            self.topology,
            self._mesh,
            module,
            compute_dtype=self._compute_dtype,
            progress=self.progress,
            load_frozen=load_frozen,
            layers=layers,
            base=base_path(config, start),
        )

    def _load(self, source: Start, dtype: torch.dtype) -> PolicyModel:
        """A model whose weights are not read yet; what a checkpoint continues is put into it later."""
        module = load_policy(self._config, source, dtype)
        self._check(module)
        module.share_rows(self.topology.context)
        if source.checkpoint is not None and not source.resumes:
            CheckpointFolder(source.checkpoint).put_weights_into(module.model, module.sources, self._config)
        return module

    def _check(self, module: PackedModel) -> None:
        """Compare models of this config with transformers, once."""
        facts = module.model.config.to_json_string(use_diff=False)
        if facts not in self._checked:
            check_packed(module.model)
            self._checked.add(facts)


def _loads_nothing(source: Start) -> PolicyModel:
    raise RuntimeError("a value model has no frozen sets")
