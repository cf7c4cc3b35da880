"""Named timers, under the import path of slime plugins.

They measure a plugin's own times in its process: a run logs its own times under `perf/`, and a plugin logs these with
`slime.utils.tracking_utils.log`.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from slime.utils.misc import SingletonMeta


class Timer(metaclass=SingletonMeta):
    """The timer of a process: the running names, and the total seconds by name of those that ended."""

    def __init__(self) -> None:
        self.timers: dict[str, float] = {}
        self.start_time: dict[str, float] = {}

    def start(self, name: str) -> None:
        if name in self.start_time:
            raise ValueError(f"the timer {name} is already running")
        self.start_time[name] = time.perf_counter()

    def end(self, name: str) -> None:
        if name not in self.start_time:
            raise ValueError(f"the timer {name} was not started")
        self.add(name, time.perf_counter() - self.start_time.pop(name))

    def add(self, name: str, elapsed_time: float) -> None:
        self.timers[name] = self.timers.get(name, 0.0) + elapsed_time

    def reset(self, name: str | None = None) -> None:
        if name is None:
            self.timers = {}
        else:
            self.timers.pop(name, None)

    def log_dict(self) -> dict[str, float]:
        return self.timers

    @contextmanager
    def context(self, name: str) -> Iterator[None]:
        self.start(name)
        try:
            yield
        finally:
            self.end(name)


def timer(name_or_func: str | Callable[..., Any]) -> Any:
    """Measure `with timer("name"):`, or decorate a function to measure each of its calls under its own name."""
    if isinstance(name_or_func, str):
        return Timer().context(name_or_func)
    function, name = name_or_func, name_or_func.__name__
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def measured_async(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return await function(*args, **kwargs)
            finally:
                Timer().add(name, time.perf_counter() - begin)

        return measured_async

    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            Timer().add(name, time.perf_counter() - begin)

    return measured


@contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """Pause a running timer while the body runs."""
    Timer().end(name)
    try:
        yield
    finally:
        Timer().start(name)
