"""Python programs that a tool talks to over pipes, and where they run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from slime.agent.sandbox import SandboxLimits, make_sandbox
from slime.agent.sandbox.local import LocalSandbox
from slime.agent.sandbox.machine import MachineProcess, MachineSandbox
from slime.agent.sandbox.plain import SubprocessSandbox
from slime.errors import UserError

EXIT_TIMEOUT_S = 2.0
NO_SANDBOX = "none"
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Process(Protocol):
    """A running program with its two pipes."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader

    async def kill(self) -> None:
        """End it and whatever it started, now; a second call does nothing."""
        ...

    async def exit_code(self) -> int | None:
        """Why it ended; None where it has not, soon."""
        ...


class ProcessStarter(Protocol):
    """Starts `python -I -c PROGRAM ARGUMENTS...` somewhere."""

    async def __call__(self, program: str, arguments: Sequence[str]) -> Process: ...


def starter(sandbox: str, *, memory_mb: int, packages: bool) -> ProcessStarter:
    """Processes in a sandbox of this kind each, or plain children for "none"."""
    sites = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) if packages else []
    if sandbox == NO_SANDBOX:
        return plain_starter(extra=sites)
    if sandbox not in ("auto", "local", "subprocess"):
        raise UserError(f"there is no sandbox {sandbox!r} for an interpreter: choose auto, local, subprocess or none")
    limits = SandboxLimits(memory_mb=memory_mb + 64, processes=64, disk_mb=256, file_mb=256, cpu_seconds=1 << 30)

    async def start(program: str, arguments: Sequence[str]) -> Process:
        made = make_sandbox(sandbox, limits=limits, visible=sites, env=_ENVIRONMENT)
        assert isinstance(made, LocalSandbox | SubprocessSandbox)
        await made.__aenter__()
        try:
            process = await made.popen([made.python, "-I", "-c", program, *arguments, *sites])
        except BaseException:
            await made.__aexit__(None, None, None)
            raise
        return _Sandboxed(made, process)

    return start


def plain_starter(python: str = sys.executable, extra: Sequence[str] = ()) -> ProcessStarter:
    """Child processes as they are: limits, and no boundary."""

    async def start(program: str, arguments: Sequence[str]) -> Process:
        folder = tempfile.mkdtemp(prefix="slime-tool-")  # at once: cancelled, a thread would leave it behind
        places = {"HOME": folder, "TMPDIR": folder, "PATH": os.environ.get("PATH", os.defpath)}
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, "-I", "-c", program, *arguments, *extra),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=places | _ENVIRONMENT,
                cwd=folder,
                start_new_session=True,
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return _Child(process, folder)

    return start


async def _soon(end: Coroutine[Any, Any, int]) -> int | None:
    try:
        async with asyncio.timeout(EXIT_TIMEOUT_S):
            return await end
    except TimeoutError:
        return None


class _Child:
    def __init__(self, process: asyncio.subprocess.Process, folder: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin, self.stdout = process.stdin, process.stdout
        self._process, self._folder = process, folder

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()  # it ends its children first, those of other groups too
            await _soon(self._process.wait())
            os.killpg(self._process.pid, 9)
        await self._process.wait()
        self.stdin.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def exit_code(self) -> int | None:
        return await _soon(self._process.wait())


class _Sandboxed:
    def __init__(self, sandbox: MachineSandbox, process: MachineProcess) -> None:
        self._sandbox, self._process = sandbox, process
        self.stdin, self.stdout = process.stdin, process.stdout

    async def kill(self) -> None:
        await self._sandbox.__aexit__(None, None, None)
        self.stdin.close()

    async def exit_code(self) -> int | None:
        return await _soon(self._process.wait())
