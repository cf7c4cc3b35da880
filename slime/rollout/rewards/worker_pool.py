"""`GuardedPool`: a few persistent worker processes behind an async call.

Invariant: a call ends within its deadline, with an answer or a `RewardError`. A worker that hangs, dies or returns an
invalid answer is killed and replaced, and no worker outlives the process that started it. Calls may come from any event
loop: the pool waits in threads of its own, not of a loop.
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

from slime.cluster.child_env import module_command, without_secrets
from slime.storage.json_types import JsonObject


class RewardError(Exception):
    """A verifier failed to score a sample, for a reason unrelated to the response; never turned into a reward of 0."""


_READ_BYTES = 1 << 16


class WorkerFailed(Exception):
    """A worker did not answer; the text is the reason."""


class RewardWorker:
    """One process that runs a module and exchanges one JSON object per line."""

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

    def ask(self, request: JsonObject, deadline_s: float) -> JsonObject:
        """Send one request and wait for its answer; after a `WorkerFailed` the worker must be discarded."""
        deadline = time.monotonic() + deadline_s
        unsent = memoryview(json.dumps(request).encode("utf-8") + b"\n")
        while unsent:
            self._wait_for(self._stdin, select.POLLOUT, deadline)
            try:
                unsent = unsent[os.write(self._stdin, unsent) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise WorkerFailed(self._exit_reason()) from error
        return self._receive(deadline)

    def kill(self) -> None:
        """End the process and release its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _receive(self, deadline: float) -> JsonObject:
        """Read one line and decode it."""
        while b"\n" not in self._unread:
            self._wait_for(self._stdout, select.POLLIN, deadline)
            chunk = os.read(self._stdout, _READ_BYTES)
            if not chunk:
                raise WorkerFailed(self._exit_reason())
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
        """Wait until a pipe is ready; WorkerFailed at the deadline."""
        poll = select.poll()
        poll.register(descriptor, event)
        remaining_ms = max(0.0, deadline - time.monotonic()) * 1000
        if not poll.poll(remaining_ms):
            raise WorkerFailed("did not answer within its deadline")

    def _exit_reason(self) -> str:
        """Describe the end of the process, for a `WorkerFailed`."""
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "closed its pipes"
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


class GuardedPool:
    """Pool of up to `size` workers, which start when first needed."""

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
        self._idle: deque[RewardWorker] = deque()
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="reward-guard")
        self._finalizer = weakref.finalize(self, _end_workers, self._threads, self._idle)

    async def ask(self, request: JsonObject) -> JsonObject:
        """Send a request to a worker and return its answer; `RewardError` if there is no answer within the deadline."""
        if not self._finalizer.alive:
            raise RuntimeError("the reward worker pool is closed")
        return await asyncio.wrap_future(self._threads.submit(self._ask_blocking, request))

    def worker_pids(self) -> list[int]:
        """Pids of the idle workers."""
        return [worker.pid for worker in self._idle]

    def close(self) -> None:
        """End all workers after the calls in flight have finished."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._finalizer()

    def _ask_blocking(self, request: JsonObject) -> JsonObject:
        """Send a request to an idle worker, or to a new one; kill the worker if it fails."""
        worker: RewardWorker | None = None
        while worker is None and self._idle:
            try:
                idle = self._idle.pop()
            except IndexError:
                break
            if idle.is_alive():
                worker = idle
            else:
                idle.kill()
        if worker is None:
            try:
                worker = RewardWorker(
                    self._module,
                    memory_bytes=self._memory_bytes,
                    call_deadline_s=self._deadline_s,
                    start_deadline_s=self._start_deadline_s,
                )
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


def _end_workers(threads: ThreadPoolExecutor, idle: deque[RewardWorker]) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    while idle:
        idle.pop().kill()
