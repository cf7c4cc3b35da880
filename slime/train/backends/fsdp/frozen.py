"""Models that are not trained: reference, teacher, and the weights the engines sample with.

Invariant: a frozen model is sharded as the policy is, so copying the policy into it moves nothing between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from slime.train.backends.fsdp.backend import FSDPBackend, local_part, shard, shard_like, whole
from slime.train.backends.fsdp.packed_model import PolicyModel
from slime.train.backends.protocol import NamedTensor
from slime.train.distributed import Ranks


class FrozenModel:
    """Log-probs of a model in the compute dtype."""

    def __init__(self, module: PolicyModel, ranks: Ranks) -> None:
        self.module = module
        self.ranks = ranks
        module.requires_grad_(False)
        shard(module, ranks, MixedPrecisionPolicy())
        self._parameters = dict(module.model.named_parameters())

    @torch.no_grad()
    def copy_from(self, policy: FSDPBackend) -> None:
        """Take over the policy's present weights."""
        self._reshard()
        source = dict(policy.module.model.named_parameters())
        for name, parameter in self._parameters.items():
            local_part(parameter).copy_(local_part(source[name]))

    def local_copy(self) -> list[torch.Tensor]:
        """This rank's parts, on the host."""
        return [local_part(parameter).detach().to("cpu", copy=True) for parameter in self._parameters.values()]

    @torch.no_grad()
    def load_local(self, parts: Sequence[torch.Tensor]) -> None:
        """Take over what `local_copy` gave."""
        self._reshard()
        for parameter, part in zip(self._parameters.values(), parts, strict=True):
            local_part(parameter).copy_(part)

    def full_parameters(self) -> Iterator[NamedTensor]:
        """Whole tensors; all ranks iterate together."""
        for name, parameter in self._parameters.items():
            yield name, whole(parameter.detach())

    @torch.no_grad()
    def load_parameter(self, name: str, full: torch.Tensor) -> None:
        self._reshard()
        parameter = self._parameters[name]
        local_part(parameter).copy_(local_part(shard_like(parameter, full, self.ranks)))

    def _reshard(self) -> None:
        """A forward without a backward leaves gathered copies behind, which would outlive the new weights."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
