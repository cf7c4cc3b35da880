"""Seconds and device memory of the parts of a rollout's training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch


class Timers:
    """Wall-clock seconds by name; on CUDA a part ends when its stream is done with it. A profile has the parts too.

    A part that `brings` its results to the host ends with these: the device may already do something else.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}

    def clear(self) -> None:
        self._seconds = {}
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def measure(self, name: str, *, brings: bool = False) -> Iterator[None]:
        begin = time.perf_counter()
        with torch.profiler.record_function(f"slime: {name}"):
            yield
            if self._device.type == "cuda" and not brings:
                torch.cuda.current_stream(self._device).synchronize()  # what is copied beside it may be under way
        self._seconds[name] = time.perf_counter() - begin

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """All parts, the tokens per second of the policy's updates, and on CUDA the most memory that was taken."""
        metrics = {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}
        if self._device.type == "cuda":
            metrics["perf/trainer_peak_memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
            metrics["perf/trainer_reserved_memory_gib"] = torch.cuda.max_memory_reserved(self._device) / 2**30
        if "actor_train" in self._seconds:
            metrics["perf/actor_train_tok_per_s"] = num_tokens / max(self._seconds["actor_train"], 1e-9)
        return metrics


# How far a rank is with what it was asked to do, as whoever waits for it hears of it.
#
# Invariant: every report says that a piece of work is done (a micro-batch, a tensor that was read, written or sent);
# none comes by the clock, so a rank that hangs is silent. Reports are cheap: of many in quick succession one is told.

T = TypeVar("T")

BETWEEN_S = 1.0
"""At most one report in this many seconds; far less than any deadline."""


class Progress:
    """Made once for a rank and passed to whatever works there long; without `tell` nobody hears of it.

    `begin("reading weights: tensor", 310)`, then `tick()` after each: "reading weights: tensor 12 of 310".
    """

    def __init__(self, tell: Callable[[str], None] | None = None, *, between_s: float = BETWEEN_S) -> None:
        self._tell = tell
        self._between_s = between_s
        self._told_s = -float("inf")
        self._doing = ""
        self._done = 0
        self._total: int | None = None

    def begin(self, doing: str, total: int | None = None) -> None:
        """What comes next, in `total` pieces where their number is known; what went before is done."""
        self._doing, self._done, self._total = doing, 0, total
        self._report()

    def tick(self, count: int = 1) -> None:
        """So many pieces more are done."""
        self._done += count
        self._report()

    def over(self, items: Iterable[T], doing: str, total: int | None = None) -> Iterator[T]:
        """The same items; one is done when the next is asked for."""
        self.begin(doing, total)
        for item in items:
            yield item
            self.tick()

    def restart(self) -> None:
        """Another call is served: its first report is told at once."""
        self._told_s = -float("inf")

    @property
    def text(self) -> str:
        """What is done, and how much of it there is."""
        if self._total is not None:
            return f"{self._doing} {self._done} of {self._total}"
        return f"{self._doing} {self._done}" if self._done else self._doing

    def _report(self) -> None:
        if self._tell is None:
            return
        now = time.monotonic()
        if now - self._told_s >= self._between_s:
            self._told_s = now
            self._tell(self.text)
