"""`MachineSandbox`: the base class of the sandboxes on this machine, `local` and `subprocess`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import socket
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from slime.agent.sandbox.inside import cgroups
from slime.agent.sandbox.monitor_client import ForkServer, MonitorClient, MonitorResponse
from slime.agent.sandbox.protocol import (
    CPU_TIME,
    DISK,
    FILE_SIZE,
    KILLED,
    MEMORY,
    PROCESSES,
    TIMEOUT,
    Changes,
    CommandFailed,
    Outcome,
    SandboxError,
    SandboxGone,
    SandboxLimits,
    Snapshot,
)
from slime.errors import UserError
from slime.storage.json_types import JsonMapping, JsonObject

_SIGNAL_CAUSES = {128 + signal.SIGXCPU: CPU_TIME, 128 + signal.SIGXFSZ: FILE_SIZE}
_ERROR_TEXT_CAUSES = (
    ("File too large", FILE_SIZE),
    ("No space left on device", DISK),
    ("fork: retry: Resource temporarily unavailable", PROCESSES),
    ("fork: Resource temporarily unavailable", PROCESSES),
    ("Cannot allocate memory", MEMORY),
    ("MemoryError", MEMORY),
)
_TAIL = 4096


def find_limit_cause(
    reply: JsonMapping,
    err: str,
    before: Mapping[str, int],
    after: Mapping[str, int],
    limits: SandboxLimits,
    held: frozenset[str],
) -> str | None:
    """Find the limit that a command hit: by the worker's response, the kernel's counters, its exit, or its errors."""
    if reply["cause"] is not None:
        return str(reply["cause"])
    for limit in (MEMORY, PROCESSES):
        if after[limit] > before[limit]:
            return limit
    if reply["code"] == 0:
        return None
    if reply["code"] in _SIGNAL_CAUSES:
        return _SIGNAL_CAUSES[reply["code"]]
    if reply["code"] == 128 + signal.SIGKILL and reply["cpu_s"] >= limits.cpu_seconds:
        return CPU_TIME
    return next((cause for words, cause in _ERROR_TEXT_CAUSES if words in err[-_TAIL:] and cause not in held), None)


_NVIDIA = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia[0-9]*", "nvidia-caps/nvidia-cap[0-9]*")
"""Device nodes for control, managed memory, the GPUs, and the partitions of a GPU."""


def nvidia_devices(folder: Path = Path("/dev")) -> list[str]:
    """List the device nodes of this machine's NVIDIA GPUs and of their driver; empty where there are none."""
    return sorted(str(path) for pattern in _NVIDIA for path in folder.glob(pattern))


def check_devices(devices: Sequence[str | Path]) -> tuple[str, ...]:
    """Normalize and check device paths; UserError unless each is a character device below /dev (disks are not)."""
    paths = sorted({os.path.normpath(path) for path in devices})
    for path in paths:
        if not path.startswith("/dev/") or not os.path.exists(path):
            raise UserError(f"there is no device {path} to give to a sandbox: name an existing node below /dev")
        if not stat.S_ISCHR(os.stat(path).st_mode):
            raise UserError(
                f"{path} is not a character device: a sandbox can only be given character devices, like GPUs"
            )
    return tuple(paths)


_PATCH_BYTES = 4 << 20
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class MachineSandbox:
    """A sandbox of this machine, used as an async context manager; all its processes end with it."""

    kind = ""
    own_processes = False
    """The sandbox has its own process namespace."""
    overdue_s = 10.0
    """Time after a command's deadline, in seconds, after which its worker counts as stopped by the command."""

    def __init__(
        self,
        *,
        limits: SandboxLimits | None = None,
        files: Snapshot | None = None,
        env: Mapping[str, str] | None = None,
        visible: Sequence[str | Path] = (),
        devices: Sequence[str | Path] = (),
        server: ForkServer | None = None,
    ) -> None:
        self.server = server
        self.limits = limits or SandboxLimits()
        self.files = files
        self.visible = tuple(os.path.realpath(path) for path in visible)
        self.devices = check_devices(devices)
        self.workdir = ""
        self.home = ""
        self._env = dict(env or {})
        self._id = f"{self.kind}-{secrets.token_hex(6)}"
        self._box: MonitorClient | None = None
        self._within: str | None = None
        self._placed: list[str] = []
        self._ports: dict[str, int] = {}
        self._reaching = asyncio.Lock()

    @property
    def sandbox_id(self) -> str:
        return self._id

    def _make_monitor(self) -> MonitorClient:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        self._box = self._make_monitor()
        try:
            await self._box.start()
        except BaseException:  # a cancelled start must leave no processes either
            await self._box.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._box is not None:
            await self._box.close()

    @property
    def box(self) -> MonitorClient:
        if self._box is None:
            raise SandboxError(f"sandbox {self._id} is not started: use `async with`")
        return self._box

    @property
    def held(self) -> frozenset[str]:
        """Limits that a control group enforces for all processes together."""
        return frozenset(self.box.told["holds"])

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """Environment of a command; nothing is inherited from this process."""
        base = {"PATH": PATH, "HOME": self.home, "LANG": "C.UTF-8", "USER": "agent", "SHELL": "/bin/sh", "TERM": "dumb"}
        return {**base, **self._env, **(env or {})}

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (upstream's name)
        check: bool = False,
        idempotent: bool = True,
        cwd: str | None = None,
    ) -> Outcome:
        """Run a line in the sandbox's shell, or a program with its arguments. `user` is ignored: there is one user."""
        seconds = self.limits.seconds if timeout is None else timeout
        before = await self._events()
        answer = await self.box.ask(self._command(cmd, env, seconds, cwd))
        with answer:
            try:
                async with asyncio.timeout(seconds + self.limits.grace_seconds + self.overdue_s):
                    reply, _ = await answer.message()
                    if "error" in reply:
                        cause = PROCESSES if reply.get("errno") == errno.EAGAIN else None
                        outcome = Outcome(-1, "", f"{reply['error']}\n", cause)
                    else:
                        out = (await answer.data(reply["out"])).decode(errors="replace")
                        err = (await answer.data(reply["err"])).decode(errors="replace")
                        cause = find_limit_cause(reply, err, before, await self._events(), self.limits, self.held)
                        outcome = Outcome(reply["code"], out, err, cause, reply["truncated"])
            except (EOFError, TimeoutError) as error:  # the worker was killed or stopped: kill the command's processes
                if not self.box.alive:
                    raise SandboxGone(f"sandbox {self._id} has ended") from None
                await self.box.sweep(own_processes=self.own_processes)
                now = await self._events()
                killed = next((limit for limit in now if now[limit] > before[limit]), KILLED)
                outcome = Outcome(-1, "", "", TIMEOUT if isinstance(error, TimeoutError) else killed)
        if check and outcome.code != 0:
            why = outcome.cause or outcome.err.strip()[-500:] or outcome.out.strip()[-500:]
            text = cmd if isinstance(cmd, str) else " ".join(cmd)
            shown = repr(text if len(text) <= 200 else text[:200] + "...")
            raise CommandFailed(f"exit code {outcome.code} of {shown} in sandbox {self._id}: {why}", outcome)
        return outcome

    def _command(
        self, cmd: str | Sequence[str], env: Mapping[str, str] | None, seconds: float | None, cwd: str | None
    ) -> JsonObject:
        """Build the request that runs a command."""
        argv = None if isinstance(cmd, str) else [str(word) for word in cmd]
        if argv is not None and not argv:
            raise ValueError("a command needs at least one word")
        words = [cmd] if isinstance(cmd, str) else argv or []
        environment = self.environment(env)
        if any("\0" in word for word in (*words, *environment, *environment.values())):
            raise ValueError("a command and its environment cannot hold a null character")
        return {
            "do": "run",
            "argv": argv,
            "shell": cmd if argv is None else None,
            "env": environment,
            "cwd": cwd or self.workdir,
            "seconds": seconds,
            "grace_s": self.limits.grace_seconds,
            "output_kb": self.limits.output_kb,
            "output_mb": self.limits.output_mb,
            "limits": self.limits.process_limits(self.held),
            "own_processes": self.own_processes,
        }

    async def _events(self) -> dict[str, int]:
        return cgroups.count_limit_events(self.box.told["folders"])

    async def write_file(self, path: str, content: str | bytes | Path, *, user: str = "root") -> None:
        """Write a file, creating its parent folders; a `Path` as content is a file of the host."""
        if isinstance(content, Path):
            source = os.open(content, os.O_RDONLY | os.O_CLOEXEC)
            mode = os.fstat(source).st_mode & 0o777
            sending = None
        else:
            data = content if isinstance(content, bytes) else str(content).encode()
            source, writer = os.pipe()
            os.set_blocking(writer, False)
            mode, sending = 0o644, asyncio.create_task(_write_all(writer, data))
        try:
            spec = {"do": "write", **self._place(path), "mode": mode}
            answer = await self.box.ask(spec, [source])
        except BaseException:
            if sending is not None:
                sending.cancel()
            raise
        finally:
            os.close(source)
        with answer:
            await self._file_response(answer, path, "write")
        if sending is not None:
            await sending

    async def read_bytes(self, path: str) -> bytes:
        """Read the bytes of a file."""
        with await self.box.ask({"do": "read", **self._place(path)}) as answer:
            reply = await self._file_response(answer, path, "read")
            return await answer.data(reply["size"])

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """Read the text of a file."""
        return (await self.read_bytes(path)).decode(errors="replace")

    def _place(self, path: str) -> JsonObject:
        """Build the fields of a request that name a file."""
        if not path or "\0" in path:
            raise ValueError(f"{path!r} is not a valid path")
        if path == "~" or path.startswith("~/"):
            path = self.home + path[1:]
        return {"path": path, "cwd": self.workdir, "within": self._within, "most": self.limits.file_mb << 20}

    async def _file_response(self, answer: MonitorResponse, path: str, what: str) -> JsonObject:
        """Receive the response to a file request; an error becomes an exception."""
        try:
            reply, _ = await answer.message()
        except EOFError:
            raise SandboxError(f"sandbox {self._id} could not {what} {path}: its worker was killed") from None
        if "error" in reply:
            number = reply.get("errno")
            kind = FileNotFoundError if number == 2 else PermissionError if number == 13 else SandboxError
            text = f"cannot {what} {path} in sandbox {self._id}: {reply['error']}"
            raise kind(number, text) if kind is not SandboxError else SandboxError(text)
        return reply

    async def listen(self, port: int = 0) -> socket.socket:
        """Open a listening socket on the sandbox's own loopback interface, for a server that accepts on it outside."""
        with await self.box.ask({"do": "listen", "port": port}) as answer:
            reply, descriptors = await answer.message()
            if "error" in reply:
                raise SandboxError(f"cannot listen on port {port} in sandbox {self._id}: {reply['error']}")
            return socket.socket(fileno=descriptors[0])

    async def reach(self, endpoint: str) -> str:
        """Make an endpoint outside, a URL or the path of a unix socket, reachable inside; return its base URL there."""
        target, path = split_endpoint(endpoint)
        async with self._reaching:
            if target not in self._ports:
                with await self.listen() as listener:
                    await self.box.relay(listener, target)
                    self._ports[target] = listener.getsockname()[1]
        return f"http://127.0.0.1:{self._ports[target]}{path}"

    async def popen(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> MachineProcess:
        """Start a program with pipes; it runs until it exits, is killed, or the sandbox ends."""
        return await self._start_with_pipes(self._command(list(argv), env, None, cwd))

    async def popen_program(self, arguments: Sequence[str]) -> MachineProcess:
        """Start, with pipes, the program that this sandbox's fork server has compiled: no Python is started."""
        if self.server is None:
            raise SandboxError(f"sandbox {self._id} has no fork server, so it has no compiled program")
        return await self._start_with_pipes({**self._command(["-c", *arguments], None, None, None), "program": True})

    async def _start_with_pipes(self, spec: JsonMapping) -> MachineProcess:
        """Send the request that starts a program, with three pipes as its streams."""
        pipes = [os.pipe() for _ in range(3)]
        inner = [pipes[0][0], pipes[1][1], pipes[2][1]]
        outer = [pipes[0][1], pipes[1][0], pipes[2][0]]
        try:
            answer = await self.box.ask(spec, inner)
        except BaseException:
            for descriptor in outer:
                os.close(descriptor)
            raise
        finally:
            for descriptor in inner:
                os.close(descriptor)
        return await MachineProcess.opened(answer, *outer)

    async def diff(self) -> Changes:
        """Compute the changes in the folder, or the whole root, that the sandbox was given; empty if there is none."""
        folder = "/" if self.files is not None and self.files.root else self.workdir
        with await self.box.ask(
            {"do": "changes", "folder": folder, "most": _PATCH_BYTES, "without": self._placed}
        ) as answer:
            reply = await self._file_response(answer, folder, "compare")
            patch = (await answer.data(reply["patch"])).decode(errors="replace")
        return Changes(tuple((kind, path) for kind, path in reply["changes"]), patch, reply["truncated"])


class MachineProcess:
    """A program in the sandbox with pipes of its own."""

    def __init__(self, answer: MonitorResponse) -> None:
        self._answer = answer
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting = asyncio.create_task(self._wait_for_answer())
        self.error = ""
        self.stdin: asyncio.StreamWriter
        self.stdout: asyncio.StreamReader
        self.stderr: asyncio.StreamReader

    @classmethod
    async def opened(cls, answer: MonitorResponse, stdin: int, stdout: int, stderr: int) -> MachineProcess:
        """Open streams over our ends of the pipes of a program that was started."""
        self = cls(answer)
        self.stdin = await _open_writer(stdin)
        self.stdout, self.stderr = await _open_reader(stdout), await _open_reader(stderr)
        return self

    async def _wait_for_answer(self) -> None:
        code = -1
        with contextlib.suppress(EOFError):
            reply, _ = await self._answer.message()
            code = reply.get("code", -1)
            if reply.get("err"):
                self.error = (await self._answer.data(reply["err"])).decode(errors="replace")
        self._code.set_result(code)
        self._answer.close()

    async def wait(self) -> int:
        """Wait until the program has ended; return its exit code, -1 if it did not end by itself."""
        return await asyncio.shield(self._code)

    async def kill(self) -> None:
        """Kill the program and all its descendants."""
        if not self._code.done():
            with contextlib.suppress(OSError):
                self._answer.sock.shutdown(socket.SHUT_WR)
        await self.wait()
        self.stdin.close()


async def _open_reader(descriptor: int) -> asyncio.StreamReader:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader, loop=loop), os.fdopen(descriptor, "rb", 0)
    )
    return reader


async def _open_writer(descriptor: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=loop), loop=loop)
    transport, _ = await loop.connect_write_pipe(lambda: protocol, os.fdopen(descriptor, "wb", 0))
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def _write_all(descriptor: int, data: bytes) -> None:
    """Write all the data to a pipe and close it; the reader may stop early."""
    writer = await _open_writer(descriptor)
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Split an endpoint into `host:port`, or the path of a unix socket, and the path of its URL."""
    if endpoint.startswith("/"):
        return endpoint, ""
    parts = urlsplit(endpoint)
    if parts.scheme == "unix":
        return parts.path, ""
    if parts.scheme != "http" or parts.hostname is None:
        raise SandboxError(
            f"{endpoint!r} cannot be reached from a sandbox: give an http:// URL or the path of a unix socket"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{parts.port or 80}", parts.path.rstrip("/")
