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
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from slime.cluster.memory.staging import SHARED_MEMORY, StagingFolder, choose_root
from slime.cluster.watchdog import named
from slime.engine.http.client import EngineClient, EngineRejected, call_all
from slime.storage.json_types import JsonObject
from slime.weights.publisher import (
    PublisherSettings,
    PublishResult,
    WeightPublisher,
    paused,
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

    def publish(self, version: int) -> PublishResult:
        settings, source = self._settings, self._source
        while self._ways:
            started, clients, region = time.perf_counter(), list(settings.clients), None
            try:
                if self._ways[0] == HOST:
                    if self._staging is None:
                        root, why = choose_root(self._largest_bytes)
                        if root != SHARED_MEMORY:
                            raise MemoryNotShared(why)
                        self._staging = StagingFolder(root, "weights")
                    region = str(self._staging.path / "region")
                first = source.call("share_bucket", number=1, version=version, region=region)[0]
                if "refused" in first:
                    raise MemoryNotShared(f"the trainer cannot share memory: {first['refused']}")
                written = time.perf_counter() - started
                try:
                    update = self._update(clients, first, version, region)
                    paused_seconds = settings.run_async(named(update, f"weight update {version}"))
                finally:
                    source.call("stop_sharing")
            except MemoryNotShared as reason:
                way, *self._ways = self._ways
                instead = self._ways[0] if self._ways else "files in shared memory"
                logger.warning("weights go through %s instead of %s: %s", instead, way, reason)
                continue
            if settings.check is not None:
                settings.check(version)
            seconds = time.perf_counter() - started
            return PublishResult(version, seconds, paused_seconds, total_bytes(first["buckets"]), written)
        return self._by_files().publish(version)

    async def _update(
        self, clients: Sequence[EngineClient], shared: JsonObject, version: int, region: str | None
    ) -> float:
        """Make the engines copy all buckets, and check their version; return the seconds for which they were paused.

        An only bucket is in the memory already, and each engine pauses by itself for its own copy of it.
        """
        settings, buckets, began = self._settings, shared["buckets"], time.perf_counter()
        count = len(buckets)
        async with AsyncExitStack() as stack:
            if count > 1:
                await stack.enter_async_context(paused(clients, settings.pause_mode))
            for number, tensors in enumerate(buckets, start=1):
                if number > 1:
                    sharing = partial(self._source.call, number=number, version=version, region=region)
                    shared = (await asyncio.to_thread(sharing, "share_bucket"))[0]
                copy = partial(
                    EngineClient.update_weights_from_handle,
                    memory=shared["memory"],
                    tensors=tensors,
                    version=version,
                    bucket=(number, count),
                    pause_mode=settings.pause_mode if count == 1 else None,
                    flush_cache=settings.flush_cache and number == count,
                    timeout_s=settings.timeout_s,
                )
                try:
                    answers = await call_all(clients, copy)
                except EngineRejected as refused:
                    if number > 1:
                        raise
                    raise MemoryNotShared(str(refused)) from refused
        require_version(clients, version, [str(answer["weight_version"]) for answer in answers])
        if count > 1:
            return time.perf_counter() - began
        return max((float(answer["seconds"]) for answer in answers), default=0.0)

    @property
    def staged_in(self) -> Path | None:
        return self._by_files().staged_in

    def bring(self, clients: Sequence[EngineClient], version: int, *, base: int | None = None) -> bool:
        """Send the weights through files; offloaded trainers are then loaded only once."""
        return self._by_files().bring(clients, version, base=base)

    def close(self) -> None:
        if self._staging is not None:
            self._staging.close()
        if self._files is not None:
            self._files.close()

    def _by_files(self) -> WeightPublisher:
        if self._files is None:
            self._files = self._through_files()
        return self._files
