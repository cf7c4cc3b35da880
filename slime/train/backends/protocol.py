"""What training asks of a backend, whatever it shards with.

Invariant: gradients of all micro-batches and all ranks are summed, not averaged, so the loss that a step adds up is the
loss that is minimised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from transformers import PretrainedConfig

from slime.train.backends.fsdp.packed_model import PackedModel
from slime.train.distributed import Ranks
from slime.train.progress import Progress
from slime.train.rates import Rates

NamedTensor = tuple[str, torch.Tensor]


class TrainBackend(Protocol):
    ranks: Ranks
    model_config: PretrainedConfig
    module: PackedModel
    progress: Progress

    def begin_micro_batch(self, *, last: bool) -> None:
        """Gradients are reduced over ranks in the backward of the last micro-batch of a step."""

    def clip_gradients(self) -> torch.Tensor:
        """The global gradient norm before clipping, as a scalar tensor on the device."""

    def update(self, rates: Rates) -> None:
        """Apply the optimizer and drop the gradients."""

    def drop_gradients(self) -> None:
        """Forget what was computed since the last update."""

    def forget_optimizer_state(self) -> None:
        """Adam starts anew."""

    def full_parameters(self) -> Iterator[NamedTensor]:
        """Master weights under Hugging Face module names, whole, each tied weight once; all ranks iterate together."""

    def full_optimizer_state(self) -> Iterator[NamedTensor]:
        """`{moment}/{parameter name}` tensors, whole; all ranks iterate together."""

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes that `load_parameter` accepts."""

    def parameter_facts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Whole shape and dtype of what `full_parameters` yields, in its order."""

    def local_parameters(self) -> Iterator[NamedTensor]:
        """This rank's parts of what `full_parameters` yields, in its order; nothing is gathered."""

    def gather_part(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor that lies on the ranks as parameter `name` does, of any dtype; all ranks together."""

    def load_parameter(self, name: str, full: torch.Tensor) -> None:
        """Overwrite this rank's part of one parameter."""

    def load_optimizer_state(self, name: str, full: dict[str, torch.Tensor]) -> None:
        """Overwrite this rank's part of one parameter's optimizer state."""
