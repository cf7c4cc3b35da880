"""Joins a torch process group in addition to the default one, for a trainer and engines that start separately.

Invariant: the group has its own store (a TCP store that rank 0 serves only at the given address) under its own prefix,
so it shares nothing with the process's default group, which need not exist. Processes that join with the same address,
port, name and size are in the same group, as with SGLang's `/init_weights_update_group`. torch has no public call for
such a group; the two private names that every framework uses for it are used only in this file.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Backend, PrefixStore, ProcessGroup, TCPStore, distributed_c10d

from slime.cluster.ports import listening_socket
from slime.cluster.watchdog import waiting


def join_process_group(
    *, address: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float
) -> ProcessGroup:
    """Wait until all `world_size` processes have joined; rank 0 serves the store on `port`."""
    timeout = timedelta(seconds=timeout_s)
    with waiting(f"the other {world_size - 1} members of group {name}", "to join", timeout_s=timeout_s):
        # torch's own server listens on all interfaces, and every client of a store can write to it
        listener = listening_socket(address, port).detach() if rank == 0 else None
        store = TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=listener)
        group, _ = distributed_c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            Backend(backend),
            PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]
            timeout=timeout,
        )
    assert isinstance(group, ProcessGroup)
    distributed_c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return group


def leave_process_group(group: ProcessGroup, *, is_busy: bool = False) -> None:
    """Close the connections to the other members.

    If the group `is_busy` with collectives, NCCL's end with an error, and gloo's block their waiting thread until the
    other members close their connections.
    """
    if is_busy:
        group.abort()
    dist.destroy_process_group(group)
