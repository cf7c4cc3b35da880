"""`python -m tests.warm.starter FD ROOM`: imports what slime's programs import, then forks one for each request.

The parent sends requests over the socket FD. A fork becomes a child of that parent (CLONE_PARENT), so that the parent
can wait for it and reapers see their driver, as after `fork` and `exec`. The starter has one thread and uses no device.
It exits when the parent closes the socket.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from typing import Any, NoReturn

from tests.warm.command import Program, warm_program
from tests.warm.popen import Starter, install

_CLONE_PARENT, _CHILD_CLEARTID, _CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_CLONE = {"x86_64": 56, "aarch64": 220}
_HIGH_FD = 300
_python, _libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)


PRELOADED = (
    "slime.train.worker", "slime.engine.embedded.__main__", "slime.driver.loop", "slime.agent.server.__main__",
    "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.utils.tensorboard", "matplotlib.figure",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3",
)  # fmt: skip
"""Slow imports of slime's programs."""


def serve(sock: socket.socket) -> NoReturn:
    while True:
        head, fds, _, _ = socket.recv_fds(sock, 8, 64)
        if not head:
            os._exit(0)
        size = int.from_bytes(head, "little")
        request = json.loads(sock.recv(size, socket.MSG_WAITALL))
        done, is_child = os.pipe()
        pid = fork_sibling()
        if pid == 0:
            os.close(sock.detach())
            run_request(request, fds, is_child)
        for fd in (*fds, is_child):
            os.close(fd)
        os.read(done, 1)  # returns once the fork is set up, as `Popen` waits for `exec`
        os.close(done)
        sock.sendall(pid.to_bytes(8, "little"))


def fork_sibling() -> int:
    """Forks like `os.fork`, but the new process is a child of our parent."""
    tid = _address_of_tid()
    flags = _CLONE_PARENT | _CHILD_CLEARTID | _CHILD_SETTID | signal.SIGCHLD
    last = (0, tid) if os.uname().machine == "aarch64" else (tid, 0)  # the order of tls and child_tid
    _python.PyOS_BeforeFork()
    pid = _libc.syscall(*(ctypes.c_long(word) for word in (_CLONE[os.uname().machine], flags, 0, 0, *last)))
    if pid == 0:
        _python.PyOS_AfterFork_Child()
    else:
        _python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return int(pid)


def _address_of_tid() -> int:
    """Returns the address where the C library keeps the id of this thread, which a fork must replace."""
    _libc.pthread_self.restype = ctypes.c_ulong
    start, own = _libc.pthread_self(), threading.get_native_id()
    words = (ctypes.c_int * 512).from_address(start)
    return int(start) + 4 * next(index for index, word in enumerate(words) if word == own)


def run_request(request: dict[str, Any], fds: list[int], is_child: int) -> NoReturn:
    """In the fork: sets descriptors, folder, environment and signals, then runs the program."""
    last = fcntl.fcntl(is_child, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
    take_over_fds(fds, request["fds"])
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    for name in list(os.environ):
        del os.environ[name]
    os.environ.update(request["env"])
    set_proc_entries(request["argv"], request["env"])
    reset_signals()
    os.close(last)
    program = warm_program(request["argv"])
    assert program is not None
    run_like_python(program) if not program.guard else run_guard(program, request["argv"])


def take_over_fds(fds: list[int], targets: list[int]) -> None:
    lifted = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH_FD) for fd in fds]
    os.closerange(3, _HIGH_FD)
    for fd, target in zip(lifted, targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)


def run_guard(program: Program, argv: list[str]) -> NoReturn:
    """Runs the code of the reaper. The program that it would execute after its fork runs in that fork instead."""
    from slime.cluster import reaper

    def execvp(file: str, words: list[str]) -> NoReturn:
        close_on_exec()
        signal.set_wakeup_fd(-1)
        set_proc_entries(words, dict(os.environ))
        run_like_python(program)

    os.execvp = execvp  # type: ignore[assignment]
    open_standard_files()
    reaper.main([*program.guard, "--", *argv[argv.index("--") + 1 :]])
    os._exit(1)


def close_on_exec() -> None:
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                os.close(fd)
        except OSError:
            continue


def run_like_python(program: Program) -> NoReturn:
    """Runs a program as `python -m` and `python script.py` do, including the exit code."""
    reset_signals()
    open_standard_files()
    gc.enable()
    install(starter_of_this_process() if program.starts_others else None)
    set_search_path(program)
    sys.argv = [program.name, *program.arguments]
    code = 0
    try:
        if program.is_script:
            runpy.run_path(program.name, run_name="__main__")
        else:
            for name in (program.name, f"{program.name}.__main__"):  # otherwise runpy warns that they are loaded
                sys.modules.pop(name, None)
            runpy.run_module(program.name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            code = end.code or 0
        else:
            print(end.code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001  as the interpreter reports it
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def starter_of_this_process() -> Starter:
    """Forks a starter for the children of this process, while it has only one thread."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return Starter(ours)
    ours.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    fd = theirs.detach()
    os.dup2(fd, 3)
    os.closerange(4, 1024)
    serve(socket.socket(fileno=3))


def set_search_path(program: Program) -> None:
    wanted = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    here = os.path.dirname(program.name) if program.is_script else os.getcwd()
    sys.path[:] = [*wanted, *(path for path in _LIBRARIES if path not in wanted)]
    sys.path.insert(len(sys.path) if program.here == "last" else 0, here)


def reset_signals() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)


def open_standard_files() -> None:
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    for fd, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw: Any = io.FileIO(fd, "w", closefd=False)
        lines = fd == 2 or raw.isatty()
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            encoding="utf-8", errors=errors, line_buffering=lines, write_through=unbuffered,
        )  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def set_proc_entries(argv: list[str], env: dict[str, str]) -> None:
    """Makes /proc show this command line and environment, as for a process executed with them."""
    with open("/proc/self/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = (int(field) for field in fields[45:49])
    short = {name: value for name, value in env.items() if len(value) < 256}
    _write(arg_start, arg_end, argv)
    _write(env_start, env_end, [f"{name}={value}" for name, value in short.items()])


def _write(start: int, end: int, words: list[str]) -> None:
    text = b"".join(word.encode() + b"\0" for word in words)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def main() -> NoReturn:
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    serve(sock)


_LIBRARIES = [path for path in sys.path if path not in ("", os.getcwd())]

if __name__ == "__main__":
    main()
