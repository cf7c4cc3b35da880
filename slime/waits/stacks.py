"""Where the threads and tasks of this process stand, in a few lines each.

The invariant: looking changes nothing and waits for nobody. Threads in which only the standard library and installed
packages are at work (idle workers, an event loop between two events) are left out, and so is this module.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

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
