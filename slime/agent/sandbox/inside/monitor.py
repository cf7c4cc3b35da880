"""The process between the driver and a sandbox: starts it, carries its connections, sees that nothing is left of it.

Invariant: it ends only after every process of the sandbox has, and that is as soon as the driver closes its end of the
life socket or is gone, however it died, or the sandbox's init has ended. Killed itself, it takes the init along, and
with the init everything else.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import selectors
import signal
import socket
import sys
from collections.abc import Mapping

from . import cgroups, command_worker, fd_messages, files, init, namespaces, relay, syscalls

TYPE_CHECKING = False  # importing `typing` would take a fifth of a start
if TYPE_CHECKING:
    from typing import Any

_PARENT_POLL_S = 0.5


class Monitor:
    """One sandbox."""

    def __init__(self, life: socket.socket, control: socket.socket, driver: int) -> None:
        self.life = life
        self.control = control
        self.driver = driver
        self.groups = cgroups.Groups()
        self.init_pid = -1
        self.over = False

    def run(self) -> None:
        """Start the sandbox and stay until it or the driver is gone."""
        received = fd_messages.receive(self.life)
        if received is None:
            return
        spec = received[0]
        selector = selectors.DefaultSelector()
        self._catch_signals(selector)
        if syscalls.IS_LINUX:
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        self.groups = cgroups.make(spec["groups"])
        try:
            self._start(spec)
            told = {"folders": self.groups.folders, "holds": sorted(self.groups.holds), "init": self.init_pid}
            fd_messages.send(self.life, told)
            self._stay(selector)
        except OSError as error:
            with contextlib.suppress(OSError):
                fd_messages.send(self.life, {"error": error.strerror or str(error)})
        finally:
            self._end(spec)

    def _start(self, spec: Mapping[str, Any]) -> None:
        if spec["jail"] is not None:
            if spec["jail"]["rootless"]:
                namespaces.own_user_namespace(os.getuid(), os.getgid(), spec["jail"]["uid"])
            if not spec["jail"]["bwrap"]:
                syscalls.unshare(syscalls.CLONE_NEWPID)
        self.init_pid = syscalls.in_fork(lambda: self._become_init(spec))
        self.control.close()

    def _become_init(self, spec: Mapping[str, Any]) -> None:
        self.life.close()
        try:
            built = self._shut_in(spec)
        except OSError as error:
            fd_messages.send(self.control, {"error": error.strerror or str(error)})
            return
        init.serve(self.control, built)
        if spec["jail"] is None:
            init.sweep(own_processes=False)

    def _shut_in(self, spec: Mapping[str, Any]) -> namespaces.Built:
        walls = spec["jail"]
        self.groups.join()
        if walls is None:
            if syscalls.IS_LINUX:
                syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
                syscalls.die_with_parent(init.PARENT_DIED)
            lower = os.open(spec["lower"], os.O_RDONLY | os.O_DIRECTORY) if spec["lower"] else None
            return namespaces.Built(lower)
        namespaces.isolate()
        built = namespaces.build(walls)
        if walls["bwrap"]:
            self._execute_bubblewrap(walls, namespaces.hand_back_old_root(), built)
        namespaces.enter(walls)
        namespaces.give_up_privileges(walls)
        built.filtered = syscalls.install()
        return built

    def _execute_bubblewrap(self, walls: Mapping[str, Any], root: str, built: namespaces.Built) -> None:
        """Have bubblewrap do what is left: processes, users, and the privileges."""
        descriptors = (self.control.fileno(), built.lower, built.present, built.upper)
        for descriptor in descriptors:
            if descriptor is not None:
                os.set_inheritable(descriptor, True)
        words = [str(-1 if descriptor is None else descriptor) for descriptor in descriptors]
        namespaces.become(walls["uid"])
        syscalls.die_with_parent()
        entered = [*walls["bwrap"], "--dev-bind", root, "/", *walls["bwrap_end"]]
        os.execv(entered[0], [*entered, *words])

    def _catch_signals(self, selector: selectors.BaseSelector) -> None:
        wakeup, wakeup_write = os.pipe()
        for end in (wakeup, wakeup_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, lambda signum, frame: setattr(self, "over", True))
        selector.register(wakeup, selectors.EVENT_READ, lambda events: self._reap(wakeup))

    def _reap(self, wakeup: int) -> None:
        os.read(wakeup, 4096)
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                if pid == self.init_pid:
                    self.init_pid = -1
                    self.over = True

    def _stay(self, selector: selectors.BaseSelector) -> None:
        carrier = relay.Relay(selector)
        selector.register(self.life, selectors.EVENT_READ, lambda events: self._told(carrier))
        while not self.over:
            for key, events in selector.select(_PARENT_POLL_S):
                key.data(events)
            if os.getppid() != self.driver:
                self.over = True

    def _told(self, carrier: relay.Relay) -> None:
        try:
            received = fd_messages.receive(self.life)
        except (fd_messages.Broken, OSError):
            received = None
        if received is None:
            self.over = True
            return
        message, descriptors = received
        carrier.serve(socket.socket(fileno=descriptors[0]), message["relay"])

    def _end(self, spec: Mapping[str, Any]) -> None:
        if self.init_pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init_pid, signal.SIGKILL)
        if spec["jail"] is None or spec["jail"]["bwrap"]:  # else the kernel ends what is below the init
            command_worker.sweep(0, init.reap, own_processes=False)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        self.groups.remove()
        if spec["remove"] is not None:
            files.remove_tree(spec["remove"])


def main() -> None:
    """`LIFE_FD CONTROL_FD DRIVER_PID`."""
    life, control, driver = (int(word) for word in sys.argv[1:4])
    for descriptor in (life, control):
        os.set_inheritable(descriptor, False)
    Monitor(socket.socket(fileno=life), socket.socket(fileno=control), driver).run()


def main_server() -> None:
    """`REQUESTS_FD DRIVER_PID PROGRAM_FILE`: forks a monitor for each request, until the driver is gone."""
    requests, driver = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    os.set_inheritable(requests.fileno(), False)
    with open(sys.argv[3]) as file:
        command_worker.PROGRAM = compile(file.read(), sys.argv[3], "exec")
    exec(command_worker.PROGRAM, {"__name__": "imports only"})
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    own = os.getpid()
    poller = select.poll()
    poller.register(requests, select.POLLIN)
    while os.getppid() == driver:
        if not poller.poll(1000 * _PARENT_POLL_S):
            continue
        try:
            received = fd_messages.receive(requests)
        except (fd_messages.Broken, OSError):
            return
        if received is None:
            return
        life, control, errors = received[1]

        def run(life: int = life, control: int = control, errors: int = errors) -> None:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            os.dup2(errors, 2)
            os.close(errors)
            Monitor(socket.socket(fileno=life), socket.socket(fileno=control), own).run()

        with contextlib.suppress(OSError):  # the sockets that are closed say it
            syscalls.in_fork(run)
        for descriptor in (life, control, errors):
            os.close(descriptor)


def main_inside() -> None:
    """`CONTROL_FD LOWER_FD PRESENT_FD UPPER_FD`: the init, executed by bubblewrap."""
    control, *folders = (int(word) for word in sys.argv[1:5])
    for descriptor in (control, *folders):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    built = namespaces.Built(*(None if folder < 0 else folder for folder in folders))
    built.filtered = syscalls.install()
    init.serve(socket.socket(fileno=control), built)
