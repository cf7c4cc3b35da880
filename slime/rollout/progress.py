"""How far a rollout, or an evaluation, is: samples done and under way, tokens, and how long the oldest one takes.

Invariant: every count is kept as samples begin and end, so reading them is as cheap with a million samples as with one;
they may be read from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Beat:
    """One look. `wanted` is 0 when nobody said how many samples there will be."""

    done: int
    wanted: int
    under_way: int
    judged: int
    """Samples that are generated and wait for their reward."""
    tokens_per_s: float
    oldest_s: float | None


class Pulse:
    """Counts of one kind of work at a time; what is under way goes on through a new beginning."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._under_way: dict[int, float] = {}  # when each began, the oldest first
        self._judged: dict[int, float] = {}  # likewise, of samples that wait for a reward
        self._next_key = 0
        self._is_going = False
        self._done = self._wanted = self._tokens = 0
        self._began = now()

    def begin(self, wanted: int, done: int = 0) -> None:
        """Something that takes `wanted` samples, of which `done` are there already."""
        with self._lock:
            self._is_going = True
            self._wanted, self._done, self._tokens = wanted, done, 0
            self._began = self._now()

    def want_more(self, samples: int) -> None:
        """So many of those that are done do not count: others must take their place."""
        with self._lock:
            self._done -= samples

    def end(self) -> None:
        """It is done; there is nothing to be told until the next one."""
        with self._lock:
            self._is_going = False

    @contextmanager
    def during(self, wanted: int) -> Iterator[None]:
        self.begin(wanted)
        try:
            yield
        finally:
            self.end()

    def sample(self) -> AbstractContextManager[None]:
        """One sample is being generated while the body lasts."""
        return self._counted(self._under_way)

    def judging(self) -> AbstractContextManager[None]:
        """One sample waits for its reward while the body lasts."""
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
        """One more sample is there, with its reward, for which so many tokens were sampled."""
        with self._lock:
            self._done += 1
            self._tokens += tokens

    def look(self) -> Beat | None:
        """How far it is; None while nothing is going on."""
        with self._lock:
            if not self._is_going or not (self._under_way or self._judged or self._done):
                return None
            now = self._now()
            oldest = min((next(iter(work.values())) for work in (self._under_way, self._judged) if work), default=None)
            rate = self._tokens / max(now - self._began, 1e-6)
            oldest_s = None if oldest is None else now - oldest
            return Beat(self._done, self._wanted, len(self._under_way), len(self._judged), rate, oldest_s)

    def sentence(self, tokens_per_s: float | None = None) -> str | None:
        """The look in words; `tokens_per_s` is what the engines say of their speed, who know of unfinished samples."""
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
