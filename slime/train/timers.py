"""Seconds and device memory of the parts of a rollout's training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

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
