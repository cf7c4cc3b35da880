"""A Python interpreter as a tool: variables persist between the calls of one attempt and end with the attempt.

The interpreter is a program in a sandbox that the tool talks to over pipes. A fork server makes the sandboxes, some in
advance, so that a call does not have to wait for one.

Invariants: every attempt has its own sandbox, which no other attempt uses before or after it: its files, processes,
network and memory begin empty and end with it. Exceeding a limit of time, memory or output ends the call and never the
attempt: after a timeout the variables persist if the code could be interrupted; if the process had to be killed, the
next call starts a new one and says so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import sysconfig
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from slime.agent.sandbox import SandboxError, SandboxLimits, make_sandbox
from slime.agent.sandbox.host_sandbox import MachineProcess, MachineSandbox
from slime.agent.sandbox.monitor_client import ForkServer
from slime.agent.tools.schemas import find_mismatch
from slime.agent.tools.tool import Tool, ToolFailure, ToolLimits, ToolOutcome
from slime.errors import UserError
from slime.storage.json_types import JsonObject

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 2.0
KINDS = ("auto", "local", "subprocess", "none")
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_USER_PROCESS_LIMIT = 1 << 16
"""Process limit without isolation, where the processes of a sandbox count with all others of the user."""


class InterpreterProcess(Protocol):
    """A running interpreter program with its two pipes."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader

    @property
    def alive(self) -> bool:
        """True while its sandbox exists."""
        ...

    async def kill(self) -> None:
        """Kill it and everything that it started; a second call does nothing."""
        ...

    async def exit_code(self) -> int | None:
        """Return the exit code; None if the process does not end within `EXIT_TIMEOUT_S`."""
        ...


class ProcessStarter(Protocol):
    """Starts the program with arguments, in a new environment each time."""

    async def __call__(self, arguments: Sequence[str]) -> InterpreterProcess: ...

    async def aclose(self) -> None:
        """Release the resources that it keeps for further starts."""
        ...


class SandboxStarter:
    """Forks a new sandbox with the program in it for every start, so that attempts are isolated from each other."""

    def __init__(self, program: Path, sandbox: str, *, memory_mb: int, packages: bool) -> None:
        if sandbox not in KINDS:
            raise UserError(f"there is no sandbox {sandbox!r} for an interpreter: choose one of {', '.join(KINDS)}")
        self.kind = sandbox
        self._sites = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) if packages else []
        self._memory_mb = memory_mb + 64
        self._server = ForkServer(program)

    def check(self) -> None:
        """Raise `UserError` with a remedy if this machine cannot make such a sandbox."""
        self._made()

    def _made(self) -> MachineSandbox:
        is_open = self.kind in ("subprocess", "none")
        limits = SandboxLimits(
            memory_mb=self._memory_mb,
            processes=_USER_PROCESS_LIMIT if is_open else 64,
            disk_mb=256,
            file_mb=256,
            cpu_seconds=1 << 30,
        )
        kind = "subprocess" if is_open else self.kind
        sandbox = make_sandbox(kind, limits=limits, visible=self._sites, env=_ENVIRONMENT, server=self._server)
        assert isinstance(sandbox, MachineSandbox)
        return sandbox

    async def __call__(self, arguments: Sequence[str]) -> InterpreterProcess:
        sandbox = self._made()
        await sandbox.__aenter__()
        try:
            process = await sandbox.popen_program([*arguments, *self._sites])
        except BaseException:
            await sandbox.__aexit__(None, None, None)
            raise
        return _SandboxedProcess(sandbox, process)

    async def aclose(self) -> None:
        await asyncio.to_thread(self._server.close)


class _SandboxedProcess:
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
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                return await self._process.wait()
        except TimeoutError:
            return None


GRACE_S = 2.0
"""Seconds that code has to react to the timeout before its process is killed."""
START_TIMEOUT_S = 30.0
MOST_OUTPUT_CHARS = 1 << 20
STARTS_AT_ONCE = 2 * (os.cpu_count() or 1)
PROGRAM = Path(__file__).with_name("interpreter_worker.py")
LINE_LIMIT = 8 * MOST_OUTPUT_CHARS
"""Limit on the bytes of one answer: each character of the output may take six bytes in JSON."""
DESCRIPTION = (
    "Runs Python code. Returns what it prints and the value of the last expression. Variables stay for later calls."
)


class PythonInterpreter:
    """The interpreter's provider, for a `ToolEnvironment`.

    `timeout_s` limits each call and `memory_mb` each process, `max_output_chars` limits the output of a call, and
    `max_result_chars` the part of it that the model reads. `spare` sandboxes are kept ready. `sandbox` is a kind of
    sandbox of this machine (docs/sandboxes.md); None: the kind of `--sandbox` in a run, else "auto". With "subprocess"
    there is no isolation: the code has your rights. It can import the standard library, and with `packages` the
    packages that are installed next to slime.
    """

    def __init__(
        self,
        *,
        name: str = "python",
        description: str = DESCRIPTION,
        timeout_s: float = 10.0,
        memory_mb: int = 512,
        max_output_chars: int = 1 << 16,
        max_result_chars: int = 8192,
        concurrency: int = 16,
        spare: int = 4,
        sandbox: str | None = None,
        packages: bool = False,
        start: ProcessStarter | None = None,
    ) -> None:
        self.name = name
        self.limits = ToolLimits(timeout_s, concurrency, max_result_chars)
        self.max_output_chars = min(max_output_chars, MOST_OUTPUT_CHARS)
        parameters = {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the code to run"}},
            "required": ["code"],
            "additionalProperties": False,
        }
        function = {"name": name, "description": description, "parameters": parameters}
        self.schema: JsonObject = {"type": "function", "function": function}
        own = SandboxStarter(PROGRAM, sandbox or "auto", memory_mb=memory_mb, packages=packages)
        self._follows = own if sandbox is None and start is None else None
        if sandbox is not None:
            own.check()
        self._start = start or own
        self._pool = _Pool(self._start, memory_mb, spare)

    def follow(self, sandbox: str) -> None:
        """Use the run's kind of sandbox (`--sandbox`) if the interpreter has none of its own."""
        if self._follows is not None:
            self._follows.kind = sandbox if sandbox in KINDS else "auto"

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[Tool]]:
        """Open an interpreter that has run nothing yet; its process is taken from the pool by the first call."""
        if self._follows is not None:
            self._follows.check()
        attempt = _AttemptInterpreter(self, self._pool)
        try:
            yield (attempt,)
        finally:
            attempt.leave()

    async def aclose(self) -> None:
        """Close the unused sandboxes, and the fork server."""
        await self._pool.aclose()
        await self._start.aclose()


class _AttemptInterpreter:
    """The interpreter of one attempt. Its calls run one after the other, even those of one turn."""

    def __init__(self, provider: PythonInterpreter, pool: _Pool) -> None:
        self.name, self.schema = provider.name, provider.schema
        patience = provider.limits.timeout_s + GRACE_S + START_TIMEOUT_S
        self.limits = ToolLimits(patience, provider.limits.concurrency, provider.limits.max_result_chars)
        self._timeout_s, self._max_output = provider.limits.timeout_s, provider.max_output_chars
        self._pool = pool
        self._worker: _WorkerClient | None = None
        self._lost = False
        self._turn = asyncio.Lock()

    async def call(self, arguments: JsonObject) -> str:
        reason = find_mismatch(arguments, self.schema["function"]["parameters"])
        if reason is not None:
            raise ToolFailure(ToolOutcome.BAD_ARGUMENTS, reason)
        async with self._turn:
            note = "(the interpreter was restarted: variables are lost)\n" if self._lost else ""
            try:
                return note + await self._run(arguments["code"])
            except ToolFailure as failure:
                raise ToolFailure(failure.outcome, note + failure.text) from failure

    async def _run(self, code: str) -> str:
        if self._worker is None:
            self._worker = await self._pool.take()
            self._lost = False
        request = {"code": code, "timeout_s": self._timeout_s, "max_output": self._max_output}
        try:
            async with asyncio.timeout(self._timeout_s + GRACE_S):
                answer = await self._worker.ask(request)
        except TimeoutError:
            await self._discard_worker()
            raise ToolFailure(ToolOutcome.TIMEOUT, self._late("and the interpreter was killed")) from None
        except _ProcessDied as gone:
            await self._discard_worker()
            raise ToolFailure(ToolOutcome.CRASHED, f"the interpreter died during the call{gone}") from None
        except asyncio.CancelledError:
            await self._discard_worker()
            raise
        outcome = ToolOutcome(answer["outcome"])
        output: str = answer["output"]
        if outcome is ToolOutcome.OK:
            return output.removesuffix("\n")
        failure: str = answer["error"]
        if outcome is ToolOutcome.TIMEOUT:
            failure = self._late("and was interrupted")
        elif outcome is ToolOutcome.TOO_MUCH_OUTPUT:
            failure = f"the code printed more than {self._max_output} characters"
        raise ToolFailure(outcome, f"{output.removesuffix(chr(10))}\n{failure}" if output else failure)

    def _late(self, what: str) -> str:
        return f"the code took longer than {self._timeout_s:g} s {what}"

    async def _discard_worker(self) -> None:
        self._lost = True
        await self.aclose()

    async def aclose(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.end()

    def leave(self) -> None:
        """Give the process back to the pool, because the attempt is over."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._pool.give_back(worker)


class _ProcessDied(Exception):
    """The process closed its pipe, or its answer is invalid."""


class _WorkerClient:
    """Client of one interpreter process over its two pipes."""

    def __init__(self, process: InterpreterProcess) -> None:
        self._process = process
        self._held = bytearray()

    @property
    def alive(self) -> bool:
        return self._process.alive

    async def begin(self) -> None:
        """Wait until the process accepts requests."""
        while "ready" not in await self._line():
            pass

    async def ask(self, request: JsonObject) -> JsonObject:
        """Send a request and return its answer; raises `_ProcessDied` if the process dies."""
        nonce = secrets.token_hex(8)
        try:
            self._process.stdin.write(json.dumps(request | {"nonce": nonce}).encode() + b"\n")
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError):
            raise await self._gone() from None
        answer = await self._line()
        if answer.get("nonce") != nonce:  # the code wrote into the pipe
            raise _ProcessDied(" (its answer does not match the request)")
        return answer

    async def _line(self) -> JsonObject:
        while b"\n" not in self._held:
            piece = await self._process.stdout.read(1 << 16)
            if not piece:
                raise await self._gone()
            self._held += piece
            if len(self._held) > LINE_LIMIT:
                raise _ProcessDied(f" (its answer is longer than {LINE_LIMIT} bytes)")
        line, _, rest = bytes(self._held).partition(b"\n")
        self._held = bytearray(rest)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        return answer if isinstance(answer, dict) else {}

    async def _gone(self) -> _ProcessDied:
        code = await self._process.exit_code()
        return _ProcessDied("" if code is None else f" (exit code {code})")

    async def end(self) -> None:
        await self._process.kill()


class _Pool:
    """Pool of interpreter processes that are ready, each in an unused sandbox."""

    def __init__(self, start: ProcessStarter, memory_mb: int, spare: int) -> None:
        self._start, self._memory_mb, self._spare = start, memory_mb, spare
        self._ready: deque[_WorkerClient] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._at_once = asyncio.Semaphore(STARTS_AT_ONCE)

    async def take(self) -> _WorkerClient:
        """Return a process that is ready, or a new one, and start spare ones."""
        ready = None
        while self._ready and ready is None:
            worker = self._ready.popleft()
            if worker.alive:
                ready = worker
            else:
                self.give_back(worker)
        worker = ready or await self._make()
        for _ in range(self._spare - len(self._ready) - len(self._starting)):
            _track_task(self._starting, self._add())
        return worker

    def give_back(self, worker: _WorkerClient) -> None:
        """Kill the process of a finished attempt in the background."""
        _track_task(self._ending, worker.end())

    async def _add(self) -> None:
        try:
            self._ready.append(await self._make())
        except (ToolFailure, UserError) as failure:  # the next call tries again and reports it
            logger.warning("cannot start a spare Python interpreter: %s", failure)

    async def _make(self) -> _WorkerClient:
        process: InterpreterProcess | None = None
        try:
            async with self._at_once:
                process = await self._start([str(self._memory_mb)])
                worker = _WorkerClient(process)
                async with asyncio.timeout(START_TIMEOUT_S):
                    await worker.begin()
        except (OSError, SandboxError, TimeoutError, _ProcessDied) as error:
            if process is not None:
                await process.kill()
            why = str(error) if isinstance(error, _ProcessDied) else f": {error or type(error).__name__}"
            raise ToolFailure(ToolOutcome.CRASHED, f"no interpreter could be started{why}") from error
        except asyncio.CancelledError:
            if process is not None:
                await process.kill()
            raise
        return worker

    async def aclose(self) -> None:
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        while self._ready:
            self.give_back(self._ready.popleft())
        await asyncio.gather(*self._ending, return_exceptions=True)


def _track_task(tasks: set[asyncio.Task[None]], work: Coroutine[object, object, None]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
