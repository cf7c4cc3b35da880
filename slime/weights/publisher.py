"""Common part of all weight transports: pauses engines around an update, and checks their version after it.

Invariant: when `publish(version)` returns, every engine samples with exactly that version and is generating again.
Engines are paused only while they load; the trainer writes its tensors before. After a failure the engines continue
too, and the first error is raised.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from slime.cluster.watchdog import named
from slime.engine.http.client import EngineClient, PauseMode, call_all
from slime.errors import RunFailed
from slime.storage.json_types import JsonObject

T = TypeVar("T")

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1}
_CONTINUE_S = 10.0
"""Time in which an engine must continue after a failed update; an engine that hangs may be the cause of the failure."""


Buckets = Sequence[Sequence[JsonObject]]
"""Name, dtype and shape of each tensor, by bucket."""


class WeightSource(Protocol):
    """The trainers, whose verbs (`slime.train.weight_export.sender`) write and send weights."""

    def call(self, verb: str, /, **params: object) -> list[Any]:
        """Call a verb of every rank; return the answers in rank order."""


class RunOnClientLoop(Protocol):
    """Runs a coroutine on the event loop that owns the engine clients, and waits for its result."""

    def __call__(self, coro: Coroutine[object, object, T], /) -> T: ...


class WeightsNotWritten(RunFailed):
    """A version of the weights could not be written; the trainers still have it."""


class WeightVersionMismatch(RunFailed):
    """An engine accepted an update and then reports another version than the one sent."""

    def __init__(self, url: str, expected: int, found: str) -> None:
        super().__init__(
            f"engine {url} samples with weight version {found} after version {expected} was published to it"
        )
        self.url = url
        self.expected = expected
        self.found = found


@dataclass(frozen=True)
class PublishResult:
    """Result of one update: version, total time, time for which the engines were paused, and size in bytes.

    `write_seconds` is the time before the pause. A delta also has `density`, the share of bytes that changed, and
    `full_fallbacks`, the number of engines that got the whole weights instead.
    """

    version: int
    seconds: float
    paused_seconds: float
    bytes: int
    write_seconds: float = 0.0
    density: float | None = None
    full_fallbacks: int = 0

    def in_words(self) -> str:
        """Describe the update for the progress display."""
        return f"version {self.version} on all engines ({self.bytes / 2**20:.3g} MiB, {self.seconds:.2g} s)"

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the update under the names used in metrics files."""
        metrics = {
            "perf/update_weights_time": self.seconds,
            "perf/update_weights_paused_time": self.paused_seconds,
            "perf/update_weights_write_time": self.write_seconds,
            "perf/update_weights_wire_bytes": self.bytes,
        }
        if self.density is not None:
            metrics["perf/update_weights_density"] = self.density
            metrics["perf/update_weights_full_fallbacks"] = self.full_fallbacks
        return metrics


@dataclass(frozen=True)
class StagedVersion:
    """A version that is ready for the engines: its size, and its folder and files if there are any."""

    bytes: int
    folder: Path | None = None
    files: tuple[Path, ...] = ()
    density: float | None = None
    """Share of bytes that changed; only for a delta."""
    full_fallbacks: int = 0


Swapped = tuple[float, Sequence[EngineClient]]
"""Outcome of an update on the engines: the seconds they were paused, and those that rejected it (still paused)."""


class Delivery(Protocol):
    """Copies staged files to engines that cannot read this machine's files."""

    async def deliver(self, client: EngineClient, folder: Path) -> Path | None:
        """Copy the folder to the engine's machine and return its path there; None if the engine can read the folder."""

    async def forget(self, client: EngineClient, folder: Path) -> None:
        """Remove a delivered copy."""


@dataclass(frozen=True)
class PublisherSettings:
    """The trainers, the engines, and the flags of an update; an update aborts requests only in pause mode `abort`.

    `clients` may be a live view of elastic engines (`EnginePool.roster`): each update goes to the engines that are
    present when it starts.
    """

    source: WeightSource
    clients: Sequence[EngineClient]
    run_async: RunOnClientLoop
    timeout_s: float = 600.0
    pause_mode: PauseMode = "abort"
    check: Callable[[int], None] | None = None
    """Check called with the version after an update (`slime.weights.transport`)."""
    delivery: Delivery | None = None

    @property
    def flush_cache(self) -> bool:
        """True in pause mode `abort`: a flush with live requests crashes SGLang, and only this mode leaves none."""
        return self.pause_mode == "abort"


class WeightPublisher(ABC):
    """Publishes the weights of a source to all engines."""

    def __init__(self, settings: PublisherSettings) -> None:
        self._settings = settings
        self._source = settings.source

    @abstractmethod
    def publish(self, version: int) -> PublishResult:
        """Send the trainer's current weights to every engine as version `version`."""

    @abstractmethod
    def bring(self, clients: Sequence[EngineClient], version: int, *, base: int | None = None) -> bool:
        """Send the trainer's current weights, version `version`, to these engines only.

        `base` is a version of this run that all of them have, if known. Returns False if the engines have to wait for
        the next update.
        """

    @property
    def staged_in(self) -> Path | None:
        """Folder in which the weights are staged; None for a transport without files."""
        return None

    def engines_changed(self) -> None:  # noqa: B027 (most transports keep no state of engines)
        """Handle engines that joined, left or restarted since the last update."""

    @abstractmethod
    def close(self) -> None:
        """Remove all data of this publisher; may be called again."""


class StagedPublisher(WeightPublisher):
    """Stages a version, announces it to the paused engines, and removes it."""

    def __init__(self, settings: PublisherSettings) -> None:
        super().__init__(settings)
        self._clients = list(settings.clients)

    def publish(self, version: int) -> PublishResult:
        started = time.perf_counter()
        present = list(self._settings.clients)
        if present != self._clients:
            self.engines_changed()
            self._clients = present
        staged = self._staged(version)
        written = time.perf_counter() - started
        arrived, total, fallbacks = False, staged.bytes, staged.full_fallbacks
        try:
            paused_seconds, refused = self._swap(self._clients, staged, version)
            if refused:  # they are still paused
                began = time.perf_counter()
                try:
                    whole = self._staged(version, whole=True)
                except BaseException:
                    ending = named(resume_engines(refused), f"end of weight update {version}")
                    self._settings.run_async(ending)
                    raise
                self._swap(refused, whole, version)
                paused_seconds += time.perf_counter() - began
                total, fallbacks = total + whole.bytes, len(refused)
            arrived = True
        finally:
            self._retire(staged, version, arrived=arrived)
        if self._settings.check is not None:
            self._settings.check(version)
        seconds = time.perf_counter() - started
        return PublishResult(version, seconds, paused_seconds, total, written, staged.density, fallbacks)

    def bring(self, clients: Sequence[EngineClient], version: int, *, base: int | None = None) -> bool:
        staged = self._staged(version)
        try:
            self._swap(clients, staged, version)
        finally:
            self._retire(staged, version, arrived=False)
        return True

    @abstractmethod
    def _stage(self, version: int, *, whole: bool) -> StagedVersion:
        """Make the source write its weights to a place that the engines can read.

        With `whole` they do not depend on an earlier version.
        """

    @abstractmethod
    async def _transfer(
        self, clients: Sequence[EngineClient], staged: StagedVersion, version: int
    ) -> Sequence[EngineClient]:
        """Make the paused engines load the staged weights; return those that rejected them and need whole weights."""

    @abstractmethod
    def _retire(self, staged: StagedVersion, version: int, *, arrived: bool) -> None:
        """Remove data that is not needed after the update has `arrived` everywhere, or failed."""

    def _staged(self, version: int, *, whole: bool = False) -> StagedVersion:
        """Stage a version; an error while writing files is raised as `WeightsNotWritten`."""
        try:
            return self._stage(version, whole=whole)
        except OSError as cause:
            raise WeightsNotWritten(
                f"cannot write version {version} of the weights: {cause}; the engines keep the version they have"
            ) from cause

    def _swap(self, clients: Sequence[EngineClient], staged: StagedVersion, version: int) -> Swapped:
        """Update the engines; the loop that owns their clients does it."""
        whom = "" if clients is self._clients else f" of {' '.join(client.base_url for client in clients)}"
        return self._settings.run_async(
            named(self._pause_and_load(clients, staged, version), f"weight update {version}{whom}")
        )

    async def _pause_and_load(self, clients: Sequence[EngineClient], staged: StagedVersion, version: int) -> Swapped:
        """Pause the engines, make them load and continue, and check the version of those that were updated."""
        started = time.perf_counter()
        async with paused(clients, self._settings.pause_mode) as refused:
            refused += await self._transfer(clients, staged, version)
        paused_seconds = time.perf_counter() - started
        updated = [client for client in clients if client not in refused]
        found = await call_all(updated, lambda client: client.get_weight_version())
        require_version(updated, version, found)
        return paused_seconds, refused


@asynccontextmanager
async def paused(clients: Sequence[EngineClient], mode: PauseMode) -> AsyncIterator[list[EngineClient]]:
    """Pause the engines while the body runs; those that it adds to the list stay paused, unless it fails."""
    refused: list[EngineClient] = []
    try:
        await call_all(clients, lambda client: client.pause(mode))
        yield refused
    except BaseException:
        await resume_engines(clients)
        raise
    await call_all([client for client in clients if client not in refused], lambda client: client.continue_())


async def resume_engines(clients: Sequence[EngineClient]) -> None:
    """Let the reachable engines continue after a failed update."""
    limit_s = min(_CONTINUE_S, *(client.control_timeout_s for client in clients)) if clients else _CONTINUE_S
    await asyncio.gather(*(client.continue_(timeout_s=limit_s) for client in clients), return_exceptions=True)


def total_bytes(buckets: Buckets) -> int:
    """Return the size of all tensors of the buckets."""
    return sum(prod(tensor["shape"]) * _ITEM_BYTES[tensor["dtype"]] for bucket in buckets for tensor in bucket)


def require_version(clients: Sequence[EngineClient], version: int, found: Sequence[str]) -> None:
    """Raise `WeightVersionMismatch` if an engine reports another version after an update."""
    for client, engine_version in zip(clients, found, strict=True):
        if engine_version != str(version):
            raise WeightVersionMismatch(client.base_url, version, engine_version)


EngineKind = Literal["embedded", "sglang"]
"""Kind of server at the engines' addresses; it determines which calls an update may use."""
