"""The process group of the trainer ranks.

Invariant: every collective has the run's deadline, and reductions of small float vectors give the same result on all
ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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
    """This process among its peers."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Tensors of one shape from all ranks, in rank order, on the host."""
        local = values.to(self.device)
        gathered = [torch.empty_like(local) for _ in range(self.world_size)]
        dist.all_gather(gathered, local)
        return [tensor.cpu() for tensor in gathered]

    def union(self, names: Iterable[str]) -> set[str]:
        """All names that any rank has."""
        own = json.dumps(sorted(names)).encode()
        longest = int(self.max(torch.tensor([len(own)], device=self.device)).item())
        padded = torch.tensor(list(own.ljust(longest)), dtype=torch.uint8)
        return {name for part in self.gather(padded) for name in json.loads(bytes(part.tolist()))}

    def barrier(self) -> None:
        self.sum(torch.zeros(1, device=self.device)).item()


def join_ranks(device: str, *, store: str, timeout_minutes: int) -> Ranks:
    """Join the group described by RANK, WORLD_SIZE and LOCAL_RANK; its members meet through the file `store`.

    All ranks are on one machine, and a file, unlike torch's server, lets in only those who may write to its folder.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    chosen = torch.device(device)
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(chosen)
    dist.init_process_group(
        "nccl" if chosen.type == "cuda" else "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=timeout_minutes),
        device_id=chosen if chosen.type == "cuda" else None,
    )
    mesh = init_device_mesh(chosen.type, (world_size,), mesh_dim_names=("data",))
    return Ranks(rank, world_size, chosen, mesh)
