"""Guard process between the driver and one child: ends the child and its descendants when the driver is gone.

Runs as `python -I -S reaper.py CONTROL_FD DRIVER_PID -- argv...`, as the leader of its own session. With `-` instead of
the descriptor there is no control pipe, and the guard reacts only to signals.

Invariant: the guard exits only after every process below it has exited. It exits as soon as the child has (with the
child's exit code) or the driver has (however it died). It detects the driver's end by the end of file on the control
pipe, whose write end only the driver holds; if a forked copy of the driver still holds that end, by the change of its
own parent. On Linux the guard is a sub-reaper, so descendants that left the process group still count as its own, and
it has a deputy: a fork between the guard and the child that keeps the same watch. If one of the two is killed, the
other ends everything below them. On other systems, killing the guard ends only its process group.

This file is executed as a program, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence

TERMINATE = b"T"
KILL = b"K"
ORPHAN_GRACE_S = 2.0
SWEEP_S = 1.0
POLL_S = 0.5
EXEC_FAILED = 127
HAS_SUBREAPERS = sys.platform.startswith("linux")

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class ChildSupervisor:
    """Supervises one child and its descendants; none of them is left when this process exits."""

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv
        self.prctl = _load_prctl()
        self.child_pid = -1
        self.child_status: int | None = None
        self.wakeup_fd = self.wakeup_write_fd = -1

    def _catch_signals(self, on_ending: Callable[[], None]) -> None:
        self.wakeup_fd, self.wakeup_write_fd = os.pipe()
        os.set_blocking(self.wakeup_fd, False)
        os.set_blocking(self.wakeup_write_fd, False)
        signal.set_wakeup_fd(self.wakeup_write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        for signum in _ENDING_SIGNALS:
            signal.signal(signum, lambda signum, frame: on_ending())

    def _fork(self, run: Callable[[], None]) -> int:
        """Run a function in a fork, which does not return.

        Ending signals stay blocked in the fork until it unblocks them, so that a signal to the group never runs our
        handlers in it.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)
            return pid
        try:
            run()
        finally:
            os._exit(EXEC_FAILED)

    def _start_child(self, group: int) -> int:
        """Start the program in process group `group`; the kernel kills it if this process dies."""
        keeper_pid = os.getpid()

        def execute() -> None:
            self.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() != keeper_pid:
                return
            try:
                if os.getpgrp() != group:
                    os.setpgid(0, group)
                for signum in (*_ENDING_SIGNALS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
                    signal.signal(signum, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)
                os.execvp(self.argv[0], self.argv)
            except OSError as error:
                os.write(2, f"error: cannot start {self.argv[0]}: {error.strerror}\n".encode())

        return self._fork(execute)

    def _close_inherited_fds(self, *own: int) -> None:
        """Close the descriptors passed to the child: a channel must read end of file as soon as the child is gone."""
        low = 3
        for fd in sorted({self.wakeup_fd, self.wakeup_write_fd, *own}):
            os.closerange(low, fd)
            low = fd + 1
        os.closerange(low, open_fd_limit())

    def _wait_for_input(self, fds: Sequence[int], timeout_s: float | None) -> set[int]:
        """Wait until some of `fds` are readable, a signal arrives or the time is over; return the readable ones."""
        poller = select.poll()  # `select.select` fails with a descriptor above 1,023
        for fd in (self.wakeup_fd, *fds):
            poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(None if timeout_s is None else timeout_s * 1000)}
        if self.wakeup_fd in ready:
            os.read(self.wakeup_fd, 4096)
        return ready - {self.wakeup_fd}

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
        """Send SIGKILL to all descendants repeatedly until none is left (a dying process may still be forking)."""
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


class Guard(ChildSupervisor):
    """The process that the driver starts; it ends its descendants on request (SIGTERM) or by force (SIGKILL)."""

    def __init__(self, control_fd: int | None, driver_pid: int, argv: list[str]) -> None:
        super().__init__(argv)
        self.control_fds = [] if control_fd is None else [control_fd]
        self.driver_pid = driver_pid
        self.terminated = False
        self.terminate_asked = False
        self.driver_gone = False
        self.kill_at: float | None = None

    def run(self) -> int:
        """Start the child, wait until it or the driver is gone, sweep, and return the child's wait status."""
        for fd in self.control_fds:
            os.set_inheritable(fd, False)
        self._catch_signals(lambda: setattr(self, "terminate_asked", True))
        self.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if HAS_SUBREAPERS:
            self._start_deputy()
        else:
            self.child_pid = self._start_child(os.getpgrp())
            self._close_inherited_fds(*self.control_fds)
        while self.child_status is None:
            timeout = POLL_S if self.kill_at is None else max(0.0, min(POLL_S, self.kill_at - time.monotonic()))
            for fd in self._wait_for_input([] if self.driver_gone else self.control_fds, timeout):
                commands = os.read(fd, 64)
                if not commands:
                    self._handle_driver_exit()
                if TERMINATE in commands:
                    self._terminate_group()
                if KILL in commands:
                    self.kill_at = time.monotonic()
            self._reap()
            if self.terminate_asked:
                self._terminate_group()
            if not self.driver_gone and os.getppid() != self.driver_pid:
                self._handle_driver_exit()
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                break
        self._sweep()
        return self.child_status if self.child_status is not None else signal.SIGKILL

    def _start_deputy(self) -> None:
        """Start the deputy, which starts the child; wait until the child is in our group, where signals reach it."""
        group = os.getpgrp()
        alive_fd, alive_write_fd = os.pipe()
        started_fd, started_write_fd = os.pipe()

        def watch() -> None:
            os.close(alive_write_fd)
            os.close(started_fd)
            exit_with_status(Deputy(alive_fd, started_write_fd, group, self.argv).run())

        self.child_pid = self._fork(watch)
        self._close_inherited_fds(*self.control_fds, alive_write_fd, started_fd)
        os.read(started_fd, 1)
        os.close(started_fd)

    def _handle_driver_exit(self) -> None:
        self.driver_gone = True
        self._terminate_group()
        deadline = time.monotonic() + ORPHAN_GRACE_S
        self.kill_at = deadline if self.kill_at is None else min(deadline, self.kill_at)

    def _terminate_group(self) -> None:
        if not self.terminated:
            self.terminated = True
            os.killpg(os.getpgrp(), signal.SIGTERM)


class Deputy(ChildSupervisor):
    """Supervises the child until the child or the guard has ended; `alive_fd` reads end of file when the guard has.

    It is in its own process group, so that it survives signals that end the guard's group.
    """

    def __init__(self, alive_fd: int, started_fd: int, group: int, argv: list[str]) -> None:
        super().__init__(argv)
        self.alive_fd = alive_fd
        self.started_fd = started_fd
        self.group = group

    def run(self) -> int:
        """Start the child, supervise it, sweep, and return the child's wait status."""
        os.setpgid(0, 0)
        self._catch_signals(lambda: None)
        self.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.child_pid = self._start_child(self.group)
        with contextlib.suppress(OSError):
            os.setpgid(self.child_pid, self.group)  # the child does this too; the first call wins
        os.write(self.started_fd, b"+")
        self._close_inherited_fds(self.alive_fd)
        while self.child_status is None:
            guard_is_gone = bool(self._wait_for_input([self.alive_fd], None))
            self._reap()
            if guard_is_gone:
                break
        self._sweep()
        return self.child_status if self.child_status is not None else signal.SIGKILL


def descendants(root_pid: int) -> list[int]:
    """Return the pids below `root_pid` in /proc now, zombies included; empty without /proc."""
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


def guarded_child(guard_pid: int) -> int | None:
    """Return the pid of the program that a guard supervises; None before it starts and after it has ended."""
    deputy = oldest_child(guard_pid)
    return oldest_child(deputy) if deputy is not None and HAS_SUBREAPERS else deputy


def oldest_child(parent_pid: int) -> int | None:
    ages = [(began, pid) for pid, parent, began in process_table() if parent == parent_pid]
    return min(ages)[1] if ages else None


def process_table() -> list[tuple[int, int, int]]:
    """Return (pid, parent, start time) of every process in /proc now; empty without /proc."""
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


def open_fd_limit() -> int:
    """Return one more than the highest open descriptor, or the soft limit without /proc."""
    try:
        return max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    except FileNotFoundError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _load_prctl() -> Callable[[int, int], int]:
    """Return the C library's prctl, or a function that does nothing on systems without it."""
    if not HAS_SUBREAPERS:
        return lambda option, value: 0
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda option, value: prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def exit_with_status(status: int) -> None:
    """End this process as the child ended: with the same exit code, or by the same signal."""
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
    control, driver_pid = args[:separator]
    control_fd = None if control == "-" else int(control)
    exit_with_status(Guard(control_fd, int(driver_pid), args[separator + 1 :]).run())


if __name__ == "__main__":
    main(sys.argv[1:])
