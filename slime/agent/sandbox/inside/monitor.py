"""The process between the driver and a sandbox: starts the sandbox, relays its connections, and cleans up after it.

Invariant: the monitor exits only after every process of the sandbox has. It ends the sandbox when the driver closes its
end of the life socket, when the driver dies for any reason, or when the sandbox's init exits. If the monitor itself is
killed, the init dies with it, and everything else dies with the init.
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

from . import cgroups, command_worker, fd_messages, files, init, namespaces, relay, syscalls

TYPE_CHECKING = False  # importing `typing` would take a fifth of a start
if TYPE_CHECKING:
    from .fd_messages import JsonMapping

_PARENT_POLL_S = 0.5


class Monitor:
    """Starts one sandbox and ends all of it."""

    def __init__(self, life: socket.socket, control: socket.socket, driver: int) -> None:
        self.life = life
        self.control = control
        self.driver = driver
        self.groups = cgroups.ControlGroups()
        self.init_pid = -1
        self.over = False

    def run(self) -> None:
        """Start the sandbox and serve it until the sandbox or the driver ends."""
        received = fd_messages.receive(self.life)
        if received is None:
            return
        spec = received[0]
        selector = selectors.DefaultSelector()
        wakeup, wakeup_write = os.pipe()
        for end in (wakeup, wakeup_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, lambda signum, frame: setattr(self, "over", True))
        selector.register(wakeup, selectors.EVENT_READ, lambda events: self._reap(wakeup))
        if syscalls.IS_LINUX:
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        self.groups = cgroups.create_control_groups(spec["groups"])
        try:
            jail = spec["jail"]
            if jail is not None:
                if jail["rootless"]:
                    namespaces.enter_user_namespace(os.getuid(), os.getgid(), jail["uid"])
                if not jail["bwrap"]:
                    syscalls.unshare(syscalls.CLONE_NEWPID)
            self.init_pid = syscalls.run_in_fork(lambda: self._become_init(spec))
            self.control.close()
            status = {"folders": self.groups.folders, "holds": sorted(self.groups.holds), "init": self.init_pid}
            fd_messages.send(self.life, status)
            carrier = relay.Relay(selector)
            selector.register(self.life, selectors.EVENT_READ, lambda events: self._told(carrier))
            while not self.over:
                for key, events in selector.select(_PARENT_POLL_S):
                    key.data(events)
                if os.getppid() != self.driver:
                    self.over = True
        except OSError as error:
            with contextlib.suppress(OSError):
                fd_messages.send(self.life, {"error": error.strerror or str(error)})
        finally:
            self._end(spec)

    def _become_init(self, spec: JsonMapping) -> None:
        """Isolate this fork of the monitor and run the init in it."""
        self.life.close()
        try:
            built = self._enter_isolation(spec)
        except OSError as error:
            fd_messages.send(self.control, {"error": error.strerror or str(error)})
            return
        init.serve(self.control, built)
        if spec["jail"] is None:
            init.kill_everything(own_processes=False)

    def _enter_isolation(self, spec: JsonMapping) -> namespaces.SandboxRoot:
        """Join the control groups, enter the namespaces and drop privileges.

        With bubblewrap this does not return: bubblewrap replaces the process, creates the process and user namespaces,
        drops privileges and executes the init (`main_inside`).
        """
        jail = spec["jail"]
        self.groups.join()
        if jail is None:
            if syscalls.IS_LINUX:
                syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
                syscalls.die_with_parent(init.PARENT_DIED)
            lower = os.open(spec["lower"], os.O_RDONLY | os.O_DIRECTORY) if spec["lower"] else None
            return namespaces.SandboxRoot(lower)
        namespaces.isolate()
        built = namespaces.build(jail)
        if jail["bwrap"]:
            root = namespaces.restore_old_root()
            descriptors = (self.control.fileno(), built.lower, built.present, built.upper)
            for descriptor in descriptors:
                if descriptor is not None:
                    os.set_inheritable(descriptor, True)
            words = [str(-1 if descriptor is None else descriptor) for descriptor in descriptors]
            namespaces.switch_user(jail["uid"])
            syscalls.die_with_parent()
            command = [*jail["bwrap"], "--dev-bind", root, "/", *jail["bwrap_end"]]
            os.execv(command[0], [*command, *words])
        namespaces.enter_root(jail)
        namespaces.drop_privileges(jail)
        built.filtered = syscalls.install_seccomp()
        return built

    def _reap(self, wakeup: int) -> None:
        """Reap exited children; the exit of the init ends the sandbox."""
        os.read(wakeup, 4096)
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                if pid == self.init_pid:
                    self.init_pid = -1
                    self.over = True

    def _told(self, carrier: relay.Relay) -> None:
        """Serve a message on the life socket: a listening socket to relay, or the end of the stream."""
        try:
            received = fd_messages.receive(self.life)
        except (fd_messages.InvalidMessage, OSError):
            received = None
        if received is None:
            self.over = True
            return
        message, descriptors = received
        carrier.serve(socket.socket(fileno=descriptors[0]), message["relay"])

    def _end(self, spec: JsonMapping) -> None:
        """Kill the sandbox, reap its processes, and remove its control groups and its folder."""
        if self.init_pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init_pid, signal.SIGKILL)
        if spec["jail"] is None or spec["jail"]["bwrap"]:  # otherwise the kernel kills all processes below the init
            command_worker.kill_descendants(0, init.reap, own_processes=False)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        self.groups.remove()
        if spec["remove"] is not None:
            files.remove_tree(spec["remove"])


def main() -> None:
    """Run one monitor; arguments `LIFE_FD CONTROL_FD DRIVER_PID`."""
    life, control, driver = (int(word) for word in sys.argv[1:4])
    for descriptor in (life, control):
        os.set_inheritable(descriptor, False)
    Monitor(socket.socket(fileno=life), socket.socket(fileno=control), driver).run()


def main_server() -> None:
    """Fork a monitor for each request until the driver is gone; arguments `REQUESTS_FD DRIVER_PID PROGRAM_FILE`."""
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
        except (fd_messages.InvalidMessage, OSError):
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

        with contextlib.suppress(OSError):  # closing the sockets reports the failure
            syscalls.run_in_fork(run)
        for descriptor in (life, control, errors):
            os.close(descriptor)


def main_inside() -> None:
    """Run the init that bubblewrap executes; arguments `CONTROL_FD LOWER_FD PRESENT_FD UPPER_FD`."""
    control, *folders = (int(word) for word in sys.argv[1:5])
    for descriptor in (control, *folders):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    built = namespaces.SandboxRoot(*(None if folder < 0 else folder for folder in folders))
    built.filtered = syscalls.install_seccomp()
    init.serve(socket.socket(fileno=control), built)
