"""What every transport has in common: the bracket around an update, and the check after it.

The invariant: when `publish(version)` returns, every engine samples with exactly that version and is generating again.
Engines are paused only while they load; the trainer writes its tensors before. If anything fails, the engines are told
to continue all the same, and the first error is the one that is raised.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from slime.engine.client import EngineClient, PauseMode
from slime.errors import RunFailed

T = TypeVar("T")


class WeightSource(Protocol):
    """Who has the weights: the trainers."""

    def export_weights(self, out_dir: Path, version: int) -> Sequence[Path]:
        """Write HF-named tensors in the rollout dtype as safetensors files into `out_dir`; the files written."""
        ...


class RunAsync(Protocol):
    """Runs a coroutine on the event loop that owns the engine clients, and waits for its result."""

    def __call__(self, coro: Coroutine[Any, Any, T], /) -> T: ...


class WeightVersionMismatch(RunFailed):
    """An engine took an update and then named another version than the one sent."""

    def __init__(self, url: str, expected: int, found: str) -> None:
        super().__init__(
            f"engine {url} samples with weight version {found} after version {expected} was published to it"
        )
        self.url = url
        self.expected = expected
        self.found = found


@dataclass(frozen=True)
class PublishResult:
    """One update: its version, how long it took in all, how long of that the engines stood still, its size."""

    version: int
    seconds: float
    paused_seconds: float
    bytes: int

    def metrics(self) -> dict[str, float]:
        """Under the names used in metrics files."""
        return {
            "perf/update_weights_time": self.seconds,
            "perf/update_weights_paused_time": self.paused_seconds,
            "perf/update_weights_wire_bytes": self.bytes,
        }


@dataclass(frozen=True)
class Staged:
    """Files of one version, where the engines can read them."""

    folder: Path
    files: tuple[Path, ...]

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)


class WeightPublisher(ABC):
    """Publishes a source's weights to all engines; a transport says how files are staged, announced and removed."""

    def __init__(
        self,
        source: WeightSource,
        clients: Sequence[EngineClient],
        run_async: RunAsync,
        *,
        timeout_s: float = 600.0,
        pause_mode: PauseMode = "abort",
    ) -> None:
        self._source = source
        self._clients = list(clients)
        self._run_async = run_async
        self._timeout_s = timeout_s
        self._pause_mode = pause_mode

    def publish(self, version: int) -> PublishResult:
        """Bring every engine to the trainer's present weights under the number `version`."""
        started = time.perf_counter()
        staged = self._stage(version)
        size = staged.bytes
        arrived = False
        try:
            paused_seconds = self._run_async(self._swap(staged, version))
            arrived = True
        finally:
            self._retire(staged, version, arrived=arrived)
        return PublishResult(version, time.perf_counter() - started, paused_seconds, size)

    @abstractmethod
    def _stage(self, version: int) -> Staged:
        """Have the source write its weights where the engines can read them."""

    @abstractmethod
    async def _announce(self, client: EngineClient, staged: Staged, version: int) -> None:
        """Have one engine load the staged files."""

    @abstractmethod
    def _retire(self, staged: Staged, version: int, *, arrived: bool) -> None:
        """Remove what is no longer needed now that the update has `arrived` everywhere, or failed."""

    @abstractmethod
    def close(self) -> None:
        """Remove everything this publisher still holds. Safe to call again."""

    async def _swap(self, staged: Staged, version: int) -> float:
        started = time.perf_counter()
        try:
            await self._all(lambda client: client.pause(self._pause_mode))
            await self._all(lambda client: self._announce(client, staged, version))
        except BaseException:
            await asyncio.gather(*(client.continue_() for client in self._clients), return_exceptions=True)
            raise
        await self._all(lambda client: client.continue_())
        paused_seconds = time.perf_counter() - started
        found = await self._all(lambda client: client.get_weight_version())
        for client, engine_version in zip(self._clients, found, strict=True):
            if engine_version != str(version):
                raise WeightVersionMismatch(client.base_url, version, engine_version)
        return paused_seconds

    async def _all(self, call: Callable[[EngineClient], Awaitable[T]]) -> list[T]:
        """Call all engines at once; the first error is raised after every call has ended."""
        results = await asyncio.gather(*(call(client) for client in self._clients), return_exceptions=True)
        values: list[T] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            values.append(result)
        return values
