"""Progress of a rollout or an evaluation: samples done and in flight, tokens, and the age of the oldest sample.

Invariant: the counts are updated as samples begin and end, so reading them costs the same for any number of samples.
They may be read from all threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgressSnapshot:
    """Snapshot of the progress; `wanted` is 0 if the number of samples is not known."""

    done: int
    wanted: int
    under_way: int
    judged: int
    """Generated samples that wait for their reward."""
    tokens_per_s: float
    oldest_s: float | None


class SampleProgress:
    """Counts the samples of one rollout or evaluation at a time; those in flight stay counted when the next begins."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._under_way: dict[int, float] = {}  # start time of each sample, oldest first
        self._judged: dict[int, float] = {}  # the same for samples that wait for a reward
        self._next_key = 0
        self._is_going = False
        self._done = self._wanted = self._tokens = 0
        self._began = now()

    def begin(self, wanted: int, done: int = 0) -> None:
        """Start counting work that needs `wanted` samples, of which `done` are already finished."""
        with self._lock:
            self._is_going = True
            self._wanted, self._done, self._tokens = wanted, done, 0
            self._began = self._now()

    def subtract_discarded(self, samples: int) -> None:
        """Subtract discarded samples from those done; others must replace them."""
        with self._lock:
            self._done -= samples

    def end(self) -> None:
        """Stop counting; `look` returns None until the next `begin`."""
        with self._lock:
            self._is_going = False

    @contextmanager
    def during(self, wanted: int) -> Iterator[None]:
        """Count work that needs `wanted` samples while the body runs."""
        self.begin(wanted)
        try:
            yield
        finally:
            self.end()

    def sample(self) -> AbstractContextManager[None]:
        """Count one sample as in generation while the body runs."""
        return self._counted(self._under_way)

    def judging(self) -> AbstractContextManager[None]:
        """Count one sample as waiting for its reward while the body runs."""
        return self._counted(self._judged)

    @contextmanager
    def _counted(self, work: dict[int, float]) -> Iterator[None]:
        with self._lock:
            key, self._next_key = self._next_key, self._next_key + 1
            work[key] = self._now()
        try:
            yield
        finally:
            with self._lock:
                del work[key]

    def finished(self, tokens: int) -> None:
        """Count one finished sample, for which `tokens` tokens were sampled."""
        with self._lock:
            self._done += 1
            self._tokens += tokens

    def look(self) -> ProgressSnapshot | None:
        """Return a snapshot of the progress; None if no work is counted."""
        with self._lock:
            if not self._is_going or not (self._under_way or self._judged or self._done):
                return None
            now = self._now()
            oldest = min((next(iter(work.values())) for work in (self._under_way, self._judged) if work), default=None)
            rate = self._tokens / max(now - self._began, 1e-6)
            oldest_s = None if oldest is None else now - oldest
            return ProgressSnapshot(self._done, self._wanted, len(self._under_way), len(self._judged), rate, oldest_s)

    def sentence(self, tokens_per_s: float | None = None) -> str | None:
        """Return the progress as a line of text.

        `tokens_per_s` is the speed that the engines report, which includes unfinished samples.
        """
        beat = self.look()
        if beat is None:
            return None
        wanted = f"/{beat.wanted}" if beat.wanted else ""
        done = min(beat.done, beat.wanted) if beat.wanted else beat.done
        rate = beat.tokens_per_s if tokens_per_s is None else tokens_per_s
        text = f"{done}{wanted} samples, {rate:,.0f} tok/s"
        if beat.judged:
            text += f", {beat.judged} waiting for a reward"
        return text if beat.oldest_s is None else f"{text}, longest running {beat.oldest_s:.0f} s"
