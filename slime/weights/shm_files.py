"""Publishes weights through shared memory: the trainer writes safetensors, and engines on the same machine map them.

The embedded engine gets the paths of the files. SGLang accepts tensors from other processes only as pickles, which are
never sent here, so it gets a whole model folder in shared memory. A LoRA adapter can be sent instead of whole weights
to embedded engines; each merges it into the weights of its model folder.

Invariant: the files exist only until the end of the update, and at most one version exists at a time.
Invariant: an engine that merged an adapter has the bytes that the trainers would have sent as whole weights, regardless
of its earlier weights; a restarted engine gets the adapter like any other.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from slime.cluster.memory.staging import StagingFolder, remove_stale
from slime.engine.http.client import EngineClient
from slime.weights.broadcast import BroadcastPublisher
from slime.weights.disk import DiskPublisher, VersionFolders, export_weights, file_bytes
from slime.weights.publisher import (
    Buckets,
    PublisherSettings,
    RunOnClientLoop,
    StagedVersion,
    WeightPublisher,
    WeightSource,
)


class TensorPublisher(WeightPublisher):
    """Stages files under `root` (usually shared memory), and makes embedded engines load them."""

    def __init__(
        self,
        source: WeightSource,
        clients: Sequence[EngineClient],
        run_async: RunOnClientLoop,
        *,
        root: Path,
        settings: PublisherSettings | None = None,
    ) -> None:
        super().__init__(source, clients, run_async, settings=settings)
        remove_stale(root)
        self._staging = StagingFolder(root, "weights")

    @property
    def staged_in(self) -> Path:
        return self._staging.path

    def _stage(self, version: int) -> StagedVersion:
        folder = self._staging.subfolder(f"v{version:06d}")
        try:
            files = export_weights(self._source, folder, version)
            return StagedVersion(file_bytes(files), folder, files)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def _announce(self, client: EngineClient, staged: StagedVersion, version: int) -> None:
        await client.update_weights_from_tensor_files(
            staged.files, version, flush_cache=self._settings.flush_cache, timeout_s=self._settings.timeout_s
        )

    def _retire(self, staged: StagedVersion, version: int, *, arrived: bool) -> None:
        assert staged.folder is not None
        shutil.rmtree(staged.folder, ignore_errors=True)

    def close(self) -> None:
        self._staging.close()


class FolderInMemoryPublisher(DiskPublisher):
    """Stages a model folder for SGLang under `root`, and removes it after the update."""

    def __init__(
        self,
        source: WeightSource,
        clients: Sequence[EngineClient],
        run_async: RunOnClientLoop,
        *,
        root: Path,
        hf_checkpoint: Path,
        settings: PublisherSettings | None = None,
    ) -> None:
        remove_stale(root)
        self._staging = StagingFolder(root, "weights")
        super().__init__(source, clients, run_async, VersionFolders(self._staging.path, hf_checkpoint), settings)

    def _retire(self, staged: StagedVersion, version: int, *, arrived: bool) -> None:
        assert staged.folder is not None
        shutil.rmtree(staged.folder, ignore_errors=True)

    def close(self) -> None:
        self._staging.close()


ADAPTER_NAME = "slime"


class AdapterDiskPublisher(DiskPublisher):
    """Writes an adapter in PEFT's format to the folder of each version, and makes the engines load it."""

    def _stage(self, version: int) -> StagedVersion:
        with self._version_folder(version) as unfinished:
            written = self._source.call("export_adapter", out_dir=str(unfinished), version=version)
            size = file_bytes(Path(path) for path in written[0])
        return StagedVersion(size, self._folder_of(version))

    async def _announce(self, client: EngineClient, staged: StagedVersion, version: int) -> None:
        assert staged.folder is not None
        await client.load_lora_adapter(
            ADAPTER_NAME,
            staged.folder,
            version,
            flush_cache=self._settings.flush_cache,
            timeout_s=self._settings.timeout_s,
        )


class AdapterInMemoryPublisher(AdapterDiskPublisher, FolderInMemoryPublisher):
    """Stages the adapter in shared memory, and removes its folder after the update."""


class AdapterBroadcastPublisher(BroadcastPublisher):
    """Broadcasts A and B of an adapter; engines check each bucket before it is sent, and merge at the last one."""

    def _plan_buckets(self) -> Buckets:
        self._adapter, buckets = self._source.call("adapter_buckets")[0]
        return buckets

    def _send(self, version: int) -> None:
        self._source.call("broadcast_adapter", version=version)

    async def _compare_shapes(self) -> None:
        """Do nothing: no weight changes before the last bucket, so a wrong shape does no damage."""
