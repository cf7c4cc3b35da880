"""Another node on the driver's side: its processes have the interface of the driver's children.

Invariant: the output of a remote process is in its log here before its exit code is known here. A node that cannot be
reached is lost permanently, and its processes count as ended.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.cluster.node import NodeLost, ProcessCommand
from slime.cluster.remote.files import AgentCall
from slime.cluster.rpc.channel import Channel, ChannelTimeout
from slime.cluster.rpc.connect import Listener
from slime.cluster.watchdog.stacks import log_tail, process_registry
from slime.errors import RunFailed

LOG_POLL_S = 0.5
CONNECT_S = 30.0
STATE_S = 2.0
LAST_LOG_WAIT_S = 10.0
STOP_S = 60.0
LOST_CODE = -int(signal.SIGKILL)

logger = logging.getLogger(__name__)


class NodeTimeout(NodeLost):
    """Raised when the node does not answer in time."""


class RemoteNode:
    """A machine of the run other than the driver's. Its processes connect to the driver's `listener`.

    `agent(method, *args, timeout_s=...)` calls a method of its `slime.cluster.remote.agent.NodeAgent`. It raises the
    agent's `UserError` or `RunFailed`, `NodeLost` if the node is gone, and `NodeTimeout` on a timeout.
    """

    is_here = False

    def __init__(self, name: str, address: str, cores: int, agent: AgentCall, listener: Listener, token: str) -> None:
        self.name = name
        self.address = address
        self.cores = cores
        self._agent = agent
        self.sockets: Mapping[str, str] = {}
        self.paths: dict[str, str] = {}
        """Folders of the driver's machine, with their paths there."""
        self._listener = listener
        self._token = token
        self._lost = threading.Event()
        self._closed = threading.Event()
        self._soon = threading.Event()
        self._processes: dict[int, RemoteProcess] = {}
        self._pump: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def is_lost(self) -> bool:
        return self._lost.is_set()

    def start(self, command: ProcessCommand, log_path: Path) -> RemoteProcess:
        return self._start(command, log_path, None)

    def start_connected(self, command: ProcessCommand, log_path: Path) -> tuple[RemoteProcess, Channel]:
        _, where = self._listener.connect_arguments(command.name)
        process = self._start(command, log_path, where)
        try:
            return process, self._listener.wait_for(command.name, CONNECT_S)
        except ChannelTimeout as error:
            process.stop(0.0)
            raise RunFailed(f"{error} although its node ({self.name}) had reached it") from error

    def free_ports(self, count: int) -> list[int]:
        ports: list[int] = self.call("free_ports", count, self.address)
        return ports

    def path(self, path: str) -> str:
        """Map a path through the provided folder that contains it, if there is one."""
        whole = os.path.abspath(path)
        for ours, theirs in self.paths.items():
            if whole == ours or whole.startswith(ours + os.sep):
                return theirs + whole.removeprefix(ours)
        return whole

    def call(self, method: str, *args: object, timeout_s: float = 60.0) -> Any:
        """Call the agent; the first call that finds the node gone marks it as lost."""
        if self.is_lost:
            raise NodeLost(f"the node {self.name} is gone")
        try:
            return self._agent(method, *args, timeout_s=timeout_s)
        except NodeTimeout:
            raise  # it may be busy: only the log polling decides
        except NodeLost as error:
            self._mark_lost(error)
            raise

    def poll_soon(self) -> None:
        """Poll the node's logs without waiting for the next interval."""
        self._soon.set()

    def close(self) -> None:
        """Stop all processes there. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._soon.set()
        if self._pump is not None:
            self._pump.join(STOP_S)
        if not self.is_lost:
            try:
                self._agent("close", timeout_s=STOP_S)
            except (NodeLost, RunFailed) as error:
                logger.info("%s", error)

    def _start(self, command: ProcessCommand, log_path: Path, where: str | None) -> RemoteProcess:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.touch()
        fields = dataclasses.asdict(command)
        number, pid = self.call("start", fields, where, None if where is None else self._token)
        process = RemoteProcess(self, command, number, pid, log_path)
        with self._lock:
            self._processes[number] = process
            if self._pump is None:
                self._pump = threading.Thread(target=self._follow, name=f"news-of-{self.name}", daemon=True)
                self._pump.start()
        return process

    def _follow(self) -> None:
        while not self._closed.is_set():
            self._soon.wait(LOG_POLL_S)
            self._soon.clear()
            with self._lock:
                running = {number: one for number, one in self._processes.items() if one.poll() is None}
                self._processes = running
            try:
                news = self.call("news", {number: one.read for number, one in running.items()}) if running else {}
            except (NodeLost, RunFailed) as error:
                self._mark_lost(error)
                return
            for number, (data, code) in news.items():
                running[number].heard(data, code)

    def _mark_lost(self, error: Exception) -> None:
        if self._closed.is_set() or self._lost.is_set():
            return
        self._lost.set()
        logger.warning("%s", error)
        with self._lock:
            processes, self._processes = list(self._processes.values()), {}
        for process in processes:
            process.heard(f"its node ({self.name}) is gone: {error}\n".encode(), LOST_CODE)


class RemoteProcess:
    """One process of a node; a `slime.cluster.node.NodeProcess`."""

    def __init__(self, node: RemoteNode, command: ProcessCommand, number: int, pid: int, log_path: Path) -> None:
        self.name = command.name
        self.log_path = log_path
        self.read = 0
        """Bytes of its log that were copied here."""
        self._node = node
        self._number = number
        self._pid = pid
        self._code: int | None = None
        self._ended = threading.Event()
        self._said: tuple[str, float] | None = None
        self.also = command.also
        self._dumps_stacks = command.dumps_stacks
        process_registry.know(self)

    @property
    def pid(self) -> int:
        """The pid on its own machine."""
        return self._pid

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout: float | None = None) -> int | None:
        self._ended.wait(timeout)
        return self._code

    def terminate(self) -> None:
        self._unless_ended(lambda: self._node.call("terminate", self._number))

    def stop(self, grace_s: float = 5.0) -> int | None:
        self._unless_ended(lambda: self._node.call("stop", self._number, grace_s, timeout_s=grace_s + STOP_S))
        self._node.poll_soon()
        self.wait(LAST_LOG_WAIT_S)
        process_registry.forget(self)
        return self._code

    def tail(self, n: int = 20) -> str:
        return log_tail(self.log_path, n)

    def state(self) -> str:
        if self._code is not None:
            return f"{self.name} on {self._node.name} is gone"
        try:
            state = str(self._node.call("state", self._number, timeout_s=STATE_S))
        except NodeLost:
            return f"{self.name} on {self._node.name}, which does not answer"
        said = "" if self._said is None else f", {time.monotonic() - self._said[1]:.3g} s ago at {self._said[0]}"
        return f"{state} on {self._node.name}{said}"

    def ask_for_stacks(self) -> bool:
        """Ask the process to write its stacks to its log; return True if it was asked."""
        if not self._dumps_stacks or self._code is not None:
            return False
        try:
            return bool(self._node.call("ask_for_stacks", self._number, timeout_s=STATE_S))
        except NodeLost:
            return False

    def said(self, text: str | None) -> None:
        self._said = None if text is None else (text, time.monotonic())

    def pids(self) -> list[int]:
        return []

    def heard(self, data: bytes, code: int | None) -> None:
        """Append new bytes to the log; record the exit code if it has ended."""
        if data:
            with self.log_path.open("ab") as log:
                log.write(data)
            self.read += len(data)
        if code is not None:
            self._code = code
            self._ended.set()

    def _unless_ended(self, act: Callable[[], object]) -> None:
        if self._code is None:
            try:
                act()
            except NodeLost:
                return  # the process is gone with its node
