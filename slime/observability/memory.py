"""Memory of a run: the sum over its processes with its peak, and the peaks of devices and host in each phase of a step.

In the sum over processes shared pages are counted once (proportional set size) if the kernel provides it, so the sum is
the memory that the machine really uses; otherwise resident set sizes are added up, which counts them several times.

Invariant: the peaks by phase cover the whole machine, not only this run. A phase's peak includes every sample taken
during the phase, with one at its start and one at its end. `memory.jsonl` has a row for every significant change.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self, TextIO

import psutil

from slime.cluster.watchdog.background import Repeated

INTERVAL_S = 0.05
_WORTH_A_ROW = 64 * 2**20

_MEMINFO = Path("/proc/meminfo")

MeasureBytes = Callable[[], int]

logger = logging.getLogger(__name__)


def memory_bytes(pids: Iterable[int]) -> int:
    """Return the memory that these processes use now; a process that has ended uses none."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            try:
                memory = process.memory_full_info()
            except psutil.AccessDenied:
                memory = process.memory_info()
            total += getattr(memory, "pss", memory.rss)
    return total


class MemorySampler:
    """Measures the processes that `pids` returns every `interval_s`, and keeps the largest sum."""

    def __init__(self, pids: Callable[[], Iterable[int]], *, interval_s: float = 1.0) -> None:
        self._pids = pids
        self._peak = 0
        self._sample()
        self._sampling = Repeated("memory-sampler", self._sample, interval_s)

    @property
    def peak_bytes(self) -> int:
        return self._peak

    def stop(self) -> int:
        """Take a last sample, end the thread and return the peak. Safe to call again."""
        if not self._sampling.is_stopped:
            self._sampling.stop()
            self._sample()
        return self._peak

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _sample(self) -> None:
        self._peak = max(self._peak, memory_bytes(self._pids()))


class PhaseMemory:
    """Samples used memory by phase in its own thread; `used` has the functions that measure it (`device`, `host`)."""

    def __init__(self, file: Path, used: dict[str, MeasureBytes], *, interval_s: float = INTERVAL_S) -> None:
        self._used = used
        self._rows: TextIO = file.open("w")
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._phase = "start"
        self._written: tuple[str, dict[str, int]] = ("", {})
        self._peaks: dict[tuple[str, str], int] = {}
        self._sampling = Repeated("phase-memory", self._sample, interval_s)

    def enter(self, phase: str) -> None:
        """End the present phase and begin this one."""
        self._sample(phase)

    def peaks(self) -> dict[str, float]:
        """Return the peak of each phase since the last call, as metrics."""
        self._sample()
        with self._lock:
            peaks, self._peaks = self._peaks, {}
        return {f"perf/{name}_memory_{phase}_peak_gib": size / 2**30 for (phase, name), size in peaks.items()}

    def close(self) -> None:
        """Stop sampling and close the file. Safe to call again."""
        if not self._sampling.is_stopped:
            self._sampling.stop()
            self._rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _sample(self, next_phase: str | None = None) -> None:
        sizes = {name: used() for name, used in self._used.items()}
        with self._lock:
            self._note(sizes)
            if next_phase is not None:
                self._phase = next_phase
                self._note(sizes)

    def _note(self, sizes: dict[str, int]) -> None:
        for name, size in sizes.items():
            key = (self._phase, name)
            self._peaks[key] = max(self._peaks.get(key, 0), size)
        phase, before = self._written
        if phase == self._phase and all(abs(size - before[name]) < _WORTH_A_ROW for name, size in sizes.items()):
            return
        self._written = (self._phase, sizes)
        row = {"t": round(time.monotonic() - self._began, 3), "phase": self._phase}
        self._rows.write(json.dumps(row | {name: round(size / 2**30, 3) for name, size in sizes.items()}) + "\n")
        self._rows.flush()


def memory_sources(device: str) -> dict[str, MeasureBytes]:
    """Return the functions that measure used memory on this machine."""
    used: dict[str, MeasureBytes] = {"host": host_used_bytes} if _MEMINFO.is_file() else {}
    if device == "cuda":
        try:
            used["device"] = _gpu_used_bytes()
        except (ImportError, RuntimeError) as reason:
            logger.warning("peaks of the GPUs' memory are not recorded: %s", reason)
    return used


def _gpu_used_bytes() -> MeasureBytes:
    """Return a function that measures the visible GPU with the most memory in use, by all processes.

    NVML allocates no GPU memory itself.
    """
    import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        pynvml.nvmlInit()
        names = visible.split(",") if visible is not None else map(str, range(pynvml.nvmlDeviceGetCount()))
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in map(str.strip, names)
            if name
        ]
    except pynvml.NVMLError as cause:
        raise RuntimeError(str(cause)) from cause
    return lambda: max((int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles), default=0)


def host_used_bytes() -> int:
    """Return the bytes of this machine's memory that are not available."""
    found: dict[str, int] = {}
    with _MEMINFO.open() as lines:
        for line in lines:
            name, value = line.split(":")
            if name in ("MemTotal", "MemAvailable"):
                found[name] = int(value.split()[0]) * 1024
    return found["MemTotal"] - found["MemAvailable"]
