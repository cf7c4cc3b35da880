"""The memory all processes of a run take together, and its peak.

Shared pages are counted once over all processes (proportional set size) where the kernel tells, so that the sum is what
the machine really gives; otherwise resident set sizes are added up, which counts them several times.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_bytes(pids: Iterable[int]) -> int:
    """What these processes take now; a process that has ended takes nothing."""
    return sum(_process_bytes(pid) for pid in pids)


class MemorySampler:
    """Asks `pids` every `interval_s` who belongs to the run, and remembers the largest sum."""

    def __init__(self, pids: Callable[[], Iterable[int]], *, interval_s: float = 1.0) -> None:
        self._pids = pids
        self._interval_s = interval_s
        self._peak = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="memory-sampler", daemon=True)
        self._thread.start()

    @property
    def peak_bytes(self) -> int:
        return self._peak

    @property
    def peak_gib(self) -> float:
        return self._peak / 2**30

    def stop(self) -> int:
        """Take a last sample, end the thread and return the peak. Safe to call again."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join()
            self._sample()
        return self._peak

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _sample_until_stopped(self) -> None:
        self._sample()
        while not self._stopped.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        self._peak = max(self._peak, memory_bytes(self._pids()))


def _process_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except PermissionError:
        pass
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (FileNotFoundError, ProcessLookupError):
        return 0
