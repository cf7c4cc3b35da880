"""A fake remote node: its processes connect over TCP and authenticate with the token of the run.

The processes are children of the test. `paths` maps paths of the driver to paths on the node.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slime.cluster.node import NodeLost, ProcessCommand
from slime.cluster.ports import free_ports, sockets_at
from slime.cluster.process import ChildProcess
from slime.cluster.rpc.channel import Channel
from slime.cluster.rpc.connect import TOKEN_VARIABLE, Listener

TOKEN = "known to the run"
CONNECT_S = 120.0


class OtherNode:
    is_here = False

    def __init__(self, name: str, listener: Listener, paths: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.address = listener.address
        self.cores = 1
        self.is_lost = False
        self.started: list[ChildProcess] = []
        self._listener = listener
        self._paths = dict(paths or {})

    @property
    def sockets(self) -> Mapping[str, str]:
        return sockets_at(self.address)

    def start(self, command: ProcessCommand, log_path: Path) -> ChildProcess:
        return self._child(command, log_path, (), {})

    def start_connected(self, command: ProcessCommand, log_path: Path) -> tuple[ChildProcess, Channel]:
        words = self._listener.connect_arguments(command.name)
        process = self._child(command, log_path, words, {TOKEN_VARIABLE: TOKEN})
        return process, self._listener.wait_for(command.name, CONNECT_S)

    def free_ports(self, count: int) -> list[int]:
        if self.is_lost:
            raise NodeLost(self.name)
        return free_ports(count, self.address)

    def path(self, path: str) -> str:
        return self._paths.get(path, path)

    def lose(self) -> None:
        """Stops all processes of the node for good. Their connections stay open, as after a power failure."""
        self.is_lost = True
        for process in self.started:
            for pid in process.pids():
                os.kill(pid, signal.SIGSTOP)

    def _child(
        self, command: ProcessCommand, log_path: Path, words: tuple[str, ...], env: Mapping[str, str]
    ) -> ChildProcess:
        if self.is_lost:
            raise NodeLost(self.name)
        process = ChildProcess(
            command.name,
            (*command.argv(), *words),
            env={**command.env, **env},
            pass_env=command.pass_env,
            log_path=log_path,
            dumps_stacks=command.dumps_stacks,
            also=command.also,
        ).start()
        self.started.append(process)
        return process


@contextmanager
def listening() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", TOKEN)
    try:
        yield listener
    finally:
        listener.close()
