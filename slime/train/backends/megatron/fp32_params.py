"""The float32 master copies that Megatron's optimizer keeps of this rank's parameters, and the moments of Adam.

Invariant: if the optimizers of several ranks share a parameter, each has a contiguous range of its flattened numbers,
and all ranks know all ranges. A parameter that is float32 itself is its own master copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer


@dataclass(frozen=True)
class ParamRange:
    """The range [begin, end) of a parameter's flattened numbers that one rank of the world updates."""

    rank: int
    begin: int
    end: int


@dataclass(frozen=True)
class MasterParam:
    """The master copy of one trained parameter: the ranges that ranks update, and this rank's numbers."""

    parameter: nn.Parameter
    spans: tuple[ParamRange, ...]
    optimizer: torch.optim.Optimizer
    """The inner optimizer, which computes the update."""
    main: Tensor | None
    """This rank's numbers in float32; None if it has none."""
    is_shared: bool
    """Whether the copies of the model update different ranges of it; else each updates all numbers."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Moments and step; empty before the first update."""
        return {} if self.main is None else self.optimizer.state.get(self.main, {})

    def own(self, rank: int) -> ParamRange | None:
        return next((span for span in self.spans if span.rank == rank), None)

    @property
    def writer(self) -> int:
        """The rank that gathers and writes the whole parameter: the one with the longest range."""
        return max(self.spans, key=lambda span: (span.end - span.begin, -span.rank)).rank

    @property
    def step(self) -> Tensor | None:
        """The number of updates so far; None before the first."""
        found: Tensor | int | None = self.state.get("step")
        if found is None and self.state:
            found = self._group.get("step")
        return None if found is None else torch.as_tensor(found, dtype=torch.float32).reshape(1).cpu()

    @torch.no_grad()
    def put_state(self, moments: Mapping[str, Tensor], step: float) -> None:
        """Overwrite Adam's moments and step of this rank's numbers."""
        if self.main is None:
            return
        state = self.optimizer.state[self.main]
        for name, values in moments.items():
            if name not in state:
                state[name] = torch.zeros_like(self.main, dtype=torch.float32, requires_grad=False)
            state[name].copy_(values.reshape(self.main.shape))
        if isinstance(self.optimizer, torch.optim.Adam):
            state["step"] = torch.tensor(step, dtype=torch.float32)
        else:
            self._group["step"] = int(step)

    @property
    def _group(self) -> dict[str, Any]:
        return next(group for group in self.optimizer.param_groups if any(one is self.main for one in group["params"]))


def find_masters(
    optimizer: ChainedOptimizer, parameters: Mapping[str, nn.Parameter], rank: int
) -> dict[str, MasterParam]:
    """Return the master copies of all trained parameters by global name; `optimizer` is Megatron's for the model."""
    by_parameter = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, MasterParam] = {}
    for one in optimizer.chained_optimizers:
        if one.is_stub_optimizer:
            continue
        for master in (
            _distributed_masters(one)
            if isinstance(one, DistributedOptimizer)
            else _local_masters(one, parameters, rank)
        ):
            if id(master.parameter) in by_parameter:
                found[by_parameter[id(master.parameter)]] = master
    return {name: found[name] for name in parameters if name in found}


def _distributed_masters(optimizer: DistributedOptimizer) -> Iterator[MasterParam]:
    """Yield the parameters of a distributed optimizer, whose ranks split each gradient bucket evenly."""
    for buffer in optimizer.buffers:
        members = dist.get_process_group_ranks(buffer.data_parallel_group)
        for parameter, (begin, end, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            each = bucket.grad_data.numel() // len(members)
            begin, end = begin - bucket.offset, end - bucket.offset
            spans = tuple(
                ParamRange(members[number], max(begin, number * each) - begin, min(end, (number + 1) * each) - begin)
                for number in range(begin // each, -(-end // each))
            )
            place = optimizer.model_param_group_index_map.get(parameter)
            main = None if place is None else optimizer.optimizer.param_groups[place[0]]["params"][place[1]]
            yield MasterParam(parameter, spans, optimizer.optimizer, main, is_shared=True)


def _local_masters(
    optimizer: MegatronOptimizer, parameters: Mapping[str, nn.Parameter], rank: int
) -> Iterator[MasterParam]:
    """Yield the parameters of an optimizer that updates all of their numbers on this rank."""
    updated = {id(one) for group in optimizer.optimizer.param_groups for one in group["params"]}
    for parameter in parameters.values():
        copy = getattr(parameter, "main_param", None)
        main = parameter if copy is None else copy
        if id(main) in updated:
            whole = (ParamRange(rank, 0, parameter.numel()),)
            yield MasterParam(parameter, whole, optimizer.optimizer, main, is_shared=False)
