"""What a sandbox is to those who use one: commands, files, and one way out to the session's endpoint.

The first part is upstream's protocol, so its harnesses and ours run in any sandbox that has it. A command that fails is
an outcome; an exception means that the sandbox itself failed, or that what was asked of it cannot be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from slime.agent.sandbox.limits import SandboxLimits

EXIT_TIME_BUDGET_EXCEEDED = -1
"""The exit code of a command that did not end by itself."""

TIMEOUT = "timeout"
MEMORY = "memory"
PROCESSES = "processes"
OUTPUT = "output"
FILE_SIZE = "file size"
DISK = "disk"
CPU_TIME = "cpu time"
KILLED = "killed"
CANCELLED = "cancelled"
CAUSES = (TIMEOUT, MEMORY, PROCESSES, OUTPUT, FILE_SIZE, DISK, CPU_TIME, KILLED, CANCELLED)


class SandboxError(Exception):
    """The sandbox could not do what it was asked: one sentence."""


class SandboxGone(SandboxError):
    """The sandbox has ended, or was ended from outside."""


class CommandFailed(SandboxError):
    """A command with `check=True` that did not exit with 0."""

    def __init__(self, message: str, outcome: Outcome) -> None:
        super().__init__(message)
        self.outcome = outcome


class Outcome(tuple[int, str, str]):
    """`code, out, err = outcome`, as upstream has it, and why a command was ended or failed, if a limit was the cause.

    `code` is -1 for a command that was ended, 128 + n for one that a signal n ended, 127 for one that did not start.
    """

    cause: str | None
    truncated: bool
    """Part of the output was left out."""

    def __new__(cls, code: int, out: str, err: str, cause: str | None = None, truncated: bool = False) -> Self:
        self = super().__new__(cls, (code, out, err))
        self.cause = cause
        self.truncated = truncated
        return self

    @property
    def code(self) -> int:
        return self[0]

    @property
    def out(self) -> str:
        return self[1]

    @property
    def err(self) -> str:
        return self[2]

    def __repr__(self) -> str:
        return f"Outcome(code={self.code}, out={self.out!r}, err={self.err!r}, cause={self.cause!r})"


@dataclass(frozen=True)
class Changes:
    """What a sandbox changed in the folder that it was given."""

    files: tuple[tuple[str, str], ...]
    """(added, modified or deleted; path below the folder), by path."""
    patch: str
    """What `git apply` takes; binary files are in it too."""
    truncated: bool
    """`patch` does not hold all of it: it is too long, or a file is too large or no file (docs/sandboxes.md)."""


class Process(Protocol):
    """A program in the sandbox with pipes of its own."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        ...

    async def kill(self) -> None:
        """End it and all that came of it."""
        ...


@runtime_checkable
class Sandbox(Protocol):
    """What upstream's harnesses use."""

    @property
    def sandbox_id(self) -> str: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (upstream's name)
        check: bool = False,
        idempotent: bool = True,
    ) -> tuple[int, str, str]:
        """Run a line in the sandbox's own shell, or a program with its arguments; 120 s unless told otherwise."""
        ...

    async def write_file(self, path: str, content: str | bytes | Path, *, user: str = "root") -> None:
        """Make a file, and the folders above it; a `Path` is a file on this side."""
        ...

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """The text of a file."""
        ...


@runtime_checkable
class ReachingSandbox(Sandbox, Protocol):
    """What ours have besides."""

    workdir: str
    """Where commands start, and where the snapshot is."""
    limits: SandboxLimits

    async def reach(self, endpoint: str) -> str:
        """The base URL inside for a URL, or the path of a unix socket, outside."""
        ...

    async def popen(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Process: ...

    async def diff(self) -> Changes: ...
