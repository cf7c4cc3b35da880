"""Where the threads and tasks of this process stand, in a few lines each.

The invariant: looking changes nothing and waits for nobody. Threads in which only the standard library and installed
packages are at work (idle workers, an event loop between two events) are left out, and so is this module.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

_FRAMES = 8
_EVERYWHERE = ("_bootstrap", "_bootstrap_inner")
"""Where every thread begins."""
_HERE = os.path.dirname(__file__)
_INSTALLED = tuple(
    path + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))
)


def thread_stacks() -> dict[str, str]:
    """The stacks of all threads with code of ours or of the user's, by thread name; newest frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: Counter[tuple[str, str]] = Counter()
    for ident, frame in sys._current_frames().items():
        frames = list(_frames_of(frame))
        if any(_is_ours(path) for path, _, _ in frames) and frames[-1][0] != selectors.__file__:
            found[f"thread {names.get(ident, ident)}", _text(frames)] += 1
    stacks: dict[str, str] = {}
    for (name, text), count in found.items():
        key = name + (f" and {count - 1} more like it" if count > 1 else "")
        while key in stacks:
            key += "'"  # threads of one name that stand in different places
        stacks[key] = text
    return stacks


def task_stack(task: asyncio.Future[Any]) -> str:
    """Where a task waits, through all the coroutines it awaits; empty for one that has ended."""
    if not isinstance(task, asyncio.Task) or task.done():
        return ""
    frames = []
    coro: Any = task.get_coro()
    while coro is not None:
        frame, coro = _step(coro)
        if frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
    return _text(frames)


def _step(coro: Any) -> tuple[FrameType | None, Any]:
    """The frame of a coroutine or generator, and what it awaits."""
    for frame, awaited in (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await")):
        if hasattr(coro, frame):
            return getattr(coro, frame), getattr(coro, awaited)
    return None, None


def _frames_of(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    newest_first = []
    while frame is not None:
        newest_first.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    yield from reversed(newest_first)


def _text(frames: list[tuple[str, int, str]]) -> str:
    shown = [one for one in frames if not one[0].startswith(_HERE) and one[2] not in _EVERYWHERE][-_FRAMES:]
    return "\n".join(f"{_short(path)}:{line} in {name}" for path, line, name in shown)


def _is_ours(path: str) -> bool:
    return not path.startswith((*_INSTALLED, _HERE, "<frozen"))


def _short(path: str) -> str:
    return os.sep.join(path.split(os.sep)[-3:])


# Child processes by name: what state they are in, and where they stand in their code.
#
# The invariant: a process is asked for its stacks (SIGQUIT) only if it was started with the promise to answer and has
# the handler installed at this moment; any other process would die of that signal. Nothing here takes longer than
# `ANSWER_S`.

ANSWER_S = 2.0
_SETTLED_S = 0.15
_POLL_S = 0.02
_STACK_LINES = 40
_TAIL_LINES = 5
_TAIL_BYTES = 16 * 1024
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
_A_THREAD = re.compile(r"^(Current thread|Thread) 0x", re.MULTILINE)


class Elsewhere(Protocol):
    """A process on another machine, which has to be asked."""

    def state(self) -> str: ...

    def ask_for_stacks(self) -> bool:
        """Whether it was asked to write its stacks to its log."""


@dataclass(frozen=True, eq=False)
class KnownProcess:
    """One child: `pid_of` gives its pid while it runs; `also` are other names, e.g. the address it listens on. One on
    another machine has no pid here: `elsewhere` answers for it."""

    name: str
    pid_of: Callable[[], int | None]
    log_path: Path | None
    also: tuple[str, ...] = ()
    dumps_stacks: bool = False
    last_word: Callable[[], str | None] = lambda: None
    elsewhere: Elsewhere | None = None

    def state(self) -> str:
        """One line: name, pid, state, where it hangs in the kernel, in which call, and what it said last."""
        if self.elsewhere is not None:
            return self.elsewhere.state()
        pid = self.pid_of()
        if pid is None:
            return f"{self.name} is gone"
        letter = _status(pid).get("State", "")[:1]
        if not letter:
            return f"{self.name} (pid {pid}) is gone"
        where = f" in {call}" if letter in "SD" and (call := _wchan(pid)) else ""
        said = f", {word}" if (word := self.last_word()) else ""
        return f"{self.name} (pid {pid}) is {_STATES.get(letter, letter)}{where}{said}"

    def log_tail(self) -> str:
        """The last lines of its log."""
        text = _read_from(self.log_path, -_TAIL_BYTES)
        return "\n".join(text.rstrip().splitlines()[-_TAIL_LINES:])


class ProcessRegistry:
    """The children of this process that a wait may name."""

    def __init__(self) -> None:
        self._known: dict[int, KnownProcess] = {}

    def know(self, process: KnownProcess) -> None:
        self._known[id(process)] = process

    def forget(self, process: KnownProcess) -> None:
        self._known.pop(id(process), None)

    def named_in(self, whom: str) -> list[KnownProcess]:
        """The processes that a wait's `whom` speaks of, in the order they were started."""
        words = set(re.split(r"[,\s]+", whom))
        return [one for one in self._known.copy().values() if words & {one.name, *one.also}]


registry = ProcessRegistry()


def know_process(
    name: str,
    pid_of: Callable[[], int | None],
    log_path: Path | None,
    *,
    also: Sequence[str] = (),
    dumps_stacks: bool = False,
    last_word: Callable[[], str | None] = lambda: None,
    elsewhere: Elsewhere | None = None,
) -> KnownProcess:
    """Make a child known; `dumps_stacks` promises that it writes its stacks to its log on SIGQUIT, `last_word` is what
    it last told of its work."""
    process = KnownProcess(name, pid_of, log_path, tuple(also), dumps_stacks, last_word, elsewhere)
    registry.know(process)
    return process


def forget_process(process: KnownProcess) -> None:
    """A child that was stopped on purpose is no longer of interest. Safe to call again."""
    registry.forget(process)


def state_of(name: str) -> str | None:
    """The state of the process with this name or address, in one line; None where none is known."""
    found = registry.named_in(name)
    return found[-1].state() if found else None


def stacks_of(processes: Sequence[KnownProcess]) -> dict[str, str]:
    """What each process says of itself: its stacks, or its state and the end of its log if it does not answer."""
    sizes = {one: _log_size(one.log_path) for one in processes}
    asked = {one: sizes[one] for one in processes if _ask(one)}
    answers = _await_answers(asked)
    return {one.name: answers.get(one) or _without_answer(one, asked=one in asked) for one in processes}


def _ask(process: KnownProcess) -> bool:
    """Send SIGQUIT to a process that answers it; whether it was sent."""
    if process.elsewhere is not None:
        return process.dumps_stacks and process.elsewhere.ask_for_stacks()
    pid = process.pid_of()
    if not process.dumps_stacks or process.log_path is None or pid is None:
        return False
    status = _status(pid)
    if status.get("State", "X")[:1] in _STOPPED or not _catches(status, signal.SIGQUIT):
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGQUIT)
        return True
    return False


def _await_answers(asked: dict[KnownProcess, int]) -> dict[KnownProcess, str]:
    """What came into the logs since they had the given sizes, once it has stopped coming."""
    answers: dict[KnownProcess, str] = {}
    grown = dict.fromkeys(asked, 0.0)
    sizes = dict(asked)
    deadline = time.monotonic() + ANSWER_S
    while len(answers) < len(asked) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = time.monotonic()
        for process in [one for one in asked if one not in answers]:
            size = _log_size(process.log_path)
            if size != sizes[process]:
                sizes[process], grown[process] = size, now
            elif grown[process] and now - grown[process] > _SETTLED_S:
                stacks = _stacks_in(_read_from(process.log_path, asked[process]))
                if stacks:
                    answers[process] = stacks
    return answers


def _stacks_in(text: str) -> str:
    """The dump in a piece of log; the main thread comes last, so the end is what is kept."""
    found = _A_THREAD.search(text)
    if found is None:
        return ""
    lines = text[found.start() :].rstrip().splitlines()
    return "\n".join(lines[-_STACK_LINES:])


def _without_answer(process: KnownProcess, *, asked: bool) -> str:
    lines = [process.state() + (f" and did not show its stacks within {ANSWER_S:g} s" if asked else "")]
    if tail := process.log_tail():
        lines += [f"the end of {process.log_path}:", tail]
    return "\n".join(lines)


def _status(pid: int) -> dict[str, str]:
    """/proc/PID/status as a dict; empty for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def _catches(status: dict[str, str], number: int) -> bool:
    return bool(int(status.get("SigCgt", "0"), 16) >> (number - 1) & 1)


def _wchan(pid: int) -> str:
    """The kernel function a process sleeps in, where the system tells."""
    try:
        call = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if call == "0" else call


def _log_size(path: Path | None) -> int:
    try:
        return 0 if path is None else path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path | None, position: int) -> str:
    """A log from a byte on; a negative position counts from the end."""
    if path is None:
        return ""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size + position) if position < 0 else position)
            return log.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
