"""Time sharing of GPUs between engines and trainers.

Invariant: rollout -> [engines release their memory, trainers wake] -> training -> [engines allocate the memory of the
weights] -> publishing -> [trainers sleep, engines allocate the memory of the cache] -> rollout. Trainers stay awake
until the engines generate again, so everything that is saved in between is on the device. A switch to the present
phase does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from slime.driver.components import RunComponents
from slime.observability.memory import PhaseMemory
from slime.weights.transport import sends_whole_weights

WEIGHTS, CACHE = "weights", "kv_cache"


class GpuTimeSharing:
    """Switches GPU memory between phases; without a publisher of weights the switches move no memory."""

    def __init__(self, parts: RunComponents, memory: PhaseMemory | None) -> None:
        self._parts = parts
        self._memory = memory
        both = parts.publisher is not None
        self._offload_rollout = both and parts.config.offload_rollout
        self._offload_train = both and parts.config.offload_train
        self._discard = parts.engines is not None and sends_whole_weights(parts.config, parts.engines.kind)
        self._away: list[str] = []
        self._are_asleep = False
        self._seconds: dict[str, float] = {}

    def to_training(self) -> None:
        """Release the memory of the engines, then wake the trainers."""
        self._enter("release")
        if self._offload_rollout and not self._away:
            with self._timed("release"):
                self._on_engines("flush_cache")
                extra = {"discard_weights": True} if self._discard else {}
                self._on_engines("release_memory", [WEIGHTS, CACHE], **extra)
                self._away = [WEIGHTS, CACHE]
        if self._are_asleep and self._parts.trainers is not None:
            with self._timed("wake"), self._parts.trainers_at_work():
                self._parts.trainers.call("wake")
                self._are_asleep = False
        self._enter("train")

    def to_publishing(self) -> None:
        """Make the engines ready to receive weights."""
        self._enter("publish")
        if WEIGHTS in self._away:
            self._resume(WEIGHTS)

    def to_rollout(self) -> None:
        """Offload the trainers, then give the engines all of their memory back."""
        if self._offload_train and not self._are_asleep and self._parts.trainers is not None:
            self._enter("sleep")
            with self._timed("sleep"), self._parts.trainers_at_work():
                self._parts.trainers.call("sleep")
                self._are_asleep = True
        for tag in self._away.copy():
            self._resume(tag)
        self._enter("rollout")

    def metrics(self) -> dict[str, float]:
        """Return the seconds of the switches since the last call, and the memory peaks of the phases."""
        seconds, self._seconds = self._seconds, {}
        found = {f"perf/switch_{name}_time": value for name, value in seconds.items()}
        if seconds:
            found["perf/switch_time"] = sum(seconds.values())
        return found | ({} if self._memory is None else self._memory.peaks())

    def _resume(self, tag: str) -> None:
        with self._timed(f"resume_{tag}"):
            self._on_engines("resume_memory", [tag])
            self._away.remove(tag)

    def _on_engines(self, method: str, *args: object, **kwargs: object) -> None:
        runtime = self._parts.runtime
        runtime.run(runtime.pool.broadcast(method, *args, **kwargs))

    def _enter(self, phase: str) -> None:
        if self._memory is not None:
            self._memory.enter(phase)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began
