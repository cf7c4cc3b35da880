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

from slime.errors import UserError

# What one sandbox may use.


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Memory, processes and files are those of the whole sandbox, the rest of one command."""

    seconds: float = 120.0
    """How long a command may take, unless its caller says otherwise."""
    grace_seconds: float = 1.0
    """Between asking a command to end and ending it."""
    memory_mb: int = 4096
    """Of all processes together, with the files they wrote: these are in memory."""
    processes: int = 512
    cpus: float | None = None
    cpu_seconds: int = 3600
    """Of one process."""
    disk_mb: int = 2048
    """All that the sandbox writes."""
    file_mb: int = 1024
    """One file."""
    open_files: int = 4096
    """Of one process."""
    output_kb: int = 256
    """What is kept of each output stream of a command: its beginning and its end."""
    output_mb: int = 64
    """What a command may write to its output streams before it is ended."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise UserError(f"the limit {name} of a sandbox must be more than 0, not {value}: change it")

    def of_each_process(self, held: frozenset[str]) -> dict[str, int]:
        """By the kernel's names. `held` are the limits that hold for all processes together, by a control group."""
        limits = {
            "FSIZE": self.file_mb << 20,
            "CPU": self.cpu_seconds,
            "NOFILE": self.open_files,
            "CORE": 0,
            "NPROC": self.processes * 2 if "processes" in held else self.processes,
        }
        if "memory" not in held:
            limits["DATA"] = self.memory_mb << 20
        return limits

    def of_the_group(self) -> dict[str, float]:
        """What a control group is asked to hold."""
        limits: dict[str, float] = {"memory": self.memory_mb << 20, "processes": self.processes}
        return limits if self.cpus is None else {**limits, "cpus": self.cpus}


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


# A prepared file tree that many sandboxes start from.


@dataclass(frozen=True)
class Snapshot:
    """A folder that no sandbox changes: each writes over it, into a layer of its own.

    `root`: it is a whole root file system, and becomes the sandbox's; else it becomes the working folder. All of it
    belongs to the sandbox's user inside. `how`: laid over where the kernel can, else copied; or one of the two.
    """

    path: Path
    """A text is taken too."""
    root: bool = False
    how: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        if not self.path.is_dir():
            raise UserError(f"there is no folder {self.path} to start sandboxes from: prepare it first")
        if self.how not in ("auto", "overlay", "copy"):
            raise UserError(f"a snapshot is taken by auto, overlay or copy, not {self.how!r}")
