"""The driver's client of a sandbox on this machine: starts its monitor and sends requests to its init.

Nothing here blocks the event loop. A request is a small message with its own socket for the response, and closing that
socket cancels the request. No other process inherits the descriptors, so when this process ends, the sandbox ends too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from slime.agent.sandbox.inside import cgroups, fd_messages
from slime.agent.sandbox.protocol import SandboxError, SandboxGone
from slime.storage.json_types import JsonMapping, JsonObject

HERE = Path(__file__).resolve().parent
_START_S = 60.0
_CLEAN_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
_BOOTSTRAP = "import sys; sys.path.insert(0, {folder!r}); from inside.{module} import {entry}; {entry}()"


def python_command(entry: str, folder: str, module: str = "monitor", *, site: bool = False) -> list[str]:
    """Command line of a program of `inside`, isolated from the environment and, without `site`, from packages."""
    code = _BOOTSTRAP.format(folder=folder, module=module, entry=entry)
    return [os.path.realpath(sys.executable), "-I", *([] if site else ["-S"]), "-c", code]


class ForkServer:
    """A process that forks the monitors of sandboxes, so that none of them has to start a Python interpreter.

    It runs no untrusted code. It has compiled `program`, which sandboxes then run by a fork too. It starts with the
    first sandbox, restarts if it has died, and ends with `close` or with this process; its sandboxes end with it.
    """

    def __init__(self, program: Path) -> None:
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._starting = threading.Lock()

    def fork(self, descriptors: Sequence[int]) -> None:
        """Fork a monitor, given the descriptors of its life socket, its control socket and its error file."""
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                self._let_go()
                ours, theirs = socket.socketpair()
                number = str(theirs.fileno())
                with theirs:
                    command = python_command("main_server", str(HERE), site=True)
                    self._process = subprocess.Popen(
                        [*command, number, str(os.getpid()), str(self._program)],
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env=_CLEAN_ENVIRONMENT,
                        cwd="/",
                        start_new_session=True,
                    )
                self._requests = ours
            assert self._requests is not None
            fd_messages.send(self._requests, {}, descriptors)

    def close(self) -> None:
        """End the process and every sandbox that it has forked."""
        with self._starting:
            self._let_go()

    def _let_go(self) -> None:
        """Close the request socket, which ends the process, and wait for it."""
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            self._process.wait()
        self._requests = self._process = None


class MonitorClient:
    """Lifecycle of one monitor, which `server` forks or which is started as a program of its own."""

    def __init__(self, spec: JsonMapping, name: str, server: ForkServer | None = None) -> None:
        self.spec = spec
        self.name = name
        self.server = server
        self.told: JsonObject = {}
        """Status that the monitor sent at the start: its control groups, the limits they enforce, the init's pid."""
        self.overlay = False
        self.filtered = False
        self._life: socket.socket | None = None
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._sending = asyncio.Lock()

    async def start(self) -> None:
        """Start the monitor and wait until the sandbox accepts requests."""
        life, theirs = socket.socketpair()
        control, init_end = socket.socketpair()
        self._life, self._control = life, control
        for sock in (life, control):
            sock.setblocking(False)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (read if the start fails, closed in `close`)
        try:
            self._process = await asyncio.to_thread(self._spawn, theirs, init_end)
        finally:
            theirs.close()
            init_end.close()
        try:
            async with asyncio.timeout(_START_S):
                await send(life, self.spec)
                self.told, _ = await receive(life)
                ready, _ = await receive(control)
        except TimeoutError:
            await self.close()
            raise SandboxError(f"sandbox {self.name} did not start within {_START_S:g} s") from None
        except (OSError, fd_messages.InvalidMessage, EOFError):
            await self.close(keep_errors=True)
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            self._errors.close()
            reason = lines[-1] if lines else "its monitor exited without an error message"
            raise SandboxError(f"sandbox {self.name} did not start: {reason}") from None
        if error := self.told.get("error") or ready.get("error"):
            await self.close()
            raise SandboxError(f"sandbox {self.name} did not start: {error}")
        self.overlay, self.filtered = bool(ready["overlay"]), bool(ready["filtered"])

    def _spawn(self, theirs: socket.socket, init_end: socket.socket) -> subprocess.Popen[bytes] | None:
        numbers = (theirs.fileno(), init_end.fileno())
        if self.server is not None:
            assert self._errors is not None
            self.server.fork([*numbers, self._errors.fileno()])
            return None
        return subprocess.Popen(
            [*python_command("main", str(HERE)), *map(str, (*numbers, os.getpid()))],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=_CLEAN_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )

    async def ask(self, request: JsonMapping, descriptors: Sequence[int] = ()) -> MonitorResponse:
        """Send a request to the init; the response is read from the returned object."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            await self._tell(request, [theirs.fileno(), *descriptors])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return MonitorResponse(ours)

    async def sweep(self, *, own_processes: bool) -> None:
        """Kill every process in the sandbox except its init."""
        await self._tell({"do": "sweep", "own_processes": own_processes}, ())

    async def _tell(self, request: JsonMapping, descriptors: Sequence[int]) -> None:
        """Send a message to the init; SandboxGone if the sandbox has ended."""
        async with self._sending:
            if self._control is None:
                raise SandboxGone(f"sandbox {self.name} has ended")
            try:
                await send(self._control, request, descriptors)
            except OSError as error:
                raise SandboxGone(f"sandbox {self.name} has ended: {error.strerror}") from None

    async def relay(self, listener: socket.socket, target: str) -> None:
        """Have the monitor forward the connections to a socket inside to an address outside."""
        async with self._sending:
            if self._life is None:
                raise SandboxGone(f"sandbox {self.name} has ended")
            await send(self._life, {"relay": target}, [listener.fileno()])

    @property
    def alive(self) -> bool:
        """True while the monitor, and so the sandbox, runs."""
        if self._life is None:
            return False
        try:
            return bool(self._life.recv(1, socket.MSG_PEEK))  # the monitor sends nothing after the start
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def close(self, *, keep_errors: bool = False) -> None:
        """End the sandbox; return after its processes have ended and its control groups are removed."""
        life, control, process = self._life, self._control, self._process
        self._life = self._control = None
        if control is not None:
            control.close()
        if life is not None:
            with contextlib.suppress(OSError):
                life.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                while await asyncio.get_running_loop().sock_recv(life, 4096):
                    pass
            life.close()
        if process is not None:
            await asyncio.to_thread(process.wait)
        await asyncio.to_thread(cgroups.remove, self.told.get("folders", []))  # if the monitor was killed
        if self._errors is not None and not keep_errors:
            self._errors.close()


class MonitorResponse:
    """Response to one request, read from the request's own socket; closing it early cancels the request."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def message(self) -> tuple[JsonObject, list[int]]:
        """Receive the response and its descriptors; EOFError if the worker was killed before it responded."""
        try:
            return await receive(self.sock)
        except (OSError, fd_messages.InvalidMessage):
            raise EOFError from None

    async def data(self, count: int) -> bytes:
        """Receive `count` bytes after the response."""
        parts = bytearray()
        loop = asyncio.get_running_loop()
        while len(parts) < count:
            part = await loop.sock_recv(self.sock, min(count - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> MonitorResponse:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


async def send(sock: socket.socket, message: JsonMapping, descriptors: Sequence[int] = ()) -> None:
    """Send a message on a non-blocking socket."""
    length, body = fd_messages.encode_message(message)
    while True:
        try:
            socket.send_fds(sock, [length], list(descriptors))  # four bytes: all or nothing
            break
        except BlockingIOError:
            await _wait_for_socket(sock, write=True)
    await asyncio.get_running_loop().sock_sendall(sock, body)


async def receive(sock: socket.socket) -> tuple[JsonObject, list[int]]:
    """Receive the next message on a non-blocking socket; EOFError at the end of the stream."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            header, descriptors, _, _ = socket.recv_fds(sock, 4, fd_messages.MAX_DESCRIPTORS)
            break
        except BlockingIOError:
            await _wait_for_socket(sock, write=False)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if not header:
        raise EOFError
    body = bytearray()
    header += b"" if len(header) == 4 else await loop.sock_recv(sock, 4 - len(header))
    size = fd_messages.decode_length(header)
    while len(body) < size:
        part = await loop.sock_recv(sock, size - len(body))
        if not part:
            raise EOFError
        body += part
    return fd_messages.decode_message(bytes(body)), descriptors


async def _wait_for_socket(sock: socket.socket, *, write: bool) -> None:
    """Wait until a socket can be read or written."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    number = sock.fileno()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    (loop.add_writer if write else loop.add_reader)(number, wake)
    try:
        await future
    finally:
        (loop.remove_writer if write else loop.remove_reader)(number)
