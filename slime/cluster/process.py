"""Child processes that die with the driver, however it exits.

Invariant: a process started here, and every process it starts, ends a few seconds after the driver, whether the driver
returned, raised, was terminated or was killed with SIGKILL. A guard process (reaper.py) between the driver and the
child ensures it; the driver must only keep the write end of the guard's control pipe to itself.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from slime.cluster import reaper
from slime.cluster.child_env import without_secrets
from slime.cluster.node import NodeProcess
from slime.cluster.watchdog import waiting
from slime.cluster.watchdog.stacks import log_tail, pid_state, process_registry, send_sigquit

_POLL_S = 0.02
_KILL_WAIT_S = 3.0
_LAST_WAIT_S = 30.0

logger = logging.getLogger(__name__)
Kept = TypeVar("Kept", bound=NodeProcess)


class ChildProcess:
    """One named child: `argv` with stdout and stderr appended to `log_path`.

    `env` overrides the driver's environment, of which the child gets no secrets except those named in `pass_env`.
    `pass_fds` keep their numbers in the child; the caller closes its own copies after `start`, so that the other end
    reads end of file when the child is gone. `dumps_stacks` says that the child writes its stacks to its log on
    SIGQUIT; `also` are other names that waits may use for it.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log_path: str | os.PathLike[str],
        pass_env: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        dumps_stacks: bool = False,
        also: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.argv = [os.fspath(arg) for arg in argv]
        self.log_path = Path(log_path)
        self._env = dict(env or {})
        self._pass_env = tuple(pass_env)
        self._pass_fds = tuple(pass_fds)
        self._dumps_stacks = dumps_stacks
        self.also = tuple(also)
        self._said: tuple[str, float] | None = None
        self._child_pid: int | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._control_fd = -1
        self._returncode: int | None = None
        self._lock = threading.RLock()

    def start(self) -> Self:
        """Start the child; return self, so that starting and keeping it is one expression."""
        if self._popen is not None:
            raise RuntimeError(f"process {self.name} was already started")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        read_fd, self._control_fd = os.pipe()
        command = [sys.executable, "-I", "-S", reaper.__file__, str(read_fd), str(os.getpid()), "--", *self.argv]
        given = without_secrets(os.environ, passed=self._pass_env)
        environment = {**given, "PYTHONUNBUFFERED": "1", **self._env}
        try:
            with self.log_path.open("ab") as log:
                self._popen = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(read_fd, *self._pass_fds),
                    start_new_session=True,
                )
        except BaseException:
            self._close_control()
            raise
        finally:
            os.close(read_fd)
        process_registry.know(self)
        return self

    @property
    def pid(self) -> int:
        """The guard's pid, which is also the process group and the root of the child's process tree."""
        return self._running().pid

    def child_pid(self) -> int | None:
        """Return the pid of the child itself, which the guard starts; None before it starts and after it has ended."""
        if self._popen is None or self.poll() is not None:
            return None
        if self._child_pid is None:
            self._child_pid = reaper.guarded_child(self._popen.pid)
        return self._child_pid

    def state(self) -> str:
        """Return one line: name, pid, state (running, sleeping, stopped, gone), the last progress it reported."""
        if self._popen is None:
            return f"{self.name} was not started"
        said = "" if self._said is None else f", {time.monotonic() - self._said[1]:.3g} s ago at {self._said[0]}"
        return pid_state(self.name, self.child_pid(), said)

    def ask_for_stacks(self) -> bool:
        """Send SIGQUIT if the child answers it with its stacks and catches it now; return True if it was sent."""
        pid = self.child_pid() if self._dumps_stacks else None
        return pid is not None and send_sigquit(pid)

    def said(self, text: str | None) -> None:
        """Record the progress that the child reported just now, for `state`."""
        self._said = None if text is None else (text, time.monotonic())

    def pids(self) -> list[int]:
        """Return the live pids of the guard, the child and the child's descendants."""
        return [] if self.poll() is not None else process_tree(self.pid)

    def poll(self) -> int | None:
        """Return the exit code (minus the signal number if a signal ended it), or None while the child runs."""
        with self._lock:
            if self._returncode is None:
                popen = self._running()
                if not _has_exited(popen.pid):
                    return None
                # Not reaped yet, so the group id is still ours and no other process can be killed here.
                _kill_group(popen.pid)
                self._returncode = popen.wait()
                self._close_control()
            return self._returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end; return the exit code, or None if the child still runs after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the whole group, without waiting for the end."""
        if self._popen is not None and self.poll() is None:
            self._tell_guard(reaper.TERMINATE)

    def stop(self, grace_s: float = 5.0) -> int | None:
        """Send SIGTERM to the group, and SIGKILL to what is left after `grace_s`; return the exit code. Idempotent.

        A process that survives SIGKILL (it hangs in the kernel) is left to its guard; then the exit code is None.
        """
        if self._popen is None:
            return None
        try:
            for command, patience_s in ((reaper.TERMINATE, grace_s), (reaper.KILL, _KILL_WAIT_S)):
                if self.poll() is None:
                    self._tell_guard(command)
                if (code := self._ended_within(patience_s)) is not None:
                    return code
            with self._lock:
                if self._returncode is None:
                    _kill_group(self.pid)
            if (code := self._ended_within(_LAST_WAIT_S)) is None:
                logger.error("%s (pids %s) did not end within %g s of SIGKILL", self.name, self.pids(), _LAST_WAIT_S)
            return code
        finally:
            process_registry.forget(self)

    def _ended_within(self, patience_s: float) -> int | None:
        with waiting(self.name, "to end", timeout_s=patience_s) as wait:
            return self.wait(wait.remaining())

    def tail(self, n: int = 20) -> str:
        """Return the last n lines of the log, without trailing blanks; empty if there is no log yet."""
        return log_tail(self.log_path, n)

    def __enter__(self) -> Self:
        return self if self._popen is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._popen is None:
            raise RuntimeError(f"process {self.name} was not started")
        return self._popen

    def _tell_guard(self, command: bytes) -> None:
        with self._lock:
            if self._control_fd >= 0:
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._control_fd, command)

    def _close_control(self) -> None:
        if self._control_fd >= 0:
            os.close(self._control_fd)
            self._control_fd = -1


class ProcessSet:
    """The processes of one run. They are stopped in reverse start order on `stop`, at the end of the context, or at the
    interpreter's exit, whichever is first."""

    def __init__(self) -> None:
        self._processes: list[NodeProcess] = []

    def keep(self, process: Kept) -> Kept:
        """Register a started process to be stopped with the set; return it."""
        if not self._processes:
            atexit.register(self.stop)
        self._processes.append(process)
        return process

    def drop(self, process: NodeProcess, grace_s: float = 5.0) -> None:
        """Stop one process and remove it from the set."""
        process.stop(grace_s)
        self._processes = [kept for kept in self._processes if kept is not process]

    def __iter__(self) -> Iterator[NodeProcess]:
        return iter(tuple(self._processes))

    def stop(self, grace_s: float = 5.0) -> None:
        """Stop all, last started first; a failure to stop one does not prevent stopping the others."""
        atexit.unregister(self.stop)
        with contextlib.ExitStack() as stack:
            for process in self._processes:
                stack.callback(process.stop, grace_s)
            self._processes = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def process_tree(root_pid: int) -> list[int]:
    """Return `root_pid` and its live descendants; from a run's driver, all processes of the run."""
    return [root_pid, *reaper.descendants(root_pid)]


def guarded(argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` under a guard; other code starts it as our child in its own session."""
    return [sys.executable, "-I", "-S", reaper.__file__, "-", str(os.getpid()), "--", *argv]


def _has_exited(pid: int) -> bool:
    """Return True if our child has exited; it stays a zombie until `Popen.wait` reaps it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _kill_group(pgid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)
