"""The backend that the flags ask for; the one place that knows all of them."""

from __future__ import annotations

import torch

from slime.config import Config
from slime.config.parallelism import uses_megatron
from slime.train.backends.protocol import Builder
from slime.train.progress import Progress
from slime.train.topology import Ranks


def make_builder(config: Config, world: Ranks, *, compute_dtype: torch.dtype, progress: Progress) -> Builder:
    """Forms the groups of ranks; all ranks call it together."""
    if uses_megatron(config):
        from slime.train.backends.megatron.builder import MegatronBuilder

        return MegatronBuilder(config, world, compute_dtype=compute_dtype, progress=progress)
    from slime.train.backends.fsdp.builder import FSDPBuilder

    return FSDPBuilder(config, world, compute_dtype=compute_dtype, progress=progress)
