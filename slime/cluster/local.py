"""A run on one machine: its only node is this one, and its processes are children of the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.cluster.devices import cpu_cores, visible_gpus
from slime.cluster.node import Node, ProcessCommand, Slot, SlotPlacement
from slime.cluster.ports import free_ports, sockets_at
from slime.cluster.process import ChildProcess
from slime.cluster.rpc.channel import Channel, channel_pair
from slime.cluster.rpc.connect import FD_FLAG
from slime.config import Config
from slime.config.batch import num_trainers


class LocalNode:
    """This machine. `address` is where servers bind (`--host`); `alone` means that the run uses no other machine."""

    name = "this machine"
    is_here = True
    is_lost = False

    def __init__(self, address: str = "127.0.0.1", *, alone: bool = True) -> None:
        self.address = address
        self.cores = cpu_cores()
        self._alone = alone

    @property
    def sockets(self) -> Mapping[str, str]:
        return sockets_at("127.0.0.1" if self._alone else self.address)

    def start(self, command: ProcessCommand, log_path: Path) -> ChildProcess:
        return start_child(command, log_path)

    def start_connected(self, command: ProcessCommand, log_path: Path) -> tuple[ChildProcess, Channel]:
        channel, theirs = channel_pair()
        with theirs:
            return start_child(command, log_path, fd=theirs.fileno()), channel

    def free_ports(self, count: int) -> list[int]:
        return free_ports(count, self.address)

    def path(self, path: str) -> str:
        return path


class LocalCluster:
    """One node: trainers use the first GPUs, engines the next ones, or the same ones with `--colocate`."""

    def __init__(self, config: Config, *, device: str, trainers: int | None = None, rollout: int | None = None) -> None:
        node = LocalNode(config.host)
        count = num_trainers(config) if trainers is None else trainers
        self.placement = SlotPlacement(
            tuple(_slot(node, device, number) for number in range(count)),
            rollout_slots(config, device, node=node, trainers=count, count=rollout),
        )

    def provide(self, paths: Sequence[str]) -> None:
        """Do nothing: the files are on this machine."""

    def provide_code(self, folders: Sequence[str]) -> None:
        """Do nothing: the modules are on this machine."""

    def nodes_without(self, folder: str, nodes: Sequence[Node] | None = None) -> list[str]:
        return []

    def spare(self, like: Slot) -> Slot | None:
        return None

    def close(self) -> None:
        """Do nothing: the callers stop the processes that they started."""


def rollout_slots(
    config: Config,
    device: str,
    *,
    node: LocalNode | None = None,
    trainers: int | None = None,
    count: int | None = None,
) -> tuple[Slot, ...]:
    """Return the engines' slots next to the given number of trainers, which need not be running."""
    here = node or LocalNode(config.host)
    first = 0 if config.colocate else num_trainers(config) if trainers is None else trainers
    numbers = range(first, first + (config.rollout_num_gpus or 0 if count is None else count))
    return tuple(_slot(here, device, number) for number in numbers)


def _slot(node: LocalNode, device: str, number: int) -> Slot:
    return Slot(node, visible_gpus([number]) if device == "cuda" else None)


def start_child(command: ProcessCommand, log_path: Path, *, fd: int | None = None) -> ChildProcess:
    """Start the command as a child of this process; with `fd`, it serves the channel on that descriptor."""
    own = () if fd is None else (FD_FLAG, str(fd))
    return ChildProcess(
        command.name,
        (*command.argv(), *own),
        env=command.env,
        pass_env=command.pass_env,
        log_path=log_path,
        pass_fds=() if fd is None else (fd,),
        dumps_stacks=command.dumps_stacks,
        also=command.also,
    ).start()
