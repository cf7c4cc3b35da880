"""Models of Hugging Face folders, sharded over the ranks."""

from __future__ import annotations

import torch

from slime.config import Config
from slime.config.start import Start
from slime.train.backends.fsdp.backend import FSDPBackend
from slime.train.backends.fsdp.loading import load_critic, load_policy
from slime.train.backends.fsdp.packed_model import PolicyModel
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
        sharded = shard_ranks(world)
        self.topology, self._mesh = sharded.topology, sharded.mesh

    def policy(self, config: Config, start: Start) -> FSDPBackend:
        return FSDPBackend(
            config,
            self.topology,
            self._mesh,
            self._load(start, torch.float32),
            compute_dtype=self._compute_dtype,
            progress=self.progress,
            load_frozen=lambda source: self._load(source, self._compute_dtype),
        )

    def critic(self, config: Config, start: Start) -> FSDPBackend:
        module = load_critic(config, str(start.hf_folder or config.hf_checkpoint))
        return FSDPBackend(
            config, self.topology, self._mesh, module, compute_dtype=self._compute_dtype, progress=self.progress
        )

    def _load(self, source: Start, dtype: torch.dtype) -> PolicyModel:
        """A model that is not sharded yet; what a checkpoint continues is put into it later, whole."""
        module = load_policy(self._config, str(source.hf_folder or self._config.hf_checkpoint), dtype)
        if source.checkpoint is not None and not source.resumes:
            CheckpointFolder(source.checkpoint).put_weights_into(module.model, self._config)
        return module
