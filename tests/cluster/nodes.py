"""Simulated remote nodes on other loopback addresses, which can be lost as a whole."""

from __future__ import annotations

from pathlib import Path

from slime.cluster.local import LocalNode
from slime.cluster.node import NodeLost, ProcessCommand
from slime.cluster.process import ChildProcess


class FarNode(LocalNode):
    """This machine under another address and name, with the driver's files under `root`."""

    is_here = False

    def __init__(self, address: str, *, cores: int = 8, root: str = "") -> None:
        super().__init__(address)
        self.name = f"node {address}"
        self.cores = cores
        self._root = root
        self._processes: list[ChildProcess] = []

    def start(self, command: ProcessCommand, log_path: Path) -> ChildProcess:
        if self.is_lost:
            raise NodeLost(f"{self.name} is gone")
        process = super().start(command, log_path)
        self._processes.append(process)
        return process

    def path(self, path: str) -> str:
        return f"{self._root}{path}"

    def lose(self) -> None:
        """Simulate the loss of the node and of all its processes."""
        self.is_lost = True
        for process in self._processes:
            process.stop(grace_s=0)
