"""Processes that a tool talks to over pipes, and where they run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from typing import Protocol

EXIT_TIMEOUT_S = 2.0


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
    """Starts `python -I PROGRAM ARGUMENTS...` somewhere; lines of its output are up to `line_limit` bytes long."""

    async def __call__(self, program: str, *arguments: str, line_limit: int) -> Process: ...


class _Subprocess:
    def __init__(self, process: asyncio.subprocess.Process, folder: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin, self.stdout = process.stdin, process.stdout
        self._process, self._folder = process, folder

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        await self._process.wait()
        self.stdin.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def exit_code(self) -> int | None:
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                return await self._process.wait()
        except TimeoutError:
            return None


def subprocess_starter(python: str = sys.executable) -> ProcessStarter:
    """Plain child processes: limits, and no boundary. The code has the rights of whoever runs the training."""

    async def start(program: str, *arguments: str, line_limit: int) -> Process:
        folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="slime-tool-")
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, "-I", program, *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "OPENBLAS_NUM_THREADS": "1"},
                cwd=folder,
                start_new_session=True,
                limit=line_limit,
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return _Subprocess(process, folder)

    return start
