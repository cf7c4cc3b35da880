"""`subprocess.Popen` that forks slime's programs from a warm starter process.

Importing torch and transformers takes most of the time of a short run. The starter (starter.py) has imported them and
forks. The fork is a child of the caller with its own pid, descriptors, environment, signals and command line. The rest
of `Popen` (pipes, waiting, killing) is unchanged. `SLIME_TEST_COLD=1` disables warm starts.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from typing import Any

from tests.warm.command import ROOT, warm_program

COLD = "SLIME_TEST_COLD"
_ROOM = 16 * 1024  # bytes for the command line and environment of a fork in /proc
_cold_popen = subprocess.Popen
_parameters = inspect.signature(_cold_popen._execute_child)  # type: ignore[attr-defined]


class Starter:
    """The caller's end of the socket to its starter, which is launched on first use."""

    def __init__(self, end: socket.socket | None = None) -> None:
        self._lock = threading.Lock()
        self._end = end

    def start(self, request: dict[str, Any], fds: list[int]) -> int:
        with self._lock:
            if self._end is None:
                self._end = _launch()
            body = json.dumps(request).encode()
            socket.send_fds(self._end, [len(body).to_bytes(8, "little")], fds)
            self._end.sendall(body)
            answer = self._end.recv(8, socket.MSG_WAITALL)
        if len(answer) < 8:
            raise RuntimeError("the process that starts warm children is gone")
        return int.from_bytes(answer, "little")


class WarmPopen(subprocess.Popen):  # type: ignore[type-arg]
    starter: Starter | None = None

    def _execute_child(self, *arguments: Any) -> None:
        asked = _parameters.bind(self, *arguments).arguments
        environment = os.environ if asked["env"] is None else asked["env"]
        if self.starter is None or not _can_be_forked(asked) or environment.get(COLD):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        pipes = [asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        standard = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        passed = [int(fd) for fd in asked["pass_fds"]]
        request = {
            "argv": [os.fspath(word) for word in asked["args"]],
            "env": {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
            "cwd": os.fspath(asked["cwd"] or os.getcwd()),
            "new_session": asked["start_new_session"],
            "fds": [0, 1, 2, *passed],
        }
        self.pid = self.starter.start(request, [*standard, *passed])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _can_be_forked(asked: dict[str, Any]) -> bool:
    plain = not asked["shell"] and asked["preexec_fn"] is None and asked["close_fds"] and asked["process_group"] == -1
    return (
        sys.platform == "linux"  # other systems cannot make a fork the child of the caller
        and plain
        and all(asked[name] is None for name in ("executable", "gid", "gids", "uid"))
        and not isinstance(asked["args"], str | bytes | os.PathLike)
        and (asked["cwd"] is None or os.path.isdir(asked["cwd"]))
        and warm_program(asked["args"]) is not None
    )


def _launch() -> socket.socket:
    ours, theirs = socket.socketpair()
    with theirs:
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _search_path(), "SLIME_WARM_ROOM": "." * _ROOM,
        }  # fmt: skip
        _cold_popen(
            [sys.executable, "-m", "tests.warm.starter", str(theirs.fileno()), "." * _ROOM],
            env=environment, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        )  # fmt: skip
    return ours


def _search_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def install(starter: Starter | None) -> None:
    """Makes this process start slime's programs warm, if the system supports it."""
    if sys.platform == "linux" and os.uname().machine in ("x86_64", "aarch64"):
        WarmPopen.starter = starter
        subprocess.Popen = WarmPopen  # type: ignore[misc]
