"""Runs one command inside the sandbox: starts it, captures its output, and kills its process tree at a limit.

Invariant: the worker responds once, after the command itself has ended, and no process that it had to kill is alive at
that point. On Linux the worker is a sub-reaper, so orphans of the command become its children. Processes that a command
leaves running when it ends in time are inherited by the init and live until the sandbox ends.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from . import fd_messages, syscalls

TYPE_CHECKING = False  # importing `typing` would take a fifth of a start
if TYPE_CHECKING:
    from types import CodeType

    from .fd_messages import JsonMapping

PROGRAM: CodeType | None = None
"""The program that a fork server has compiled for its sandboxes."""
NOT_ENDED_BY_ITSELF = -1
CANNOT_START = 127
_CHUNK = 1 << 16
_SWEEP_S = 3.0
_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGCHLD,
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGUSR1,
)


class OutputCapture:
    """The first and last bytes of a stream, and its total length."""

    def __init__(self, limit: int) -> None:
        self.half = max(1, limit // 2)
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.half - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        if len(self.tail) > 2 * self.half:
            del self.tail[: -self.half]

    def result(self) -> tuple[bytes, bool]:
        """Return the kept bytes, with a line in place of the omitted ones, and whether any were omitted."""
        tail = bytes(self.tail[-self.half :])
        missing = self.total - len(self.head) - len(tail)
        if not missing:
            return bytes(self.head + tail), False
        return bytes(self.head) + f"\n[... {missing} bytes left out ...]\n".encode() + tail, True


class CommandWorker:
    """Runs a program under its limits, with the streams it was given or with captured output."""

    def __init__(self, spec: JsonMapping, result: socket.socket, streams: list[int]) -> None:
        self.spec = spec
        self.result = result
        self.streams = streams
        self.captures: dict[int, OutputCapture] = {}
        self.child = -1
        self.status: int | None = None
        self.usage: resource.struct_rusage | None = None
        self.cause: str | None = None

    def run(self) -> None:
        """Start the command, watch it until it has ended, and respond."""
        if syscalls.IS_LINUX:
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        wakeup, wakeup_write = os.pipe()
        os.set_blocking(wakeup, False)
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        error = self._start()
        if error is None:
            self._watch(wakeup)
        code = NOT_ENDED_BY_ITSELF
        if error is not None:
            code = NOT_ENDED_BY_ITSELF if self.cause else CANNOT_START
        elif self.cause is None and self.status is not None:
            code = os.waitstatus_to_exitcode(self.status)
            code = 128 - code if code < 0 else code
        kept = [capture.result() for capture in self.captures.values()]
        out, err = (kept[0][0], kept[1][0]) if kept else (b"", b"")
        if error is not None:
            err += f"{error}\n".encode()
        used = self.usage.ru_utime + self.usage.ru_stime if self.usage else 0.0
        answer = {"code": code, "cause": self.cause, "cpu_s": used, "out": len(out), "err": len(err)}
        answer["truncated"] = any(cut for _, cut in kept)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the requester has closed the socket
            fd_messages.send(self.result, answer)
            self.result.sendall(out + err)

    def _start(self) -> str | None:
        """Fork the command; return an error message if it cannot be executed."""
        writers = []
        streams = list(self.streams)
        if not streams:
            streams = [os.open(os.devnull, os.O_RDONLY)]
            for _ in range(2):
                reader, writer = os.pipe()
                os.set_blocking(reader, False)
                self.captures[reader] = OutputCapture(self.spec["output_kb"] * 1024)
                writers.append(writer)
            streams += writers
        failed, failed_write = os.pipe()
        try:
            self.child = os.fork()
        except OSError as error:
            self.cause = "processes"
            return f"cannot start a process: {error.strerror}"
        if not self.child:
            try:
                self._become(streams)
            except BaseException as error:  # noqa: BLE001 (reported to the parent, and this fork exits)
                os.write(failed_write, str(error).encode()[:4096])
            finally:
                os._exit(CANNOT_START)
        for descriptor in {*streams, failed_write}:
            os.close(descriptor)
        with os.fdopen(failed, "rb") as stream:
            error_text = stream.read().decode(errors="replace")
        if error_text:
            os.waitpid(self.child, 0)
        return error_text or None

    def _become(self, streams: list[int]) -> None:
        """Set up streams, signals, limits and folder in the fork, and execute the command."""
        os.setsid()
        for target, descriptor in enumerate(streams):  # move low ones up first: they may be targets of dup2
            streams[target] = os.dup(descriptor) if descriptor < 3 else descriptor
        for target, descriptor in enumerate(streams):
            os.dup2(descriptor, target)
        signal.set_wakeup_fd(-1)
        for signum in _SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.umask(0o022)
        set_limits(self.spec["limits"])
        os.chdir(self.spec["cwd"])
        if self.spec.get("program"):
            run_program(self.spec["argv"], self.spec["env"])
        argv = self.spec["argv"]
        if not argv:
            argv = ["/bin/bash" if os.access("/bin/bash", os.X_OK) else "/bin/sh", "-c", self.spec["shell"]]
        os.execvpe(argv[0], argv, self.spec["env"])

    def _watch(self, wakeup: int) -> None:
        """Capture output until the command has ended, reached a limit or been cancelled; then kill its tree."""
        deadline = None if self.spec["seconds"] is None else time.monotonic() + self.spec["seconds"]
        poller = select.poll()
        for descriptor in (wakeup, self.result.fileno(), *self.captures):
            poller.register(descriptor, select.POLLIN)
        written = 0
        while self.status is None and self.cause is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = [descriptor for descriptor, _ in poller.poll(None if left is None else left * 1000 + 1)]
            for descriptor in ready:
                if descriptor == wakeup:
                    os.read(wakeup, 4096)
                elif descriptor == self.result.fileno():
                    self.cause = "cancelled"
                elif (data := _read(descriptor)) is None:
                    poller.unregister(descriptor)
                else:
                    self.captures[descriptor].add(data)
                    written += len(data)
            self._reap()
            if self.captures and written > self.spec["output_mb"] << 20:
                self.cause = "output"
            elif self.status is None and deadline is not None and time.monotonic() >= deadline:
                self.cause = "timeout"
        if (
            self.cause is not None
        ):  # SIGTERM to the process group and, after the grace period, SIGKILL to the whole tree
            for signum in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.child, signum)
            grace_end = time.monotonic() + self.spec["grace_s"]
            while self.status is None and time.monotonic() < grace_end:
                for descriptor, kept in self.captures.items():
                    if data := _read(descriptor):
                        kept.add(data)
                self._reap()
                time.sleep(0.01)
            kill_descendants(self.child, self._reap, own_processes=self.spec["own_processes"])
        for descriptor, kept in self.captures.items():  # output written before the command ended
            while (data := _read(descriptor)) and kept.total < self.spec["output_mb"] << 21:
                kept.add(data)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self.child:
                self.status, self.usage = status, usage


def run_program(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Run the program that the fork server compiled, as a new Python process would; does not return."""
    assert PROGRAM is not None
    os.closerange(3, 1 << 16)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1) if syscalls.IS_LINUX else None
    os.environ.clear()
    os.environ.update(env)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__]:
        del sys.modules[name]
    sys.path.remove(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.argv = list(argv)
    code = 1
    try:
        exec(PROGRAM, {"__name__": "__main__", "__builtins__": builtins})
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:  # noqa: BLE001 (written to the program's own error stream)
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def kill_descendants(group: int, reap: Callable[[], None], *, own_processes: bool) -> None:
    """Send SIGKILL to all descendants of this process, and to the group, until none is left.

    If processes fork faster than they are killed and the sandbox has its own process namespace, kill every process in
    the namespace at once.
    """
    deadline = time.monotonic() + _SWEEP_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group > 0:
                os.killpg(group, signal.SIGKILL)
        alive = descendants(os.getpid())
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap()
        if not alive:
            return
        time.sleep(0.002)
    if own_processes:
        os.kill(-1, signal.SIGKILL)
        reap()


def descendants(root_pid: int) -> list[int]:
    """List the pids of all descendants of a process, from /proc; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for name in names:
        with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as stat:
            children.setdefault(int(stat.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    found: list[int] = []
    frontier = [root_pid]
    while frontier:
        below = children.get(frontier.pop(), [])
        found.extend(below)
        frontier.extend(below)
    return found


def set_limits(limits: Mapping[str, int]) -> None:
    """Set the per-process resource limits, capped at this process's hard limits."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is None:
            continue
        hard = resource.getrlimit(kind)[1]
        low = value if hard == resource.RLIM_INFINITY else min(value, hard)
        high = low if name != "CPU" else (low + 2 if hard == resource.RLIM_INFINITY else min(low + 2, hard))
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (low, high))
    if syscalls.IS_LINUX:
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")  # killed before the init and the workers


def _read(descriptor: int) -> bytes | None:
    """Read the available bytes: None at the end of the stream, b"" if there are none yet."""
    try:
        return os.read(descriptor, _CHUNK) or None
    except BlockingIOError:
        return b""
    except OSError as error:
        sys.stderr.write(f"sandbox: {error}\n")
        return None
