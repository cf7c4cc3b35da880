"""Timings and device memory of the parts of a rollout's training, and progress reports of a rank.

Invariant: every progress report says that a piece of work is done (a micro-batch; a tensor that was read, written or
sent). Reports never come from a clock, so a rank that hangs is silent. Reports are cheap: of many in quick succession
one is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch


class Timers:
    """Wall-clock seconds by name; on CUDA a part ends when its stream has finished it. Parts also appear in profiles.

    A part that `brings` its results to the host ends when they arrive: the device may already be doing other work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}

    def clear(self) -> None:
        """Start the measurements of a rollout."""
        self._seconds = {}
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def measure(self, name: str, *, brings: bool = False) -> Iterator[None]:
        """Time the part that runs in the context."""
        begin = time.perf_counter()
        with torch.profiler.record_function(f"slime: {name}"):
            yield
            if self._device.type == "cuda" and not brings:
                torch.cuda.current_stream(self._device).synchronize()  # copies on other streams may continue
        self._seconds[name] = time.perf_counter() - begin

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """Return the times, the tokens per second of the policy's updates, and on CUDA the peak memory."""
        metrics = {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}
        if self._device.type == "cuda":
            metrics["perf/trainer_peak_memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
            metrics["perf/trainer_reserved_memory_gib"] = torch.cuda.max_memory_reserved(self._device) / 2**30
        if "actor_train" in self._seconds:
            metrics["perf/actor_train_tok_per_s"] = num_tokens / max(self._seconds["actor_train"], 1e-9)
        return metrics


T = TypeVar("T")

REPORT_INTERVAL_S = 1.0
"""Minimum interval between reports in seconds; far less than any deadline."""


class RankProgress:
    """Reports the progress of a rank's long operations through `tell`; without it, no report is sent.

    `begin("reading weights: tensor", 310)`, then `tick()` after each: "reading weights: tensor 12 of 310".
    """

    def __init__(self, tell: Callable[[str], None] | None = None, *, between_s: float = REPORT_INTERVAL_S) -> None:
        self._tell = tell
        self._between_s = between_s
        self._reported_s = -float("inf")
        self._doing = ""
        self._done = 0
        self._total: int | None = None

    def begin(self, doing: str, total: int | None = None) -> None:
        """Start the next operation, of `total` pieces if the number is known; the previous one is finished."""
        self._doing, self._done, self._total = doing, 0, total
        self._report()

    def tick(self, count: int = 1) -> None:
        """Report that `count` more pieces are done."""
        self._done += count
        self._report()

    def over(self, items: Iterable[T], doing: str, total: int | None = None) -> Iterator[T]:
        """Yield the items; an item is done when the next one is requested."""
        self.begin(doing, total)
        for item in items:
            yield item
            self.tick()

    def restart(self) -> None:
        """Start the reports of another call: the first one is sent at once."""
        self._reported_s = -float("inf")

    @property
    def text(self) -> str:
        """The current operation and its progress."""
        if self._total is not None:
            return f"{self._doing} {self._done} of {self._total}"
        return f"{self._doing} {self._done}" if self._done else self._doing

    def _report(self) -> None:
        if self._tell is None:
            return
        now = time.monotonic()
        if now - self._reported_s >= self._between_s:
            self._reported_s = now
            self._tell(self.text)
