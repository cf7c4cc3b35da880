"""Sizes of the parallel groups of processes, computed from the flags without any communication.

Invariant: `tensor x pipeline x context x data` is the number of processes, and so is `expert tensor x expert x pipeline
x expert data` of the same processes. Ranks are numbered with tensor innermost, then context, data and pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.config import Config
from slime.config.parallelism import expert_tensor_size, virtual_stages


@dataclass(frozen=True)
class Layout:
    """Sizes of the groups; every process of the pipeline has `virtual` stages."""

    world: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False

    @classmethod
    def from_config(cls, config: Config, *, num_layers: int, world: int) -> Layout:
        """Read the sizes from flags that passed the checks for divisibility, for a model of `num_layers` layers."""
        return cls(
            world=world,
            tensor=config.tensor_model_parallel_size,
            pipeline=config.pipeline_model_parallel_size,
            virtual=virtual_stages(config, num_layers),
            context=config.context_parallel_size,
            expert=config.expert_model_parallel_size,
            expert_tensor=expert_tensor_size(config),
            sequence_parallel=config.sequence_parallel and config.tensor_model_parallel_size > 1,
        )

    @property
    def copy(self) -> int:
        """Processes that share their samples and one copy of the weights except the experts'."""
        return self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        return self.world // self.copy

    @property
    def expert_data(self) -> int:
        return self.world // (self.expert_tensor * self.expert * self.pipeline)

    @property
    def sequence_multiple(self) -> int:
        """The multiple to which every sequence is padded: two slices for each context-parallel rank."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def row_multiple(self) -> int:
        """The multiple to which a row is padded."""
        return self.sequence_multiple * (self.tensor if self.sequence_parallel else 1)
