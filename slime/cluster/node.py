"""Protocols for the machines of a run and their processes: `Node`, `Process`, `Cluster`.

Invariant: a process started on a node never outlives the run, on any node; a process whose node disappears counts as
ended. Code outside this room does not depend on whether a node is this machine or another one.
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
class ProcessCommand:
    """The command of one process, independent of the node.

    With `module`, the node's own Python runs that module of this very package; without it, `words` name a program
    (`OWN_PYTHON` as the first word: the node's own interpreter). `env` overrides the node's environment, of which the
    process gets no secrets except those in `pass_env`.
    """

    name: str
    words: tuple[str, ...]
    module: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    pass_env: tuple[str, ...] = ()
    dumps_stacks: bool = False
    also: tuple[str, ...] = ()

    def argv(self) -> tuple[str, ...]:
        """Return the argument vector for the machine that calls this."""
        if self.module is not None:
            return (*module_command(self.module), *self.words)
        return tuple(sys.executable if word == OWN_PYTHON else word for word in self.words[:1]) + self.words[1:]


class NodeProcess(Protocol):
    """A process on any node; `slime.cluster.process.ChildProcess` is one on this machine."""

    name: str
    log_path: Path

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return the exit code (minus the signal number if a signal ended it), or None while it runs."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit code, or None if it still runs after `timeout` seconds."""

    def terminate(self) -> None:
        """Send SIGTERM, without waiting for the end."""

    def stop(self, grace_s: float = 5.0) -> int | None:
        """Send SIGTERM, then SIGKILL to what is left after `grace_s`; return the exit code. Idempotent."""

    def tail(self, n: int = 20) -> str:
        """Return the last lines of its log."""

    def state(self) -> str:
        """Return one line: name, pid, what it does now, the last progress it reported."""

    def said(self, text: str | None) -> None:
        """Record the progress it reported just now, for `state`."""

    def pids(self) -> list[int]:
        """Return its live pids that are on this machine, for counting memory."""


class NodeLost(RunFailed):
    """Raised when a node is gone or cannot be reached."""


class Node(Protocol):
    """One machine. Its servers listen on `address`, where every other node of the run reaches them: loopback if the run
    has one machine only."""

    name: str
    address: str
    cores: int

    @property
    def is_here(self) -> bool:
        """True for the driver's own machine, whose files, shared memory and devices it shares."""

    @property
    def is_lost(self) -> bool:
        """True once it has disappeared; it does not come back as the same object."""

    @property
    def sockets(self) -> Mapping[str, str]:
        """The environment that restricts gloo and NCCL to connections between the run's processes."""

    def start(self, command: ProcessCommand, log_path: Path) -> NodeProcess:
        """Start a process there; its output also goes to `log_path` on the driver's machine. May raise `NodeLost`."""

    def start_connected(self, command: ProcessCommand, log_path: Path) -> tuple[NodeProcess, Channel]:
        """Start a process that serves a channel (`slime.cluster.rpc.connect.channel_from`). May raise `NodeLost`."""

    def free_ports(self, count: int) -> list[int]:
        """Return ports on `address` that are free now. May raise `NodeLost`."""

    def path(self, path: str) -> str:
        """Map a path of the driver's machine to the node's path, after `Cluster.provide` copied it there."""


@dataclass(frozen=True)
class Slot:
    """The slot of one process, or of an engine's share on one GPU: a node and one of its devices (its name in
    CUDA_VISIBLE_DEVICES; None on a CPU)."""

    node: Node
    device: str | None = None


@dataclass(frozen=True)
class SlotPlacement:
    """The slots of a run: `trainers` by rank, `rollout` in the order of `--rollout-num-gpus`.

    Engine i has the `rollout_num_gpus_per_engine` slots from `i * rollout_num_gpus_per_engine` on. With `--colocate`
    trainers and engines have the same slots.
    """

    trainers: tuple[Slot, ...]
    rollout: tuple[Slot, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The distinct nodes, the trainers' first."""
        return tuple({id(slot.node): slot.node for slot in (*self.trainers, *self.rollout)}.values())

    @property
    def is_here(self) -> bool:
        """True if the whole run is on the driver's machine."""
        return all(node.is_here for node in self.nodes)


class Cluster(Protocol):
    """The nodes of a run and the slots for its processes."""

    placement: SlotPlacement

    def provide(self, paths: Sequence[str]) -> None:
        """Make sure that every node has these files and folders of the driver's machine, unchanged; copy missing ones.

        A `UserError` names a node that cannot get one."""

    def provide_code(self, folders: Sequence[str]) -> None:
        """Do the same for the Python modules in these folders: processes started from now on can import them."""

    def nodes_without(self, folder: str, nodes: Sequence[Node] | None = None) -> list[str]:
        """Return the names of the nodes (None: all) that do not see this folder of the driver's machine under the same
        path; the folder is made if needed."""

    def spare(self, like: Slot) -> Slot | None:
        """Return a free slot to replace one whose node is lost, or None if there is none now."""

    def close(self) -> None:
        """Release all slots. Idempotent."""
