"""A Python interpreter as a tool: variables stay from call to call of one attempt and are gone with it.

Invariant: every attempt has a process of its own (`interpreter_worker`), from a pool of processes that are started
ahead, so that a call costs milliseconds; nobody gets one that has run anything. What a call may not take, time, memory
or output, ends the call and never the attempt: after a time-out the variables are still there where the code could be
interrupted, and where the process had to be ended the next call begins with a new one and says so.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from slime.agent.tools.outcomes import ToolFailure, ToolOutcome
from slime.agent.tools.processes import Process, ProcessStarter, subprocess_starter
from slime.agent.tools.schemas import misfit
from slime.agent.tools.tool import Tool, ToolLimits

logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""How long code may take to notice that its time is over, before its process is ended."""
START_TIMEOUT_S = 30.0
MOST_OUTPUT_CHARS = 1 << 20
LINE_LIMIT = 8 * MOST_OUTPUT_CHARS
"""Bytes of one answer: each character of the output may take six in JSON."""
DESCRIPTION = (
    "Runs Python code. Returns what it prints and the value of the last expression. Variables stay for later calls."
)


class PythonInterpreter:
    """The provider: give it to a `ToolEnvironment`.

    `timeout_s` and `memory_mb` bound each call and each process, `max_output_chars` what a call may print at all,
    `max_result_chars` what the model gets to read of it. `spare` processes are kept ready. `start` makes processes:
    by default in the strongest sandbox that this machine has.
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
        self.schema: dict[str, Any] = {"type": "function", "function": function}
        self._pool = _Pool(start or subprocess_starter(), memory_mb, spare)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[Tool]]:
        """An interpreter that has run nothing yet; its process is taken with the first call."""
        attempt = _Attempt(self, self._pool)
        try:
            yield (attempt,)
        finally:
            await attempt.aclose()

    async def aclose(self) -> None:
        """End the processes that nobody has taken."""
        await self._pool.aclose()


class _Attempt:
    """The interpreter of one attempt. Its calls come one after the other, whatever the model asks for."""

    def __init__(self, provider: PythonInterpreter, pool: _Pool) -> None:
        self.name, self.schema = provider.name, provider.schema
        patience = provider.limits.timeout_s + GRACE_S + START_TIMEOUT_S
        self.limits = ToolLimits(patience, provider.limits.concurrency, provider.limits.max_result_chars)
        self._timeout_s, self._max_output = provider.limits.timeout_s, provider.max_output_chars
        self._pool = pool
        self._worker: _Worker | None = None
        self._lost = False
        self._turn = asyncio.Lock()

    async def call(self, arguments: dict[str, Any]) -> str:
        reason = misfit(arguments, self.schema["function"]["parameters"])
        if reason is not None:
            raise ToolFailure(ToolOutcome.BAD_ARGUMENTS, reason)
        async with self._turn:
            note = "(the interpreter was started anew: variables are gone)\n" if self._lost else ""
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
            await self._lose()
            raise ToolFailure(ToolOutcome.TIMEOUT, self._late("and the interpreter was ended")) from None
        except _Gone as gone:
            await self._lose()
            raise ToolFailure(ToolOutcome.CRASHED, f"the interpreter ended in the middle of the call{gone}") from None
        except asyncio.CancelledError:
            await self._lose()
            raise
        return self._read(answer)

    def _read(self, answer: dict[str, Any]) -> str:
        outcome = ToolOutcome(answer["outcome"])
        output: str = answer["output"]
        if outcome is ToolOutcome.OK:
            return output.removesuffix("\n")
        reason = {
            ToolOutcome.TIMEOUT: self._late("and was interrupted"),
            ToolOutcome.TOO_MUCH_OUTPUT: f"the code printed more than {self._max_output} characters",
        }.get(outcome, answer["error"])
        raise ToolFailure(outcome, f"{output.removesuffix(chr(10))}\n{reason}" if output else reason)

    def _late(self, what: str) -> str:
        return f"the code took longer than {self._timeout_s:g} s {what}"

    async def _lose(self) -> None:
        self._lost = True
        await self.aclose()

    async def aclose(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.end()


class _Gone(Exception):
    """The process hung up."""


class _Worker:
    """One process, and its two pipes."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._number = 0

    async def ready(self) -> None:
        async with asyncio.timeout(START_TIMEOUT_S):
            await self._line()

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        try:
            self._process.stdin.write(json.dumps(request | {"number": self._number}).encode() + b"\n")
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError) as error:
            raise _Gone from error
        answer = await self._line()
        if not isinstance(answer, dict) or answer.get("number") != self._number:  # the code found the pipe
            raise _Gone(" (it answered what it was not asked)")
        return answer

    async def _line(self) -> Any:
        try:
            line = await self._process.stdout.readline()
            if line.endswith(b"\n"):
                return json.loads(line)
        except (ConnectionError, ValueError) as error:  # ValueError: a line longer than any answer, or no JSON
            raise _Gone from error
        code = await self._process.exit_code()
        raise _Gone("" if code is None else f" (exit code {code})")

    async def end(self) -> None:
        await self._process.kill()


class _Pool:
    """Processes that are ready and have run nothing."""

    def __init__(self, start: ProcessStarter, memory_mb: int, spare: int) -> None:
        self._start, self._memory_mb, self._spare = start, memory_mb, spare
        self._ready: deque[_Worker] = deque()
        self._starting: set[asyncio.Task[None]] = set()

    async def take(self) -> _Worker:
        worker = self._ready.popleft() if self._ready else None
        if worker is None:
            worker = await self._make()
        while len(self._ready) + len(self._starting) < self._spare:
            task = asyncio.create_task(self._add())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
        return worker

    async def _add(self) -> None:
        try:
            self._ready.append(await self._make())
        except ToolFailure as failure:  # whoever needs it tries again and hears why
            logger.warning("a Python interpreter could not be started ahead: %s", failure)

    async def _make(self) -> _Worker:
        from slime.agent.tools.interpreter_worker import __file__ as program

        process: Process | None = None
        try:
            process = await self._start(program, str(self._memory_mb), line_limit=LINE_LIMIT)
            worker = _Worker(process)
            await worker.ready()
        except (OSError, TimeoutError, _Gone) as error:
            if process is not None:
                await process.kill()
            why = str(error) or type(error).__name__
            raise ToolFailure(ToolOutcome.CRASHED, f"no interpreter could be started: {why}") from error
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
            await self._ready.popleft().end()
