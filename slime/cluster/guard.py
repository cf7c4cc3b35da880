"""The small process between the driver and one child: when the driver is gone, so is everything the child started.

Run as `python -I -S guard.py CONTROL_FD DRIVER_PID -- argv...`, as the leader of a session of its own. The invariant:
the guard exits only after every process below it has exited, and it exits as soon as the child has (with the child's
exit code) or the driver has (however it died). It learns the latter from the end of file on the control pipe, whose
write end only the driver holds; if a forked copy of the driver still holds that end, from its own parent having
changed. On Linux the guard is a sub-reaper, so that descendants which left the process group still count as its own.

This file is executed on its own, so it imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable

TERMINATE = b"T"
KILL = b"K"
ORPHAN_GRACE_S = 2.0
SWEEP_S = 1.0
POLL_S = 0.5
EXEC_FAILED = 127

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Guard:
    """One child, its descendants, and the two ways to end them: asked (SIGTERM) and forced (SIGKILL)."""

    def __init__(self, control_fd: int, driver_pid: int, argv: list[str]) -> None:
        self.control_fd = control_fd
        self.driver_pid = driver_pid
        self.argv = argv
        self.prctl = _load_prctl()
        self.child_pid = -1
        self.child_status: int | None = None
        self.terminated = False
        self.terminate_asked = False
        self.driver_gone = False
        self.kill_at: float | None = None

    def run(self) -> int:
        """Start the child, stay until it or the driver is gone, sweep, and return the child's wait status."""
        os.set_inheritable(self.control_fd, False)
        wakeup_fd = self._catch_signals()
        self.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._start_child()
        self._drop_foreign_fds(wakeup_fd)
        while self.child_status is None:
            self._wait_for_event(wakeup_fd)
            self._reap()
            if self.terminate_asked:
                self._terminate_group()
            if not self.driver_gone and os.getppid() != self.driver_pid:
                self._driver_is_gone()
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                break
        self._sweep()
        return self.child_status if self.child_status is not None else signal.SIGKILL

    def _catch_signals(self) -> int:
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        for signum in _ENDING_SIGNALS:
            signal.signal(signum, lambda signum, frame: setattr(self, "terminate_asked", True))
        self.wakeup_write_fd = write_fd
        return read_fd

    def _start_child(self) -> None:
        guard_pid = os.getpid()
        # Held back around the fork, so that a signal to the group meets the child's default, not our handler in it.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
        self.child_pid = os.fork()
        if self.child_pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)
            return
        try:
            self.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() != guard_pid:
                os._exit(EXEC_FAILED)
            for signum in (*_ENDING_SIGNALS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)
            os.execvp(self.argv[0], self.argv)
        except OSError as error:
            os.write(2, f"error: cannot start {self.argv[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(EXEC_FAILED)

    def _drop_foreign_fds(self, wakeup_fd: int) -> None:
        """Close what was passed on to the child: a channel must read end of file the moment the child is gone."""
        low = 3
        for fd in sorted({self.control_fd, wakeup_fd, self.wakeup_write_fd}):
            os.closerange(low, fd)
            low = fd + 1
        os.closerange(low, resource_limit_of_fds())

    def _wait_for_event(self, wakeup_fd: int) -> None:
        timeout = POLL_S if self.kill_at is None else max(0.0, min(POLL_S, self.kill_at - time.monotonic()))
        poller = select.poll()  # `select.select` fails with a descriptor above 1,023
        for fd in [wakeup_fd] if self.driver_gone else [wakeup_fd, self.control_fd]:
            poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(timeout * 1000)}
        if wakeup_fd in ready:
            os.read(wakeup_fd, 4096)
        if self.control_fd in ready:
            commands = os.read(self.control_fd, 64)
            if not commands:
                self._driver_is_gone()
            if TERMINATE in commands:
                self._terminate_group()
            if KILL in commands:
                self.kill_at = time.monotonic()

    def _driver_is_gone(self) -> None:
        self.driver_gone = True
        self._terminate_group()
        deadline = time.monotonic() + ORPHAN_GRACE_S
        self.kill_at = deadline if self.kill_at is None else min(deadline, self.kill_at)

    def _terminate_group(self) -> None:
        if not self.terminated:
            self.terminated = True
            os.killpg(os.getpgrp(), signal.SIGTERM)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child_pid:
                self.child_status = status

    def _sweep(self) -> None:
        """SIGKILL all descendants, again and again until none is left (a dying process may still be forking)."""
        deadline = time.monotonic() + SWEEP_S
        while time.monotonic() < deadline:
            alive = descendants(os.getpid())
            if not alive:
                break
            for pid in alive:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._reap()
            time.sleep(0.005)
        self._reap()


def descendants(root_pid: int) -> list[int]:
    """The pids below root_pid as /proc shows them now, zombies included; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for pid, parent, _ in process_table():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    frontier = [root_pid]
    while frontier:
        below = children.get(frontier.pop(), [])
        found.extend(below)
        frontier.extend(below)
    return found


def first_child(parent_pid: int) -> int | None:
    """The child that a process started first, of those that are left: of a guard, the process it guards."""
    ages = [(began, pid) for pid, parent, began in process_table() if parent == parent_pid]
    return min(ages)[1] if ages else None


def process_table() -> list[tuple[int, int, int]]:
    """(pid, parent, start time) of every process as /proc shows them now; empty where there is no /proc."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return []
    table = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
            table.append((pid, int(fields[1]), int(fields[19])))
        except (FileNotFoundError, ProcessLookupError, IndexError):
            continue
    return table


def resource_limit_of_fds() -> int:
    """One more than the highest descriptor open now (falls back to the soft limit where /proc does not tell)."""
    try:
        return max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    except FileNotFoundError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _load_prctl() -> Callable[[int, int], int]:
    """The C library's prctl, or a function that does nothing where the system has none."""
    if not sys.platform.startswith("linux"):
        return lambda option, value: 0
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda option, value: prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def exit_like(status: int) -> None:
    """End this process the way the child ended: the same code, or the same signal."""
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if signum not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        time.sleep(1.0)
        os._exit(128 + signum)
    os._exit(os.WEXITSTATUS(status))


def main(args: list[str]) -> None:
    separator = args.index("--")
    control_fd, driver_pid = (int(text) for text in args[:separator])
    exit_like(Guard(control_fd, driver_pid, args[separator + 1 :]).run())


if __name__ == "__main__":
    main(sys.argv[1:])
