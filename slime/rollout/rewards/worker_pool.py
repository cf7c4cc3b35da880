"""A few persistent worker processes behind an async call.

Invariant: a call ends within its deadline, in an answer or in a `RewardError`; a worker that hangs, dies or answers
nonsense is killed and replaced, and no worker outlives the process that started it. Calls may come from any event
loop: the waiting is done in threads that belong to the pool, not to a loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slime.cluster.child_env import module_command, without_secrets

# The one way a verifier says that it could not judge: an outcome of its own, never a reward of 0.


class RewardError(Exception):
    """No reward could be found for a sample, for a reason that says nothing about the response."""


_READ_BYTES = 1 << 16


class WorkerFailed(Exception):
    """A worker did not answer; its text says what happened."""


class Worker:
    """One process running a module, speaking one JSON object per line."""

    def __init__(self, module: str, *, memory_bytes: int, call_deadline_s: float, start_deadline_s: float) -> None:
        cpu_seconds = int(call_deadline_s) + 2
        self._process = subprocess.Popen(
            [*module_command(module), str(os.getpid()), str(memory_bytes), str(cpu_seconds)],
            env=without_secrets(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin.fileno()
        self._stdout = self._process.stdout.fileno()
        self._unread = b""
        os.set_blocking(self._stdin, False)
        try:
            self._receive(time.monotonic() + start_deadline_s)
        except WorkerFailed:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Send one request and wait for its answer; after a `WorkerFailed` the worker is of no more use."""
        deadline = time.monotonic() + deadline_s
        self._send(json.dumps(request).encode("utf-8") + b"\n", deadline)
        return self._receive(deadline)

    def kill(self) -> None:
        """End the process and release its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, data: bytes, deadline: float) -> None:
        unsent = memoryview(data)
        while unsent:
            self._wait_for(self._stdin, select.POLLOUT, deadline)
            try:
                unsent = unsent[os.write(self._stdin, unsent) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise WorkerFailed(self._how_it_ended()) from error

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._unread:
            self._wait_for(self._stdout, select.POLLIN, deadline)
            chunk = os.read(self._stdout, _READ_BYTES)
            if not chunk:
                raise WorkerFailed(self._how_it_ended())
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise WorkerFailed(f"answered {line[:80]!r}, which is not JSON") from error
        if not isinstance(answer, dict):
            raise WorkerFailed(f"answered {line[:80]!r}, which is not a JSON object")
        return answer

    def _wait_for(self, descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        remaining_ms = max(0.0, deadline - time.monotonic()) * 1000
        if not poll.poll(remaining_ms):
            raise WorkerFailed("did not answer within its deadline")

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "closed its pipes"
        return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"


class GuardedPool:
    """Up to `size` workers, started when first needed."""

    def __init__(
        self,
        module: str,
        *,
        size: int = 2,
        deadline_s: float = 10.0,
        start_deadline_s: float = 120.0,
        memory_bytes: int = 2 << 30,
    ) -> None:
        self._module = module
        self._deadline_s = deadline_s
        self._start_deadline_s = start_deadline_s
        self._memory_bytes = memory_bytes
        self._idle: deque[Worker] = deque()
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="reward-guard")
        self._finalizer = weakref.finalize(self, _end, self._threads, self._idle)

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One worker's answer to `request`; a `RewardError` when there is none within the deadline."""
        if not self._finalizer.alive:
            raise RuntimeError("the reward workers were closed")
        return await asyncio.wrap_future(self._threads.submit(self._ask_blocking, request))

    def worker_pids(self) -> list[int]:
        """The processes that wait for work now."""
        return [worker.pid for worker in self._idle]

    def close(self) -> None:
        """End all workers, waiting for the calls under way."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._finalizer()

    def _ask_blocking(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            worker = self._take()
        except WorkerFailed as failure:
            raise RewardError(f"the {self._module} worker does not start: it {failure}") from failure
        try:
            answer = worker.ask(request, self._deadline_s)
        except WorkerFailed as failure:
            worker.kill()
            raise RewardError(f"the verifier {failure} ({self._deadline_s:g} s allowed); it was restarted") from failure
        except BaseException:
            worker.kill()
            raise
        if answer.get("leaving"):
            worker.kill()
        else:
            self._idle.append(worker)
        if "error" in answer:
            raise RewardError(f"the verifier failed: {answer['error']}")
        return answer

    def _take(self) -> Worker:
        while self._idle:
            try:
                worker = self._idle.pop()
            except IndexError:
                break
            if worker.is_alive():
                return worker
            worker.kill()
        return Worker(
            self._module,
            memory_bytes=self._memory_bytes,
            call_deadline_s=self._deadline_s,
            start_deadline_s=self._start_deadline_s,
        )


def _end(threads: ThreadPoolExecutor, idle: deque[Worker]) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    while idle:
        idle.pop().kill()
