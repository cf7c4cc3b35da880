"""The sandbox protocols: limits, commands, files, snapshots, and access to the session's endpoint.

`Sandbox` is upstream's protocol, so its harnesses and ours run in any sandbox that implements it. A failed command is
an outcome; an exception means that the sandbox itself failed or that a request is not possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from slime.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one sandbox: memory, processes, CPUs and disk apply to the whole sandbox, the others to one command."""

    seconds: float = 120.0
    """Default time limit of a command."""
    grace_seconds: float = 1.0
    """Time between SIGTERM and SIGKILL when a command is ended."""
    memory_mb: int = 4096
    """Memory of all processes together, including the files they wrote, which are in memory."""
    processes: int = 512
    cpus: float | None = None
    cpu_seconds: int = 3600
    """CPU time of one process."""
    disk_mb: int = 2048
    """Total size of the files that the sandbox writes."""
    file_mb: int = 1024
    """Size of one file."""
    open_files: int = 4096
    """Open files of one process."""
    output_kb: int = 256
    """Size of the beginning and end that are kept of each output stream of a command."""
    output_mb: int = 64
    """Output of a command, above which it is ended."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise UserError(f"the limit {name} of a sandbox must be more than 0, not {value}")

    def process_limits(self, held: frozenset[str]) -> dict[str, int]:
        """Per-process limits by the kernel's names; `held` are the limits that a control group enforces."""
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

    def group_limits(self) -> dict[str, float]:
        """Limits to set on a control group."""
        limits: dict[str, float] = {"memory": self.memory_mb << 20, "processes": self.processes}
        return limits if self.cpus is None else {**limits, "cpus": self.cpus}


EXIT_TIME_BUDGET_EXCEEDED = -1
"""Exit code of a command that did not end by itself: it reached a limit, was cancelled or was killed."""

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
    """The sandbox could not fulfil a request; the text is one sentence."""


class SandboxGone(SandboxError):
    """The sandbox has ended or was killed."""


class CommandFailed(SandboxError):
    """A command run with `check=True` did not exit with 0."""

    def __init__(self, message: str, outcome: Outcome) -> None:
        super().__init__(message)
        self.outcome = outcome


class Outcome(tuple[int, str, str]):
    """Result of a command: `code, out, err = outcome`, as upstream has it, and the limit that was hit, if any.

    `code` is -1 for a command that did not end by itself, 128 + n for one ended by signal n, 127 for one that could not
    be started.
    """

    cause: str | None
    truncated: bool
    """Part of the output was omitted."""

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
    """Changes of a sandbox in the folder that it was given."""

    files: tuple[tuple[str, str], ...]
    """Pairs of "added", "modified" or "deleted" and a path relative to the folder, sorted by path."""
    patch: str
    """A patch for `git apply`, including binary files."""
    truncated: bool
    """`patch` is incomplete: it is too long, or a file is too large or not a regular file (docs/sandboxes.md)."""


class Process(Protocol):
    """A program in the sandbox with pipes of its own."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    async def wait(self) -> int:
        """Wait until the program has ended; return its exit code."""
        ...

    async def kill(self) -> None:
        """Kill the program and all its descendants."""
        ...


@runtime_checkable
class Sandbox(Protocol):
    """Upstream's sandbox protocol, which harnesses use."""

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
        """Run a line in the sandbox's own shell, or a program with its arguments; the default time limit is 120 s."""
        ...

    async def write_file(self, path: str, content: str | bytes | Path, *, user: str = "root") -> None:
        """Write a file, creating its parent folders; a `Path` as content is a file of the host."""
        ...

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """Read the text of a file."""
        ...


@runtime_checkable
class ExtendedSandbox(Sandbox, Protocol):
    """A sandbox with our additions to upstream's protocol."""

    workdir: str
    """Initial folder of commands, which holds the snapshot."""
    limits: SandboxLimits

    async def reach(self, endpoint: str) -> str:
        """Make an endpoint outside, a URL or the path of a unix socket, reachable inside; return its base URL there."""
        ...

    async def popen(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Process: ...

    async def diff(self) -> Changes: ...


@dataclass(frozen=True)
class Snapshot:
    """A prepared folder that many sandboxes start from and none changes: each writes to a layer of its own.

    With `root` the folder is a whole root file system and becomes the sandbox's root, else it becomes the working
    folder. Inside, all of it belongs to the sandbox's user. `how` is "overlay", "copy", or "auto": an overlay where the
    kernel supports it, else a copy.
    """

    path: Path
    """A string is accepted too."""
    root: bool = False
    how: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        if not self.path.is_dir():
            raise UserError(f"there is no folder {self.path} to start sandboxes from: create it first")
        if self.how not in ("auto", "overlay", "copy"):
            raise UserError(f"the `how` of a Snapshot must be auto, overlay or copy, not {self.how!r}")
