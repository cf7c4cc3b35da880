"""Publishes weights through memory that the trainer and the engines of one machine share.

This is device memory if they are on one GPU, or if one GPU can access the memory of the other, else a pinned region of
the host.

Invariant: engines get the location of the memory as a CUDA handle or a path, in JSON; nothing is unpickled. Weights
that fit are exported before the first request to an engine, and each engine is paused only for its own copy. Weights
that do not fit are sent in buckets while all engines are paused. If a kind of memory cannot be allocated or opened (in
other containers, for example), no engine has changed yet: this update and all later ones use the next way, and finally
files.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from slime.cluster.memory.staging import SHARED_MEMORY, StagingFolder, choose_root
from slime.engine.http.client import EngineClient, EngineRejected
from slime.storage.json_types import JsonObject
from slime.weights.publisher import (
    Buckets,
    PublisherSettings,
    PublishResult,
    StagedVersion,
    Swapped,
    WeightPublisher,
    call_all,
    require_version,
    total_bytes,
)

DEVICE, HOST = "device memory", "a pinned region"

logger = logging.getLogger(__name__)


class MemoryNotShared(Exception):
    """The first bucket could not be shared; the engines are unchanged."""


class SharedMemoryPublisher(WeightPublisher):
    """Publishes through shared memory; tries `ways` in order, and falls back to the publisher of `through_files`.

    A region of the host has at most `largest_bytes`.
    """

    def __init__(
        self,
        settings: PublisherSettings,
        *,
        through_files: Callable[[], WeightPublisher],
        largest_bytes: int,
        ways: Sequence[str] = (DEVICE, HOST),
    ) -> None:
        super().__init__(settings)
        self._through_files = through_files
        self._largest_bytes = largest_bytes
        self._ways = list(ways)
        self._files: WeightPublisher | None = None
        self._staging: StagingFolder | None = None
        self._region: str | None = None
        self._buckets: Buckets = ()
        self._first: JsonObject = {}

    def publish(self, version: int) -> PublishResult:
        while self._ways:
            try:
                return super().publish(version)
            except MemoryNotShared as reason:
                way, *self._ways = self._ways
                instead = self._ways[0] if self._ways else "files in shared memory"
                logger.warning("weights go through %s instead of %s: %s", instead, way, reason)
        return self._by_files().publish(version)

    @property
    def staged_in(self) -> Path | None:
        return self._by_files().staged_in

    def bring(self, clients: Sequence[EngineClient], version: int, *, base: int | None = None) -> bool:
        """Send the weights through files; offloaded trainers are then loaded only once."""
        return self._by_files().bring(clients, version, base=base)

    def engines_changed(self) -> None:
        if self._files is not None:
            self._files.engines_changed()

    def close(self) -> None:
        if self._staging is not None:
            self._staging.close()
        if self._files is not None:
            self._files.close()

    def _by_files(self) -> WeightPublisher:
        if self._files is None:
            self._files = self._through_files()
        return self._files

    def _stage(self, version: int, *, whole: bool) -> StagedVersion:
        self._region = None
        if self._ways[0] == HOST:
            if self._staging is None:
                root, why = choose_root(self._largest_bytes)
                if root != SHARED_MEMORY:
                    raise MemoryNotShared(why)
                self._staging = StagingFolder(root, "weights")
            self._region = str(self._staging.path / "region")
        self._first = self._source.call("share_bucket", number=1, version=version, region=self._region)[0]
        if "refused" in self._first:
            raise MemoryNotShared(f"the trainer cannot share memory: {self._first['refused']}")
        self._buckets = self._first["buckets"]
        return StagedVersion(total_bytes(self._buckets))

    async def _pause_and_load(self, clients: Sequence[EngineClient], staged: StagedVersion, version: int) -> Swapped:
        if len(self._buckets) > 1:
            return await super()._pause_and_load(clients, staged, version)
        answers = await self._send(clients, 1, self._first, version)
        require_version(clients, version, [str(answer["weight_version"]) for answer in answers])
        return max((answer["seconds"] for answer in answers), default=0.0), ()

    async def _transfer(
        self, clients: Sequence[EngineClient], staged: StagedVersion, version: int
    ) -> Sequence[EngineClient]:
        await self._send(clients, 1, self._first, version)
        for number in range(2, len(self._buckets) + 1):
            shared = await asyncio.to_thread(
                self._source.call, "share_bucket", number=number, version=version, region=self._region
            )
            await self._send(clients, number, shared[0], version)
        return ()

    async def _send(
        self, clients: Sequence[EngineClient], number: int, shared: JsonObject, version: int
    ) -> list[JsonObject]:
        """Make all engines copy a bucket; if it is the only one, each engine pauses by itself."""
        count, settings = len(self._buckets), self._settings
        try:
            return await call_all(
                clients,
                lambda client: client.update_weights_from_handle(
                    shared["memory"],
                    self._buckets[number - 1],
                    version,
                    bucket=(number, count),
                    pause_mode=settings.pause_mode if count == 1 else None,
                    flush_cache=settings.flush_cache and number == count,
                    timeout_s=settings.timeout_s,
                ),
            )
        except EngineRejected as refused:
            if number > 1:
                raise
            raise MemoryNotShared(str(refused)) from refused

    def _retire(self, staged: StagedVersion, version: int, *, arrived: bool) -> None:
        self._source.call("stop_sharing")
