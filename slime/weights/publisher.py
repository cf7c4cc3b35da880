"""What every transport has in common: the bracket around an update, and the check after it.

The invariant: when `publish(version)` returns, every engine samples with exactly that version and is generating again.
Engines are paused only while they load; the trainer writes its tensors before. If anything fails, the engines are told
to continue all the same, and the first error is the one that is raised.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from slime.cluster.watchdog import named
from slime.engine.http.client import EngineClient, PauseMode
from slime.errors import RunFailed

T = TypeVar("T")

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1}
_CONTINUE_S = 10.0
"""How long an engine of a failed update may take to go on: one that hangs is the reason why it failed."""


class WeightSource(Protocol):
    """Who has the weights: the trainers. What a transport does not use, its source need not have."""

    def export_weights(self, out_dir: Path, version: int) -> Sequence[Path]:
        """Write HF-named tensors in the rollout dtype as safetensors files into `out_dir`; the files written."""
        ...

    def export_delta(self, out_dir: Path, version: int, base_version: int) -> Sequence[dict[str, Any]]:
        """Write what changed since `base_version`; for each rank its file, the names in it and some numbers."""
        ...

    def weight_buckets(self) -> Sequence[Sequence[dict[str, Any]]]:
        """Name, dtype and shape of each tensor in each bucket of a broadcast."""
        ...

    def join_engines(
        self, *, address: str, port: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> None:
        """Wait for the engines in a process group, as its rank 0."""
        ...

    def broadcast_weights(self, version: int) -> None:
        """Send every bucket to that group."""
        ...

    def leave_engines(self) -> None:
        """Leave that group."""
        ...

    def share_bucket(self, number: int, version: int, region: str | None = None) -> dict[str, Any]:
        """Put tensors into memory that engines of this machine open: of the device, or a region of the host at that
        path. Where it is (`memory`), or why it cannot be (`refused`). The first answer of an update also says
        `buckets`: name, dtype and shape of each tensor in each of them, one bucket if the memory has room for all."""
        ...

    def stop_sharing(self) -> None:
        """All engines have them: memory of the device is free again."""
        ...

    def export_adapter(self, out_dir: Path, version: int) -> Sequence[Path]:
        """Write the LoRA adapter that is trained as PEFT does; the files written."""
        ...

    def adapter_buckets(self) -> tuple[dict[str, Any], Sequence[Sequence[dict[str, Any]]]]:
        """What an engine must know of the adapter beside its tensors, and these as in `weight_buckets`."""
        ...

    def broadcast_adapter(self, version: int) -> None:
        """Send the adapter's buckets to that group."""
        ...

    def weight_checksums(self) -> dict[str, str]:
        """The xxh3-128 of every tensor in the rollout dtype."""
        ...


class RunAsync(Protocol):
    """Runs a coroutine on the event loop that owns the engine clients, and waits for its result."""

    def __call__(self, coro: Coroutine[Any, Any, T], /) -> T: ...


class WeightsNotWritten(RunFailed):
    """A version of the weights could not be written; the trainers still have it."""


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
    """One update: its version, how long it took in all, how long of that the engines stood still, its size.

    `write_seconds` is the part before the pause; of a delta also the share of bytes that changed, and how many engines
    had to be sent the whole weights instead.
    """

    version: int
    seconds: float
    paused_seconds: float
    bytes: int
    write_seconds: float = 0.0
    density: float | None = None
    full_fallbacks: int = 0

    def in_words(self) -> str:
        """For the progress of a run: what arrived, and what it took."""
        return f"version {self.version} on all engines ({self.bytes / 2**20:.3g} MiB, {self.seconds:.2g} s)"

    def metrics(self) -> dict[str, float]:
        """Under the names used in metrics files."""
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
class Staged:
    """One version, ready for the engines: its size, and its files where there are any."""

    bytes: int
    folder: Path | None = None
    files: tuple[Path, ...] = ()
    density: float | None = None
    """Of a delta: the share of bytes that changed."""
    full_fallbacks: int = 0


@dataclass(frozen=True)
class Swapped:
    """The engines after an update: how long they stood still, and those that refused it (still paused)."""

    paused_seconds: float
    refused: Sequence[EngineClient] = ()


class Delivery(Protocol):
    """Brings what is staged to engines that do not see this machine's files."""

    async def deliver(self, client: EngineClient, folder: Path) -> Path | None:
        """Where the folder is on the engine's machine; None where it sees the folder itself."""

    async def forget(self, client: EngineClient, folder: Path) -> None:
        """What was delivered is no longer needed."""


@dataclass(frozen=True)
class Settings:
    """How every transport treats the engines; requests are only cut off by an update in pause mode `abort`."""

    timeout_s: float = 600.0
    pause_mode: PauseMode = "abort"
    check: Callable[[int], None] | None = None
    """Called with the version after an update (`slime.weights.transport`)."""
    delivery: Delivery | None = None

    @property
    def flush_cache(self) -> bool:
        """SGLang dies of a flush with live requests, which only `abort` does not leave behind."""
        return self.pause_mode == "abort"


class WeightPublisher(ABC):
    """Publishes a source's weights to all engines; a transport says how they are staged, announced and removed.

    `clients` may be a live view of engines that come and go (`EnginePool.roster`): each update is for those that are
    there when it begins.
    """

    def __init__(
        self,
        source: WeightSource,
        clients: Sequence[EngineClient],
        run_async: RunAsync,
        *,
        settings: Settings | None = None,
    ) -> None:
        self._source = source
        self._roster = clients
        self._clients = list(clients)
        self._run_async = run_async
        self._settings = settings or Settings()
        self._copies: dict[EngineClient, Path] = {}

    def publish(self, version: int) -> PublishResult:
        """Bring every engine to the trainer's present weights under the number `version`."""
        started = time.perf_counter()
        self._follow_roster()
        staged = written_or_failed(self._stage, version)
        written = time.perf_counter() - started
        arrived = False
        try:
            swapped = self._run_async(named(self._swap(self._clients, staged, version), f"weight update {version}"))
            paused_seconds = swapped.paused_seconds
            if swapped.refused:
                began = time.perf_counter()
                whole = self._send_whole(swapped.refused, version)
                paused_seconds += time.perf_counter() - began
                staged = Staged(
                    staged.bytes + whole.bytes, staged.folder, staged.files, staged.density, len(swapped.refused)
                )
            arrived = True
        finally:
            self._retire(staged, version, arrived=arrived)
        if self._settings.check is not None:
            self._settings.check(version)
        return PublishResult(
            version,
            time.perf_counter() - started,
            paused_seconds,
            staged.bytes,
            written,
            staged.density,
            staged.full_fallbacks,
        )

    @property
    def staged_in(self) -> Path | None:
        """The folder in which engines find what is staged; None for a transport without files."""
        return None

    def bring(self, clients: Sequence[EngineClient], version: int, *, base: int | None = None) -> bool:
        """Send the trainer's present weights, which are `version`, to these engines only.

        `base` is a version of this run that all of them have, if one is known. False where that cannot be done before
        the next update.
        """
        staged = written_or_failed(self._stage, version)
        try:
            self._run_async(named(self._swap(clients, staged, version), f"weight update {version} of {_urls(clients)}"))
        finally:
            self._retire(staged, version, arrived=False)
        return True

    def engines_changed(self) -> None:  # noqa: B027 (most transports know nothing about engines)
        """Some engine came, went or was started again since the last update."""

    def _follow_roster(self) -> None:
        """From here on this is about the engines that are there now."""
        present = list(self._roster)
        if present != self._clients:
            self.engines_changed()
            self._clients = present

    def _stage_whole(self, version: int) -> Staged:
        """Like `_stage`, for engines whose version nobody knows."""
        return self._stage(version)

    @abstractmethod
    def _stage(self, version: int) -> Staged:
        """Have the source write its weights where the engines can read them."""

    @abstractmethod
    async def _announce(self, client: EngineClient, staged: Staged, version: int) -> None:
        """Have one engine load what is staged."""

    @abstractmethod
    def _retire(self, staged: Staged, version: int, *, arrived: bool) -> None:
        """Remove what is no longer needed now that the update has `arrived` everywhere, or failed."""

    @abstractmethod
    def close(self) -> None:
        """Remove everything this publisher still holds. Safe to call again."""

    async def _transfer(self, clients: Sequence[EngineClient], staged: Staged, version: int) -> Sequence[EngineClient]:
        """Have the paused engines load what is staged; those that refused it and are to get whole weights."""
        await all_of(clients, lambda client: self._announce(client, self._seen_by(client, staged), version))
        return ()

    @asynccontextmanager
    async def _delivered(self, clients: Sequence[EngineClient], staged: Staged) -> AsyncIterator[None]:
        """While the body runs, what is staged is also where engines are that do not see this machine's files."""
        delivery, folder = self._settings.delivery, staged.folder
        if delivery is None or folder is None:
            yield
            return
        copies = await all_of(clients, lambda client: delivery.deliver(client, folder))
        self._copies = {client: copy for client, copy in zip(clients, copies, strict=True) if copy is not None}
        try:
            yield
        finally:
            copied, self._copies = self._copies, {}
            for client, copy in copied.items():
                await delivery.forget(client, copy)

    def _seen_by(self, client: EngineClient, staged: Staged) -> Staged:
        copy = self._copies.get(client)
        if copy is None:
            return staged
        return replace(staged, folder=copy, files=tuple(copy / path.name for path in staged.files))

    def _send_whole(self, refused: Sequence[EngineClient], version: int) -> Staged:
        """Bring engines that refused an update, and are still paused, to `version` all the same."""
        raise NotImplementedError(f"{type(self).__name__} has no refusals")

    async def _swap(self, clients: Sequence[EngineClient], staged: Staged, version: int) -> Swapped:
        async with self._delivered(clients, staged):
            return await self._swapped(clients, staged, version)

    async def _swapped(self, clients: Sequence[EngineClient], staged: Staged, version: int) -> Swapped:
        started = time.perf_counter()
        try:
            await all_of(clients, lambda client: client.pause(self._settings.pause_mode))
            refused = await self._transfer(clients, staged, version)
        except BaseException:
            await self._continue_whatever(clients)
            raise
        updated = [client for client in clients if client not in refused]
        await all_of(updated, lambda client: client.continue_())
        paused_seconds = time.perf_counter() - started
        found = await all_of(updated, lambda client: client.get_weight_version())
        require_version(updated, version, found)
        return Swapped(paused_seconds, refused)

    async def _continue_whatever(self, clients: Sequence[EngineClient]) -> None:
        limit_s = min(_CONTINUE_S, *(client.control_timeout_s for client in clients)) if clients else _CONTINUE_S
        await asyncio.gather(*(client.continue_(timeout_s=limit_s) for client in clients), return_exceptions=True)


def written_or_failed(stage: Callable[[int], Staged], version: int) -> Staged:
    """What `stage` writes; a file that could not be written ends the run with a sentence."""
    try:
        return stage(version)
    except OSError as cause:
        raise WeightsNotWritten(
            f"cannot write version {version} of the weights: {cause}; the engines keep the version they have"
        ) from cause


def tensor_bytes(tensor: dict[str, Any]) -> int:
    """The size of a tensor that is described by `dtype` and `shape`."""
    return prod(tensor["shape"]) * _ITEM_BYTES[tensor["dtype"]]


def require_version(clients: Sequence[EngineClient], version: int, found: Sequence[str]) -> None:
    """Refuse an update after which an engine names another version."""
    for client, engine_version in zip(clients, found, strict=True):
        if engine_version != str(version):
            raise WeightVersionMismatch(client.base_url, version, engine_version)


def _urls(clients: Sequence[EngineClient]) -> str:
    return " ".join(client.base_url for client in clients)


async def all_of(clients: Sequence[EngineClient], call: Callable[[EngineClient], Awaitable[T]]) -> list[T]:
    """Call all engines at once; the first error is raised after every call has ended."""
    results = await asyncio.gather(*(call(client) for client in clients), return_exceptions=True)
    values: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        values.append(result)
    return values


# What answers at the engines' addresses: it decides which calls an update may use.

EngineKind = Literal["embedded", "sglang"]
