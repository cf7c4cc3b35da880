"""Only the bytes that changed: a version folder with a delta to the version before (`slime.models.delta`).

The invariant: an engine that applied a delta has exactly the trainer's bytes, or it said no and gets the whole weights
in the same update. The first update, the one after a resume, and the one after a failure are whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slime.cluster.watchdog import named
from slime.engine.http.client import EngineClient, EngineRejected
from slime.models.delta.folder import BadDelta, DeltaPart, join_parts, read_index
from slime.weights.disk import DiskPublisher, VersionFolders, file_bytes
from slime.weights.local_checkpoint import LocalCheckpoint, LocalCheckpointBroken
from slime.weights.publisher import RunAsync, Settings, Staged, WeightSource, written_or_failed

logger = logging.getLogger(__name__)


class DeltaPublisher(DiskPublisher):
    """Names the folder of a delta to embedded engines, which apply it to the weights they have."""

    def __init__(
        self,
        source: WeightSource,
        clients: Sequence[EngineClient],
        run_async: RunAsync,
        folders: VersionFolders,
        settings: Settings | None = None,
        *,
        encoding: str,
        checksum: str,
    ) -> None:
        super().__init__(source, clients, run_async, folders, settings)
        self._encoding = encoding
        self._checksum = checksum
        self._base: int | None = None
        self._total_bytes = 0

    def bring(self, clients: Sequence[EngineClient], version: int, *, base: int | None = None) -> bool:
        """The last delta, for engines that have what it is based on; else whole weights. These the trainers remember,
        so the next update is a delta only if all others have them too."""
        if base is not None and self._bring_last(clients, version, base):
            return True
        published, self._base = self._base, None
        brought = super().bring(clients, version)
        self._base = version if published == version else None
        return brought

    def _bring_last(self, clients: Sequence[EngineClient], version: int, base: int) -> bool:
        """Send what was sent last once more; whether all of them could apply it."""
        folder = self._folder_of(version)
        try:
            index = read_index(folder) if folder.is_dir() else None
        except BadDelta:
            return False
        if index is None or index.base_version != base:
            return False
        staged = Staged(file_bytes(folder.glob("*.safetensors")), folder, density=0.0)
        swap = self._swap(clients, staged, version)
        return not self._run_async(named(swap, f"delta {version} for engines that came back")).refused

    def _stage(self, version: int) -> Staged:
        base, self._base = self._base, None  # until this one has arrived
        if base is None:
            return self._stage_whole(version)
        with self._version_folder(version) as unfinished:
            parts = [DeltaPart(**part) for part in self._source.export_delta(unfinished, version, base)]
            files = join_parts(
                unfinished,
                parts,
                version=version,
                base_version=base,
                encoding=self._encoding,
                checksum=self._checksum,
            )
            size = file_bytes(files)
        density = sum(part.changed_bytes for part in parts) / self._total_bytes
        return Staged(size, self._folder_of(version), density=density)

    def _stage_whole(self, version: int) -> Staged:
        staged = super()._stage(version)
        self._total_bytes = staged.bytes
        return staged

    async def _transfer(self, clients: Sequence[EngineClient], staged: Staged, version: int) -> Sequence[EngineClient]:
        if staged.density is None:
            return await super()._transfer(clients, staged, version)
        calls = [self._announce(client, self._seen_by(client, staged), version) for client in clients]
        refused = []
        results = await asyncio.gather(*calls, return_exceptions=True)
        for client, result in zip(clients, results, strict=True):
            if isinstance(result, EngineRejected):
                logger.warning("%s; it gets the whole weights of version %d", result, version)
                refused.append(client)
            elif isinstance(result, BaseException):
                raise result
        return refused

    def _send_whole(self, refused: Sequence[EngineClient], version: int) -> Staged:
        try:
            staged = written_or_failed(self._stage_whole, version)
        except BaseException:
            self._run_async(named(self._continue_whatever(refused), f"end of weight update {version}"))
            raise
        self._run_async(named(self._swap(refused, staged, version), f"whole weight update {version}"))
        return staged

    def _retire(self, staged: Staged, version: int, *, arrived: bool) -> None:
        if arrived:
            self._base = version
        super()._retire(staged, version, arrived=arrived)


class LocalDeltaPublisher(DeltaPublisher):
    """Applies deltas to a model folder on the engines' machine, for SGLang, which reads it as any other.

    The engines are not paused while that happens.
    """

    def __init__(
        self,
        source: WeightSource,
        clients: Sequence[EngineClient],
        run_async: RunAsync,
        folders: VersionFolders,
        settings: Settings | None = None,
        *,
        encoding: str,
        checksum: str,
        local: Path,
    ) -> None:
        super().__init__(source, clients, run_async, folders, settings, encoding=encoding, checksum=checksum)
        self._local = LocalCheckpoint(local)

    def _stage(self, version: int) -> Staged:
        staged = super()._stage(version)
        assert staged.folder is not None
        if staged.density is None:
            self._local.rebuild(staged.folder, version)
            return staged
        try:
            self._local.apply(staged.folder)
        except LocalCheckpointBroken as cause:
            logger.warning("%s; it is made again from the whole weights of version %d", cause, version)
            whole = self._stage_whole(version)
            assert whole.folder is not None
            self._local.rebuild(whole.folder, version)
            return replace(staged, bytes=staged.bytes + whole.bytes, full_fallbacks=1)
        return staged

    async def _announce(self, client: EngineClient, staged: Staged, version: int) -> None:
        await super()._announce(client, replace(staged, folder=self._local.folder), version)

    async def _transfer(self, clients: Sequence[EngineClient], staged: Staged, version: int) -> Sequence[EngineClient]:
        return await super()._transfer(clients, replace(staged, density=None), version)
