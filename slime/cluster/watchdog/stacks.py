"""Stacks of this process's threads and tasks, and states and stacks of its child processes, in a few lines each.

Invariants: reading stacks changes nothing and does not block. Threads that run only the standard library and installed
packages (idle workers, an event loop between two events) are omitted, and so is this module.

A child process gets SIGQUIT, the request for its stacks, only if it was registered as answering it and has the handler
installed at this moment; any other process would die of that signal. No call takes longer than `ANSWER_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import selectors
import signal
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

_FRAMES = 8
_THREAD_ROOTS = ("_bootstrap", "_bootstrap_inner")
"""Functions at the root of every thread."""
_HERE = os.path.dirname(__file__)
_INSTALLED = tuple(
    path + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))
)


def thread_stacks() -> dict[str, str]:
    """Return the stacks of all threads that run our or the user's code, by thread name; newest frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: Counter[tuple[str, str]] = Counter()
    for ident, frame in sys._current_frames().items():
        frames = []
        below: FrameType | None = frame
        while below is not None:
            frames.append((below.f_code.co_filename, below.f_lineno or 0, below.f_code.co_name))
            below = below.f_back
        frames.reverse()
        has_own_code = any(not path.startswith((*_INSTALLED, _HERE, "<frozen")) for path, _, _ in frames)
        if has_own_code and frames[-1][0] != selectors.__file__:
            found[f"thread {names.get(ident, ident)}", _format_frames(frames)] += 1
    stacks: dict[str, str] = {}
    for (name, text), count in found.items():
        key = name + (f" and {count - 1} more like it" if count > 1 else "")
        while key in stacks:
            key += "'"  # threads of one name with different stacks
        stacks[key] = text
    return stacks


def task_stack(task: asyncio.Future[Any]) -> str:
    """Return the stack of a task through all the coroutines it awaits; empty for one that has ended."""
    if not isinstance(task, asyncio.Task) or task.done():
        return ""
    frames = []
    coro: object = task.get_coro()
    while coro is not None:
        kinds = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))
        running, awaited = next((names for names in kinds if hasattr(coro, names[0])), ("", ""))
        frame, coro = getattr(coro, running, None), getattr(coro, awaited, None)
        if frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
    return _format_frames(frames)


def _format_frames(frames: list[tuple[str, int, str]]) -> str:
    shown = [one for one in frames if not one[0].startswith(_HERE) and one[2] not in _THREAD_ROOTS][-_FRAMES:]
    return "\n".join(f"{os.sep.join(path.split(os.sep)[-3:])}:{line} in {name}" for path, line, name in shown)


ANSWER_S = 2.0
_SETTLED_S = 0.15
_POLL_S = 0.02
_STACK_LINES = 40
_TAIL_LINES = 5
_TAIL_BYTES = 64 * 1024
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible system call",
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "a zombie",
    "X": "dead",
    "I": "idle",
}
_STOPPED = ("T", "t", "Z", "X", "D")
_THREAD_HEADER = re.compile(r"^(Current thread|Thread) 0x", re.MULTILINE)


class KnownProcess(Protocol):
    """A child process that waits may name; `also` are other names, such as the address it listens on."""

    name: str
    also: tuple[str, ...]
    log_path: Path

    def state(self) -> str:
        """Return one line: name, pid, state, the last progress it reported."""

    def ask_for_stacks(self) -> bool:
        """Ask it to write its stacks to its log, if it can; return True if it was asked."""


class ProcessRegistry:
    """The child processes that a wait may name."""

    def __init__(self) -> None:
        self._known: dict[int, KnownProcess] = {}

    def know(self, process: KnownProcess) -> None:
        self._known[id(process)] = process

    def forget(self, process: KnownProcess) -> None:
        """Remove a child that was stopped on purpose. Idempotent."""
        self._known.pop(id(process), None)

    def named_in(self, whom: str) -> list[KnownProcess]:
        """Return the processes named in a wait's `whom`, in start order."""
        words = set(re.split(r"[,\s]+", whom))
        return [one for one in self._known.copy().values() if words & {one.name, *one.also}]


process_registry = ProcessRegistry()


def state_of(name: str) -> str | None:
    """Return the state of the process with this name or address in one line, or None if it is unknown."""
    found = process_registry.named_in(name)
    return found[-1].state() if found else None


def pid_state(name: str, pid: int | None, said: str = "") -> str:
    """Return one line about a process of this machine: name, pid, state, the kernel call that it sleeps in, `said`."""
    if pid is None:
        return f"{name} is gone"
    letter = _status(pid).get("State", "")[:1]
    if not letter:
        return f"{name} (pid {pid}) is gone"
    call = ""
    if letter in "SD":
        with contextlib.suppress(OSError):  # not all systems report it
            call = Path(f"/proc/{pid}/wchan").read_text().strip()
    where = f" in {call}" if call not in ("", "0") else ""
    return f"{name} (pid {pid}) is {_STATES.get(letter, letter)}{where}{said}"


def send_sigquit(pid: int) -> bool:
    """Send SIGQUIT to a process that runs and has a handler for it; return True if it was sent."""
    status = _status(pid)
    if status.get("State", "X")[:1] in _STOPPED:
        return False
    if not int(status.get("SigCgt", "0"), 16) >> (signal.SIGQUIT - 1) & 1:  # no handler: SIGQUIT would kill it
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGQUIT)
        return True
    return False


def stacks_of(processes: Sequence[KnownProcess]) -> dict[str, str]:
    """Return the stacks of each process, or its state and the end of its log if it does not answer.

    An answer is what was appended to a log since it was asked for, once the log has stopped growing.
    """
    begins = {one: _log_size(one.log_path) for one in processes}
    asked = [one for one in processes if one.ask_for_stacks()]
    sizes, grown = dict(begins), dict.fromkeys(asked, 0.0)
    answers: dict[KnownProcess, str] = {}
    deadline = time.monotonic() + ANSWER_S
    while len(answers) < len(asked) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = time.monotonic()
        for process in [one for one in asked if one not in answers]:
            size = _log_size(process.log_path)
            if size != sizes[process]:
                sizes[process], grown[process] = size, now
            elif grown[process] and now - grown[process] > _SETTLED_S:
                text = _read_log(process.log_path, begins[process])
                if (found := _THREAD_HEADER.search(text)) is not None:  # the main thread is last: keep the last lines
                    answers[process] = "\n".join(text[found.start() :].rstrip().splitlines()[-_STACK_LINES:])
    for one in processes:
        if one not in answers:
            lines = [one.state() + (f" and did not show its stacks within {ANSWER_S:g} s" if one in asked else "")]
            if tail := log_tail(one.log_path, _TAIL_LINES):
                lines += [f"the end of {one.log_path}:", tail]
            answers[one] = "\n".join(lines)
    return {one.name: answers[one] for one in processes}


def _status(pid: int) -> dict[str, str]:
    """Read /proc/PID/status as a dict; empty for a process that is gone. (psutil does not tell caught signals.)"""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def _log_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def log_tail(path: Path, n: int) -> str:
    """Return the last n lines of a log, without trailing blanks; empty if there is no log yet."""
    return "\n".join(_read_log(path, -_TAIL_BYTES).rstrip().splitlines()[-n:])


def _read_log(path: Path, position: int) -> str:
    """Read a log from a byte on; a negative position counts from the end."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size + position) if position < 0 else position)
            return log.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
