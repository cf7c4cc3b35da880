"""Groups of training ranks and their collectives.

Invariant: every collective has the run's deadline, and reductions of small float vectors give the same result on all
ranks of their group. Of the ranks that see the same samples exactly one counts, so a sum over the world counts every
sample once. The backward pass of `exchange` and `gather_parts` gives each rank the gradient of its own input, for a
loss that all ranks compute alike, so the sum of gradients over ranks is the gradient of the loss.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from slime.cluster.ports import listening_socket, sockets_at
from slime.train.processes import TrainerRendezvous

COLLECTIVE_MINUTES = 7 * 24 * 60
"""Timeout of collectives. It is long, because the driver, which receives progress reports, detects hangs and stops all
ranks; a rank that waits in a collective cannot tell if the others hang or work."""


class RankSum(Protocol):
    """Sums small tensors over ranks."""

    @property
    def device(self) -> torch.device: ...

    def sum(self, values: torch.Tensor) -> torch.Tensor: ...


class ProcessRanks:
    """The ranks of the default process group; this process alone if none is initialised."""

    @property
    def device(self) -> torch.device:
        on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized():
            dist.all_reduce(values, op=dist.ReduceOp.SUM)
        return values


@dataclass(frozen=True)
class Ranks:
    """The position of this process in one group of ranks (`group` None: all processes, or only this one)."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> Ranks:
        return cls(dist.get_rank(group), dist.get_world_size(group), device, group)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self.group)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Take the maximum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Gather tensors of equal shape from all ranks, in rank order, on the host."""
        if self.size == 1:
            return [values.cpu()]
        local = values.to(self.device)
        gathered = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(gathered, local, group=self.group)
        return [tensor.cpu() for tensor in gathered]

    def union(self, names: Iterable[str]) -> set[str]:
        """Return the union of the names of all ranks."""
        own = json.dumps(sorted(names)).encode()
        longest = int(self.max(torch.tensor([len(own)], device=self.device)).item())
        padded = torch.tensor(list(own.ljust(longest)), dtype=torch.uint8)
        return {name for part in self.gather(padded) for name in json.loads(bytes(part.tolist()))}

    def barrier(self) -> None:
        """Wait until all ranks get here."""
        self.sum(torch.zeros(1, device=self.device)).item()


@dataclass(frozen=True)
class Topology:
    """The groups of ranks that this rank is in.

    `data`: ranks with other samples and the same part of the model. `context`: ranks with the same samples and other
    slices of every sequence. `model`: ranks that together hold one copy of the model, split by tensor and pipeline
    parallelism (only this rank if the model is only sharded).
    """

    world: Ranks
    data: Ranks
    context: Ranks
    model: Ranks
    is_last_stage: bool = True

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def counts(self) -> bool:
        """True if this rank reports the metrics of its samples: the first context rank of the last pipeline stage."""
        return self.is_last_stage and self.context.rank == 0 and self.model.rank == self.model.size - 1

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all samples of the step the values that each rank computed for its own; on every rank."""
        return self.world.sum(values if self.counts else torch.zeros_like(values))

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Take the maximum like `total`, for non-negative values."""
        return self.world.max(values if self.counts else torch.zeros_like(values))


def join_ranks(device: str, *, meeting: TrainerRendezvous, timeout_minutes: int) -> Ranks:
    """Join the process group described by RANK, WORLD_SIZE and LOCAL_RANK."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if meeting.address is not None:
        os.environ.update(sockets_at(meeting.address))
    chosen = torch.device(device)
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(chosen)
    timeout = timedelta(minutes=timeout_minutes)
    store: dist.Store
    if meeting.file:
        store = dist.FileStore(meeting.file, world_size)
    else:  # the listening socket is made here, because torch's own server listens on all interfaces
        listener = listening_socket(meeting.host, meeting.port).detach() if rank == 0 else None
        served = dist.TCPStore(meeting.host, meeting.port, world_size, rank == 0, timeout, master_listen_fd=listener)
        store = dist.PrefixStore(meeting.prefix, served)
    dist.init_process_group(
        "nccl" if chosen.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=chosen if chosen.type == "cuda" else None,
    )
    return Ranks(rank, world_size, chosen)


def exchange(blocks: Tensor, ranks: Ranks) -> Tensor:
    """Exchange blocks [n, ...] all-to-all: block r goes to rank r, and block r of the result comes from rank r."""
    exchanged: Tensor = _Exchange.apply(blocks, ranks)
    return exchanged


def gather_parts(own: Tensor, counts: Sequence[int], ranks: Ranks) -> Tensor:
    """Gather the rows of all ranks, in rank order; rank r has `counts[r]` rows, and all ranks know the counts."""
    if ranks.size == 1:
        return own
    whole: Tensor = _GatherParts.apply(own, tuple(counts), ranks)
    return whole


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _all_to_all(blocks, ranks)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(upstream[0], ctx.ranks), None


def _all_to_all(blocks: Tensor, ranks: Ranks) -> Tensor:
    sent = blocks.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks.group)
    return received


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: tuple[int, ...], ranks: Ranks) -> Tensor:
        begin = sum(counts[: ranks.rank])
        ctx.own = slice(begin, begin + counts[ranks.rank])
        longest = max(counts)
        sent = pad(own, (0, 0) * (own.dim() - 1) + (0, longest - len(own))).contiguous()
        received = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(received, sent, group=ranks.group)
        return torch.cat([block[:count] for block, count in zip(received, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        return upstream[0][ctx.own], None, None
