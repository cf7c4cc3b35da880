"""`docker` and `podman`: one container per sandbox, driven by the program's command line without a shell.

The container lives as long as the pipe to its first process: when the driver dies for any reason, that process reads
the end of the pipe, exits, and the container is removed. It has no network; `reach` opens a port inside from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from slime.agent.sandbox.host_sandbox import check_devices, split_endpoint
from slime.agent.sandbox.inside.command_worker import OutputCapture
from slime.agent.sandbox.monitor_client import HERE, python_command, receive
from slime.agent.sandbox.protocol import (
    MEMORY,
    OUTPUT,
    TIMEOUT,
    CommandFailed,
    Outcome,
    SandboxError,
    SandboxGone,
    SandboxLimits,
)
from slime.errors import UserError

WORKDIR = "/workspace"
_START_S = 300.0
"""Time limit of a start, in which an image may have to be pulled."""
_CONTROL_S = 60.0
_DRAIN_TIMEOUT_S = 5.0
_FIRST_PROCESS_SCRIPT = "mkdir -p /workspace; echo ready; exec cat"
_KILLED = 137
_OOM_COUNT_SCRIPT = (
    "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null | grep '^oom_kill '"
)
_KILL_SCRIPT = (
    'for round in 1 2 3; do for process in /proc/[0-9]*; do grep -qs "SLIME_COMMAND=$1" "$process/environ" && '
    'kill -9 "${process#/proc/}" 2>/dev/null; done; done; true'
)
"""Kills the processes of a command, which carry its mark in their environment."""


class ContainerSandbox:
    """One container, whose limits are flags of the program."""

    boundary = True

    def __init__(
        self,
        kind: str,
        image: str | None,
        *,
        limits: SandboxLimits | None = None,
        env: Mapping[str, str] | None = None,
        visible: Sequence[str | Path] = (),
        devices: Sequence[str | Path] = (),
    ) -> None:
        if image is None:
            raise UserError(f"--sandbox {kind} starts from an image: set --sandbox-image")
        program = shutil.which(kind)
        if program is None:
            raise UserError(f"--sandbox {kind} needs the program {kind}, which is not installed")
        self.kind = kind
        self.image = image
        self.limits = limits or SandboxLimits()
        self.workdir = WORKDIR
        self._program = program
        self._env = dict(env or {})
        self._visible = [os.path.realpath(path) for path in visible]
        self._devices = check_devices(devices)
        self._name = f"slime-sandbox-{secrets.token_hex(8)}"
        self._first: asyncio.subprocess.Process | None = None
        self._reaching = asyncio.Lock()
        self._port_forwards: dict[str, tuple[subprocess.Popen[bytes], socket.socket, int]] = {}
        self._killed_for_memory = 0

    @property
    def sandbox_id(self) -> str:
        return self._name

    def create_command(self) -> list[str]:
        """Command line that creates the container."""
        limits = self.limits
        words = [
            *(self._program, "run", "--rm", "--interactive", "--init", "--name", self._name, "--network", "none"),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--pids-limit", str(limits.processes)),
            *("--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"),
            *(
                "--ulimit",
                f"fsize={limits.file_mb << 20}",
                "--ulimit",
                f"nofile={limits.open_files}",
                "--ulimit",
                "core=0",
            ),
            *("--tmpfs", f"/tmp:rw,exec,mode=1777,size={limits.disk_mb}m"),
        ]
        if limits.cpus is not None:
            words += ["--cpus", str(limits.cpus)]
        for path in self._visible:
            words += ["--mount", f"type=bind,source={path},target={path},readonly"]
        for path in self._devices:
            words += ["--device", path]
        for name, value in self._env.items():
            words += ["--env", f"{name}={value}"]
        return [*words, "--entrypoint", "/bin/sh", self.image, "-c", _FIRST_PROCESS_SCRIPT]

    async def __aenter__(self) -> Self:
        self._first = await asyncio.create_subprocess_exec(
            *self.create_command(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert self._first.stdout is not None
        assert self._first.stderr is not None
        try:
            async with asyncio.timeout(_START_S):
                line = await self._first.stdout.readline()
        except TimeoutError:
            await self.__aexit__()
            raise SandboxError(f"{self.kind} did not start {self.image} within {_START_S:g} s") from None
        if line.strip() != b"ready":
            errors = (await self._first.stderr.read()).decode(errors="replace").strip().splitlines()
            await self._first.wait()
            reason = errors[-1] if errors else "it printed no error message"
            raise SandboxError(f"{self.kind} could not start {self.image}: {reason}")
        return self

    async def __aexit__(self, *exc: object) -> None:
        for process, life, _ in self._port_forwards.values():
            life.close()
            await asyncio.to_thread(process.wait)
        if self._first is not None and self._first.returncode is None:
            await self._control("kill", self._name)
            assert self._first.stdin is not None
            self._first.stdin.close()
            await _wait_and_drain(self._first)

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (upstream's name)
        check: bool = False,
        idempotent: bool = True,
    ) -> Outcome:
        """Run a line in the container's shell, or a program with its arguments."""
        words = ["/bin/sh", "-c", cmd] if isinstance(cmd, str) else list(cmd)
        seconds = self.limits.seconds if timeout is None else timeout
        outcome = await self._run(words, user, env or {}, seconds)
        if check and outcome.code != 0:
            shown = " ".join(words)[:200]
            raise CommandFailed(
                f"exit code {outcome.code} of {shown!r}: {outcome.cause or outcome.err[-500:]}", outcome
            )
        return outcome

    async def _run(
        self, words: Sequence[str], user: str, env: Mapping[str, str], seconds: float, data: bytes | None = None
    ) -> Outcome:
        """Run a program in the container, with `data` as its input."""
        if self._first is None or self._first.returncode is not None:
            raise SandboxGone(f"container {self._name} is not running")
        mark = secrets.token_hex(8)
        marked = {**env, "SLIME_COMMAND": mark}
        flags = [word for name, value in marked.items() for word in ("--env", f"{name}={value}")]
        process = await asyncio.create_subprocess_exec(
            *(self._program, "exec", "--interactive", "--user", user, "--workdir", self.workdir, *flags),
            *(self._name, *words),
            stdin=asyncio.subprocess.PIPE if data is not None else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err, cause = await self._watched(process, seconds, data)
        except BaseException:
            await self._end(process, user, mark)
            raise
        if cause is not None:
            await self._end(process, user, mark)
        code = await process.wait()
        if cause is None and code == _KILLED:
            _, lines = await self._control("exec", self._name, "/bin/sh", "-c", _OOM_COUNT_SCRIPT)
            counters = [line.split()[1] for line in lines.splitlines() if line.split()[1:2]]
            counts = [int(counter) for counter in counters if counter.isdigit()]
            before, self._killed_for_memory = self._killed_for_memory, max(counts, default=0)
            cause = MEMORY if self._killed_for_memory > before else None
        ended = cause in (TIMEOUT, OUTPUT)
        texts = [kept.result() for kept in (out, err)]
        decoded = [text.decode(errors="replace") for text, _ in texts]
        return Outcome(-1 if ended else code, decoded[0], decoded[1], cause, any(cut for _, cut in texts))

    async def _watched(
        self, process: asyncio.subprocess.Process, seconds: float, data: bytes | None
    ) -> tuple[OutputCapture, OutputCapture, str | None]:
        """Capture a command's output until it ends or hits the output or time limit; return that limit, if any."""
        out, err = OutputCapture(self.limits.output_kb * 1024), OutputCapture(self.limits.output_kb * 1024)
        most, too_much = self.limits.output_mb << 20, asyncio.Event()
        assert process.stdout is not None
        assert process.stderr is not None

        async def read(stream: asyncio.StreamReader, kept: OutputCapture) -> None:
            while chunk := await stream.read(1 << 16):
                kept.add(chunk)
                if out.total + err.total > most:
                    too_much.set()
                    return

        async def write() -> None:
            if process.stdin is not None:
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(data or b"")
                    await process.stdin.drain()
                process.stdin.close()

        whole = asyncio.gather(read(process.stdout, out), read(process.stderr, err), write())
        limit = asyncio.ensure_future(too_much.wait())
        waits: list[asyncio.Future[Any]] = [whole, limit]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return out, err, OUTPUT if too_much.is_set() else None if whole.done() else TIMEOUT
        finally:
            for task in waits:
                task.cancel()

    async def _end(self, process: asyncio.subprocess.Process, user: str, mark: str) -> None:
        """Kill all processes of a command."""
        await self._control("exec", "--user", user, self._name, "/bin/sh", "-c", _KILL_SCRIPT, "sh", mark)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await _wait_and_drain(process)

    async def _control(self, *words: str) -> tuple[int, str]:
        """Run a subcommand of the program; return its exit code and output."""
        process = await asyncio.create_subprocess_exec(
            self._program, *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(_CONTROL_S):
                out, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            raise SandboxError(f"{self.kind} {words[0]} did not finish within {_CONTROL_S:g} s") from None
        assert process.returncode is not None
        return process.returncode, out.decode(errors="replace")

    async def write_file(self, path: str, content: str | bytes | Path, *, user: str = "root") -> None:
        """Write a file, creating its parent folders; a `Path` as content is a file of the host."""
        if isinstance(content, Path):
            data = await asyncio.to_thread(content.read_bytes)
        else:
            data = content if isinstance(content, bytes) else str(content).encode()
        line = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
        outcome = await self._run(["/bin/sh", "-c", line, "sh", path], user, {}, _CONTROL_S, data)
        if outcome.code != 0:
            raise SandboxError(f"cannot write {path} in container {self._name}: {outcome.cause or outcome.err.strip()}")

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """Read the text of a regular file, which must fit into `output_kb`."""
        line = 'test -f "$1" && cat "$1"'
        outcome = await self._run(["/bin/sh", "-c", line, "sh", path], user, {}, _CONTROL_S)
        if outcome.code != 0:
            raise FileNotFoundError(
                2, f"cannot read {path} in container {self._name}: not a regular file, or not readable"
            )
        if outcome.truncated:
            raise SandboxError(
                f"{path} in container {self._name} is larger than the limit output_kb of {self.limits.output_kb}"
            )
        return outcome.out

    async def reach(self, endpoint: str) -> str:
        """Make an endpoint outside, a URL or the path of a unix socket, reachable inside; return its base URL there."""
        target, path = split_endpoint(endpoint)
        async with self._reaching:
            if target not in self._port_forwards:
                _, pid = await self._control("inspect", "--format", "{{.State.Pid}}", self._name)
                if not pid.strip().isdigit():
                    raise SandboxGone(f"container {self._name} is not running")
                life, theirs = socket.socketpair()
                life.setblocking(False)
                command = python_command("main_port_forward", str(HERE), "port_forward")
                words = [*command, str(theirs.fileno()), str(int(pid)), target]
                with theirs:
                    process = await asyncio.to_thread(
                        lambda: subprocess.Popen(
                            words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={}, cwd="/"
                        )
                    )
                try:
                    reply, _ = await receive(life)
                except EOFError:
                    reply = {"error": "its process exited"}
                if "error" in reply:
                    life.close()
                    await asyncio.to_thread(process.wait)
                    raise SandboxError(
                        f"cannot open a port in container {self._name}: {reply['error']}; run as root or as the "
                        "container's user"
                    )
                self._port_forwards[target] = (process, life, int(reply["port"]))
        return f"http://127.0.0.1:{self._port_forwards[target][2]}{path}"


async def _wait_and_drain(process: asyncio.subprocess.Process) -> None:
    """Wait for an ending process; stop reading its pipes after a while, as another process may keep them open."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_TIMEOUT_S):
            for stream in (process.stdout, process.stderr):
                while stream is not None and await stream.read(1 << 16):
                    pass
    await process.wait()
