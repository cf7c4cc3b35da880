"""Machines that run the processes of a run, as whoever starts processes sees them.

Invariant: what is started on a node never outlives the run, wherever the node is; a process whose node disappears has
ended. Nobody outside this room knows whether a node is this machine or another one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from slime.cluster.child_env import module_command
from slime.cluster.rpc.channel import Channel
from slime.errors import RunFailed

OWN_PYTHON = "{python}"


@dataclass(frozen=True)
class Command:
    """One process as data. `module` is run by the node's own Python with this very package; without one, `words` name
    a program (`OWN_PYTHON` as the first word: the node's own interpreter). `env` is laid over the node's environment,
    of which the process gets no secrets but those in `pass_env`.
    """

    name: str
    words: tuple[str, ...]
    module: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    pass_env: tuple[str, ...] = ()
    dumps_stacks: bool = False
    also: tuple[str, ...] = ()

    def argv(self) -> tuple[str, ...]:
        """The words to execute on the machine where this is called."""
        if self.module is not None:
            return (*module_command(self.module), *self.words)
        return tuple(sys.executable if word == OWN_PYTHON else word for word in self.words[:1]) + self.words[1:]


class Process(Protocol):
    """A process on some node; `slime.cluster.process.ChildProcess` is one on this machine."""

    name: str
    log_path: Path

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """The exit code (minus the signal number if a signal ended it), or None while it runs."""

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit code, or None if it still runs after `timeout` seconds."""

    def terminate(self) -> None:
        """SIGTERM, without waiting for the end."""

    def stop(self, grace_s: float = 5.0) -> int | None:
        """SIGTERM, then SIGKILL to what is left after `grace_s`. Safe to call again."""

    def tail(self, n: int = 20) -> str:
        """The last lines of its log."""

    def state(self) -> str:
        """One line: name, pid, what it does now, what it said last."""

    def said(self, text: str | None) -> None:
        """What it has told of its work just now."""

    def pids(self) -> list[int]:
        """Its processes that are alive, as far as they are on this machine; for counting memory."""


class NodeLost(RunFailed):
    """The node is gone, or cannot be reached any more."""


class Node(Protocol):
    """One machine. `address` is where its servers listen and are reached by every other node of the run: loopback
    where the run has one machine only."""

    name: str
    address: str
    cores: int

    @property
    def is_here(self) -> bool:
        """Whether it is the driver's own machine: shares its files, shared memory and devices."""

    @property
    def is_lost(self) -> bool:
        """Whether it has disappeared; it does not come back under the same object."""

    @property
    def sockets(self) -> Mapping[str, str]:
        """The environment in which gloo and NCCL talk to the run's other processes and to nobody else."""

    def start(self, command: Command, log_path: Path) -> Process:
        """Start a process there; its output is (also) in `log_path` on the driver's machine. May raise `NodeLost`."""

    def start_connected(self, command: Command, log_path: Path) -> tuple[Process, Channel]:
        """The same for a process that serves a channel (`slime.cluster.rpc.connect.channel_from`). May raise
        `NodeLost`."""

    def free_ports(self, count: int) -> list[int]:
        """Ports on `address` that nobody listens on now. May raise `NodeLost`."""

    def path(self, path: str) -> str:
        """What a file or folder of the driver's machine is called there, after `Cluster.provide` brought it."""


@dataclass(frozen=True)
class Slot:
    """The place of one process, or of one GPU's part of an engine: a node and a device of it (as CUDA_VISIBLE_DEVICES
    names it; None on a CPU)."""

    node: Node
    device: str | None = None


@dataclass(frozen=True)
class Placement:
    """Who sits where. `trainers` by rank; `rollout` in the order in which `--rollout-num-gpus` counts, so that engine
    i has `rollout_num_gpus_per_engine` slots from i times as many on. With `--colocate` both are the same slots."""

    trainers: tuple[Slot, ...]
    rollout: tuple[Slot, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every node once, the trainers' first."""
        return tuple({id(slot.node): slot.node for slot in (*self.trainers, *self.rollout)}.values())

    @property
    def is_here(self) -> bool:
        """Whether the whole run is on the driver's machine."""
        return all(node.is_here for node in self.nodes)


class Cluster(Protocol):
    """Where a run's processes go."""

    placement: Placement

    def provide(self, paths: Sequence[str]) -> None:
        """Make sure that every node has these files and folders of the driver's machine: found there, unchanged, or
        shipped. A node that cannot get one is named in a `UserError`."""

    def provide_code(self, folders: Sequence[str]) -> None:
        """The same for the Python modules in these folders: what is started from now on finds them."""

    def strangers_to(self, folder: str, nodes: Sequence[Node] | None = None) -> list[str]:
        """The names of those of the nodes (None: all) that do not see this folder of the driver's machine under the
        same path; it is made if need be."""

    def spare(self, like: Slot) -> Slot | None:
        """A free slot in the place of one whose node is lost; None where there is none now."""

    def close(self) -> None:
        """Give everything back. Safe to call again."""
