"""Weights that stay on the GPU: embedded engines open the trainer's memory by its handle and copy from it.

The invariant: one bucket is in that memory at a time. The handle is 64 bytes in JSON, and nothing is unpickled. Where a
handle cannot be had or opened (engines on other GPUs or in other containers, say), nothing has changed yet: this update
and all later ones go through files instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

from slime.engine.http.client import EngineClient, EngineRejected
from slime.weights.publisher import PublishResult, RunAsync, Settings, Staged, WeightPublisher, WeightSource, all_of

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1}

logger = logging.getLogger(__name__)


class NotShared(Exception):
    """The first bucket could not be shared; the engines are as they were."""


class DeviceHandlePublisher(WeightPublisher):
    """`through_files` makes what takes over where handles do not work."""

    def __init__(
        self,
        source: WeightSource,
        clients: Sequence[EngineClient],
        run_async: RunAsync,
        *,
        through_files: Callable[[], WeightPublisher],
        settings: Settings | None = None,
    ) -> None:
        super().__init__(source, clients, run_async, settings=settings)
        self._through_files = through_files
        self._files: WeightPublisher | None = None
        self._is_refused = False
        self._buckets: Sequence[Sequence[dict[str, Any]]] = ()

    def publish(self, version: int) -> PublishResult:
        if not self._is_refused:
            try:
                return super().publish(version)
            except NotShared as reason:
                logger.warning("weights go through shared memory instead of by device handle: %s", reason)
                self._is_refused = True
        return self._by_files().publish(version)

    @property
    def staged_in(self) -> Path | None:
        return self._by_files().staged_in

    def bring(self, clients: Sequence[EngineClient], version: int, *, base: int | None = None) -> bool:
        """Through files: the trainers are asleep perhaps, and are woken once for it."""
        return self._by_files().bring(clients, version, base=base)

    def engines_changed(self) -> None:
        if self._files is not None:
            self._files.engines_changed()

    def close(self) -> None:
        if self._files is not None:
            self._files.close()

    def _by_files(self) -> WeightPublisher:
        if self._files is None:
            self._files = self._through_files()
        return self._files

    def _stage(self, version: int) -> Staged:
        if not self._buckets:
            self._buckets = self._source.weight_buckets()
        return Staged(sum(prod(one["shape"]) * _ITEM_BYTES[one["dtype"]] for each in self._buckets for one in each))

    async def _transfer(self, clients: Sequence[EngineClient], staged: Staged, version: int) -> Sequence[EngineClient]:
        try:
            for number in range(1, len(self._buckets) + 1):
                await self._send(clients, number, version)
        finally:
            await asyncio.to_thread(self._source.stop_sharing)
        return ()

    async def _send(self, clients: Sequence[EngineClient], number: int, version: int) -> None:
        shared = await asyncio.to_thread(self._source.share_bucket, number, version)
        if "refused" in shared:
            raise NotShared(f"the trainer has no handle to give: {shared['refused']}")
        count, limit_s = len(self._buckets), self._settings.timeout_s
        flush = self._settings.flush_cache and number == count
        try:
            await all_of(
                clients,
                lambda client: client.update_weights_from_handle(
                    shared["handle"],
                    self._buckets[number - 1],
                    version,
                    bucket=(number, count),
                    flush_cache=flush,
                    timeout_s=limit_s,
                ),
            )
        except EngineRejected as refused:
            if number > 1:
                raise
            raise NotShared(str(refused)) from refused

    async def _announce(self, client: EngineClient, staged: Staged, version: int) -> None:
        raise NotImplementedError("buckets go to all engines together")

    def _retire(self, staged: Staged, version: int, *, arrived: bool) -> None:
        pass
