"""Publishes only the bytes that changed: a version folder with a delta to the previous version (`slime.models.delta`).

`LocalCheckpoint` is a model folder to which deltas are applied in place, for engines that can only load whole folders.

Invariant: an engine that applied a delta has exactly the trainer's bytes; an engine that rejected it gets the whole
weights in the same update. The first update, and those after a resume or a failure, are whole.
Invariant: `.weight_sync/state.json` names the version of the local folder only while all its bytes are that version's.
It says `applying` from before the first byte changes until the last one is synced to disk, so a folder from an
interrupted update is recognised and rebuilt from a whole version. `.weight_sync/files.json` lists the files that
updates wrote; only these are ever removed.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from slime.config.paths import LOCAL_FILES
from slime.engine.http.client import EngineClient, EngineRejected
from slime.errors import RunFailed
from slime.models.delta.folder import BadDelta, DeltaPart, join_parts, read_index
from slime.storage.files import MANIFEST, fsync_path
from slime.weights.folder import FolderPublisher, VersionFolders, file_bytes
from slime.weights.publisher import PublisherSettings, StagedVersion

logger = logging.getLogger(__name__)

_FILES = LOCAL_FILES
_SYNC = Path(LOCAL_FILES).parts[0]
_STATE = f"{_SYNC}/state.json"


class LocalCheckpointBroken(RunFailed):
    """The delta cannot be applied to the folder: wrong version, damaged files, or an interrupted earlier delta."""


class LocalCheckpoint:
    """Model folder with a state file and a lock; only one process changes it at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    @property
    def version(self) -> int | None:
        """Version of the whole folder; None if its bytes are not of one version."""
        try:
            state = json.loads((self.folder / _STATE).read_text())
            return int(state["version"]) if state["status"] == "clean" else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def rebuild(self, whole: Path, version: int) -> None:
        """Replace its content by a copy of the version folder `whole`."""
        files = sorted(path.name for path in whole.iterdir() if path.is_file() and path.name != MANIFEST)
        with self._locked():
            try:
                listed = json.loads((self.folder / _FILES).read_text())
            except (OSError, ValueError):
                listed = []
            old = [name for name in listed if Path(name).name == name]
            foreign = sorted(path.name for path in self.folder.iterdir() if path.name not in {_SYNC, *old})
            if foreign:
                raise RunFailed(
                    f"{self.folder} has {foreign[0]}, which no weight update put there: give "
                    "--update-weight-local-checkpoint-dir an empty folder"
                )
            self._write(_FILES, sorted({*old, *files}))
            self._note(version, "applying")
            for name in old:
                (self.folder / name).unlink(missing_ok=True)
            for name in files:
                shutil.copy2(whole / name, self.folder / name)
                if name.endswith(".safetensors"):
                    fsync_path(self.folder / name)
            self._write(_FILES, files)
            self._note(version, "clean")

    def apply(self, delta: Path) -> None:
        """Apply the delta of a version folder."""
        from slime.models.delta.apply import apply_to_files  # zstandard and xxhash: for deltas alone

        try:
            index = read_index(delta)
            if index is None:
                raise BadDelta(f"{delta} holds no delta")
            index.require_base(self.version, delta=delta, owner="the folder")
            with self._locked():
                self._note(index.version, "applying")
                apply_to_files(self.folder, delta, index)
                self._note(index.version, "clean")
        except (OSError, ValueError) as cause:
            raise LocalCheckpointBroken(f"{self.folder} cannot take a delta: {cause}") from cause

    def _note(self, version: int, status: str) -> None:
        self._write(_STATE, {"version": f"{version:06d}", "status": status})

    def _write(self, name: str, content: object) -> None:
        path = self.folder / name
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(content))
        fsync_path(fresh)
        os.replace(fresh, path)
        fsync_path(path.parent)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        (self.folder / _SYNC).mkdir(parents=True, exist_ok=True)
        with (self.folder / _SYNC / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class DeltaPublisher(FolderPublisher):
    """Writes deltas to folders, and makes embedded engines apply them to their weights.

    With `local` they are applied to that model folder on the engines' machine, while the engines generate; SGLang loads
    it like any other folder.
    """

    def __init__(
        self,
        settings: PublisherSettings,
        folders: VersionFolders,
        *,
        encoding: str,
        checksum: str,
        local: Path | None = None,
    ) -> None:
        super().__init__(settings, folders)
        self._encoding = encoding
        self._checksum = checksum
        self._local = None if local is None else LocalCheckpoint(local)
        self._base: int | None = None
        self._total_bytes = 0

    def bring(self, clients: Sequence[EngineClient], version: int, *, base: int | None = None) -> bool:
        """Send the last delta again to engines that have its base version, else the whole weights.

        The trainers' next delta is based on the whole weights that they wrote last, so the next update is a delta only
        if all other engines have this version too.
        """
        if base is not None:
            folder = self._folder_of(version)
            try:
                index = read_index(folder) if folder.is_dir() else None
            except BadDelta:
                index = None
            if index is not None and index.base_version == base:
                staged = StagedVersion(file_bytes(folder.glob("*.safetensors")), folder, density=0.0)
                _, refused = self._swap(clients, staged, version)
                if not refused:
                    return True
        published, self._base = self._base, None
        brought = super().bring(clients, version)
        self._base = version if published == version else None
        return brought

    def _stage(self, version: int, *, whole: bool) -> StagedVersion:
        base, self._base = self._base, None  # until this one has arrived
        if whole or base is None:
            staged = super()._stage(version, whole=True)
            self._total_bytes = staged.bytes
            if self._local is not None:
                self._local.rebuild(self._folder_of(version), version)
            return staged
        with self._version_folder(version) as unfinished:
            written = self._source.call("export_delta", out_dir=str(unfinished), version=version, base_version=base)
            parts = [DeltaPart(**part) for part in written]
            facts = {"encoding": self._encoding, "checksum": self._checksum}
            size = file_bytes(join_parts(unfinished, parts, version=version, base_version=base, **facts))
        density = sum(part.changed_bytes for part in parts) / self._total_bytes
        staged = StagedVersion(size, self._folder_of(version), density=density)
        if self._local is None:
            return staged
        try:
            self._local.apply(self._folder_of(version))
        except LocalCheckpointBroken as cause:
            logger.warning("%s; rebuilding it from the whole weights of version %d", cause, version)
            rebuilt = self._stage(version, whole=True)
            return replace(staged, bytes=size + rebuilt.bytes, full_fallbacks=1)
        return staged

    async def _announce(self, client: EngineClient, staged: StagedVersion, version: int) -> None:
        folder = staged.folder if self._local is None else self._local.folder
        await super()._announce(client, replace(staged, folder=folder), version)

    async def _transfer(
        self, clients: Sequence[EngineClient], staged: StagedVersion, version: int
    ) -> Sequence[EngineClient]:
        if staged.density is None or self._local is not None:
            return await super()._transfer(clients, staged, version)
        calls = [self._announce(client, self._seen_by(client, staged), version) for client in clients]
        refused = []
        results = await asyncio.gather(*calls, return_exceptions=True)
        for client, result in zip(clients, results, strict=True):
            if isinstance(result, EngineRejected):
                logger.warning("%s; sending the whole weights of version %d", result, version)
                refused.append(client)
            elif isinstance(result, BaseException):
                raise result
        return refused

    def _retire(self, staged: StagedVersion, version: int, *, arrived: bool) -> None:
        if arrived:
            self._base = version
        super()._retire(staged, version, arrived=arrived)
