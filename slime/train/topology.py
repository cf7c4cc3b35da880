"""Who is who among the training processes.

Invariant: every collective has the run's deadline, and reductions of small float vectors give the same result on all
ranks of their group. Of the ranks that see the same samples exactly one counts, so a sum over the world counts every
sample once.
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
from slime.train.processes import Meeting

COLLECTIVE_MINUTES = 7 * 24 * 60
"""A rank that waits in a collective cannot know whether the others hang or work: the driver, which hears of their
progress, decides, and ends all of them."""


class Summing(Protocol):
    """Whoever adds up small tensors over ranks."""

    @property
    def device(self) -> torch.device: ...

    def sum(self, values: torch.Tensor) -> torch.Tensor: ...


class ProcessRanks:
    """The ranks of the process group that this process is in; it alone where there is none."""

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
    """This process among its peers in one group (`group` None: all processes, or this one alone)."""

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
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Tensors of one shape from all ranks, in rank order, on the host."""
        if self.size == 1:
            return [values.cpu()]
        local = values.to(self.device)
        gathered = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(gathered, local, group=self.group)
        return [tensor.cpu() for tensor in gathered]

    def union(self, names: Iterable[str]) -> set[str]:
        """All names that any rank has."""
        own = json.dumps(sorted(names)).encode()
        longest = int(self.max(torch.tensor([len(own)], device=self.device)).item())
        padded = torch.tensor(list(own.ljust(longest)), dtype=torch.uint8)
        return {name for part in self.gather(padded) for name in json.loads(bytes(part.tolist()))}

    def barrier(self) -> None:
        self.sum(torch.zeros(1, device=self.device)).item()


@dataclass(frozen=True)
class Topology:
    """What the processes of a run share and what each has for itself.

    `data`: ranks with other samples and the same part of the model. `context`: the same samples, other slices of every
    sequence. `model`: those that hold one copy of the model between them by tensor and pipeline (this rank alone, where
    the model is only sharded).
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
        """Whether this rank's metrics are those of its samples: the last stage has them, and its first rank reports."""
        return self.is_last_stage and self.context.rank == 0 and self.model.rank == self.model.size - 1

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all samples of the step of what each rank found for its own; known to every rank."""
        return self.world.sum(values if self.counts else torch.zeros_like(values))

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The same for maxima of numbers that are not negative."""
        return self.world.max(values if self.counts else torch.zeros_like(values))


def join_ranks(device: str, *, meeting: Meeting, timeout_minutes: int) -> Ranks:
    """Join the group described by RANK, WORLD_SIZE and LOCAL_RANK."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if meeting.address is not None:
        os.environ.update(sockets_at(meeting.address))
    chosen = torch.device(device)
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(chosen)
    timeout = timedelta(minutes=timeout_minutes)
    dist.init_process_group(
        "nccl" if chosen.type == "cuda" else "gloo",
        store=_open_store(meeting, rank, world_size, timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=chosen if chosen.type == "cuda" else None,
    )
    return Ranks(rank, world_size, chosen)


def _open_store(meeting: Meeting, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    if meeting.file:
        return dist.FileStore(meeting.file, world_size)
    # torch's own server listens on all interfaces
    listener = listening_socket(meeting.host, meeting.port).detach() if rank == 0 else None
    served = dist.TCPStore(meeting.host, meeting.port, world_size, rank == 0, timeout, master_listen_fd=listener)
    return dist.PrefixStore(meeting.prefix, served)


# Collectives that gradients go through.
#
# Invariant: the backward of each gives a rank the gradient of what the rank put in, for a loss that all ranks compute
# alike. So parameters get on each rank the gradient of its own part, and the sum over ranks is that of the loss.


def exchange(blocks: Tensor, ranks: Ranks) -> Tensor:
    """[n, ...] to [n, ...]: block r goes to rank r, and block r of the result came from it (an all-to-all)."""
    exchanged: Tensor = _Exchange.apply(blocks, ranks)
    return exchanged


def gather_parts(own: Tensor, counts: Sequence[int], ranks: Ranks) -> Tensor:
    """The rows of all ranks in their order, on every rank; rank r brings `counts[r]` of them, which all ranks know."""
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
