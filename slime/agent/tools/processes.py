"""Python programs that a tool talks to over pipes, each in a sandbox of its own."""

from __future__ import annotations

import asyncio
import sysconfig
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

from slime.agent.sandbox import SandboxLimits, make_sandbox
from slime.agent.sandbox.box import ForkServer
from slime.agent.sandbox.machine import MachineProcess, MachineSandbox
from slime.errors import UserError

EXIT_TIMEOUT_S = 2.0
KINDS = ("auto", "local", "subprocess", "none")
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_OF_A_USER = 1 << 16
"""Without a boundary, the processes of a sandbox count with all others of the user."""


class Process(Protocol):
    """A running program with its two pipes."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader

    @property
    def alive(self) -> bool:
        """Whether where it runs is still there."""
        ...

    async def kill(self) -> None:
        """End it and whatever it started, now; a second call does nothing."""
        ...

    async def exit_code(self) -> int | None:
        """Why it ended; None where it has not, soon."""
        ...


class ProcessStarter(Protocol):
    """Starts the program with arguments, somewhere new each time."""

    async def __call__(self, arguments: Sequence[str]) -> Process: ...

    async def aclose(self) -> None:
        """End what it keeps for further starts."""
        ...


class SandboxStarter:
    """Forks a new sandbox for every start, with the program in it: nothing that one attempt does meets another."""

    def __init__(self, program: Path, sandbox: str, *, memory_mb: int, packages: bool) -> None:
        if sandbox not in KINDS:
            raise UserError(f"there is no sandbox {sandbox!r} for an interpreter: choose one of {', '.join(KINDS)}")
        self.kind = sandbox
        self._sites = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) if packages else []
        self._memory_mb = memory_mb + 64
        self._server = ForkServer(program)

    def check(self) -> None:
        """UserError, with what to do, where this machine has no such sandbox."""
        self._made()

    def _made(self) -> MachineSandbox:
        is_open = self.kind in ("subprocess", "none")
        limits = SandboxLimits(
            memory_mb=self._memory_mb,
            processes=_OF_A_USER if is_open else 64,
            disk_mb=256,
            file_mb=256,
            cpu_seconds=1 << 30,
        )
        kind = "subprocess" if is_open else self.kind
        sandbox = make_sandbox(kind, limits=limits, visible=self._sites, env=_ENVIRONMENT, server=self._server)
        assert isinstance(sandbox, MachineSandbox)
        return sandbox

    async def __call__(self, arguments: Sequence[str]) -> Process:
        sandbox = self._made()
        await sandbox.__aenter__()
        try:
            process = await sandbox.popen_program([*arguments, *self._sites])
        except BaseException:
            await sandbox.__aexit__(None, None, None)
            raise
        return _Sandboxed(sandbox, process)

    async def aclose(self) -> None:
        await asyncio.to_thread(self._server.close)


class _Sandboxed:
    def __init__(self, sandbox: MachineSandbox, process: MachineProcess) -> None:
        self._sandbox, self._process = sandbox, process
        self.stdin, self.stdout = process.stdin, process.stdout

    @property
    def alive(self) -> bool:
        return self._sandbox.box.alive

    async def kill(self) -> None:
        await self._sandbox.__aexit__(None, None, None)
        self.stdin.close()

    async def exit_code(self) -> int | None:
        return await _soon(self._process.wait())


async def _soon(end: Coroutine[Any, Any, int]) -> int | None:
    try:
        async with asyncio.timeout(EXIT_TIMEOUT_S):
            return await end
    except TimeoutError:
        return None
