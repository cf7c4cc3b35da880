"""The first process of a sandbox: receives requests, forks a worker for each, and reaps orphaned processes.

It exits when the driver's end of the control socket closes. In a process namespace of its own, every process ends with
it; without one it is a sub-reaper and kills its descendants first.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket

from . import command_worker, diff, fd_messages, files, namespaces, syscalls

TYPE_CHECKING = False  # importing `typing` would take a fifth of a start
if TYPE_CHECKING:
    from .fd_messages import JsonMapping

PARENT_DIED = signal.SIGTERM
"""Signal to an init that must sweep when its monitor is killed; ignored when another process sends it."""
_FILE_WORK_S = 120


def serve(control: socket.socket, built: namespaces.SandboxRoot) -> None:
    """Report that the sandbox is ready and serve requests until the driver is gone."""
    fd_messages.send(control, {"ready": True, "overlay": built.upper is not None, "filtered": built.filtered})
    parent = os.getppid()
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    ended: list[int] = []
    signal.signal(PARENT_DIED, lambda signum, frame: ended.append(signum) if os.getppid() != parent else None)
    poller = select.poll()
    for descriptor in (wakeup, control.fileno()):
        poller.register(descriptor, select.POLLIN)
    while not ended:
        ready = [descriptor for descriptor, _ in poller.poll()]
        if wakeup in ready:
            os.read(wakeup, 4096)
            reap()
        if control.fileno() in ready:
            try:
                received = fd_messages.receive(control)
            except (fd_messages.InvalidMessage, OSError):
                return
            if received is None:
                return
            if received[0]["do"] == "sweep":
                kill_everything(own_processes=received[0]["own_processes"])
            else:
                _fork_worker(control, built, *received)


def kill_everything(*, own_processes: bool) -> None:
    """Kill everything that runs in the sandbox, including workers: a command has killed or stopped its own worker."""
    if own_processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        reap()
    else:
        command_worker.kill_descendants(0, reap, own_processes=False)


def reap() -> None:
    """Reap every child that has exited."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork_worker(
    control: socket.socket, built: namespaces.SandboxRoot, spec: JsonMapping, descriptors: list[int]
) -> None:
    """Fork a worker that serves one request and responds on the first of the descriptors."""
    result = socket.socket(fileno=descriptors[0])
    rest = descriptors[1:]

    def work() -> None:
        control.close()
        try:
            kind = spec["do"]
            if kind == "run":
                command_worker.CommandWorker(spec, result, rest).run()
                return
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_FILE_WORK_S)
            if kind == "read":
                files.read(spec, result)
            elif kind == "write":
                files.write(spec, result, rest[0])
            elif kind == "listen":
                with socket.create_server(("127.0.0.1", spec["port"]), backlog=128) as listener:
                    fd_messages.send(result, {"port": listener.getsockname()[1]}, [listener.fileno()])
            elif kind == "changes":
                diff.answer(spec, result, built.lower, built.present, built.upper)
        except OSError as error:
            with contextlib.suppress(OSError):
                fd_messages.send(result, {"error": error.strerror or str(error), "errno": error.errno})

    try:
        syscalls.run_in_fork(work)
    except OSError as error:
        with contextlib.suppress(OSError):
            fd_messages.send(result, {"error": f"cannot start a process: {error.strerror}", "errno": error.errno})
    result.close()
    for descriptor in rest:
        os.close(descriptor)
