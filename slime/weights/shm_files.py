"""Weights through shared memory: the trainer writes safetensors, engines on the same machine map them.

The embedded engine is told the files. SGLang takes tensors from other processes only as pickles, which are never sent
here; it is told a whole model folder in shared memory instead.

The invariant: the files live only from their writing to the end of the update; at most one version exists at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from slime.cluster.memory.staging import StagingFolder, remove_stale
from slime.engine.http.client import EngineClient
from slime.weights.broadcast import BroadcastPublisher, Buckets
from slime.weights.disk import DiskPublisher, VersionFolders, file_bytes
from slime.weights.publisher import RunAsync, Settings, Staged, WeightPublisher, WeightSource


class TensorPublisher(WeightPublisher):
    """Stages under `root` (shared memory, as a rule) and names the files to embedded engines."""

    def __init__(
        self,
        source: WeightSource,
        clients: Sequence[EngineClient],
        run_async: RunAsync,
        *,
        root: Path,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(source, clients, run_async, settings=settings)
        remove_stale(root)
        self._staging = StagingFolder(root, "weights")

    @property
    def staged_in(self) -> Path:
        return self._staging.path

    def _stage(self, version: int) -> Staged:
        folder = self._staging.subfolder(f"v{version:06d}")
        try:
            files = tuple(Path(path) for path in self._source.export_weights(folder, version))
            return Staged(file_bytes(files), folder, files)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def _announce(self, client: EngineClient, staged: Staged, version: int) -> None:
        await client.update_weights_from_tensor_files(
            staged.files, version, flush_cache=self._settings.flush_cache, timeout_s=self._settings.timeout_s
        )

    def _retire(self, staged: Staged, version: int, *, arrived: bool) -> None:
        assert staged.folder is not None
        shutil.rmtree(staged.folder, ignore_errors=True)

    def close(self) -> None:
        self._staging.close()


class FolderInMemoryPublisher(DiskPublisher):
    """The same for SGLang: a model folder under `root` that is gone after the update."""

    def __init__(
        self,
        source: WeightSource,
        clients: Sequence[EngineClient],
        run_async: RunAsync,
        *,
        root: Path,
        hf_checkpoint: Path,
        settings: Settings | None = None,
    ) -> None:
        remove_stale(root)
        self._staging = StagingFolder(root, "weights")
        super().__init__(source, clients, run_async, VersionFolders(self._staging.path, hf_checkpoint), settings)

    def _retire(self, staged: Staged, version: int, *, arrived: bool) -> None:
        assert staged.folder is not None
        shutil.rmtree(staged.folder, ignore_errors=True)

    def close(self) -> None:
        self._staging.close()


# A LoRA adapter instead of whole weights, for embedded engines: each merges it into the weights of its model folder.
#
# The invariant: an engine that took an adapter has the bytes that the trainers would have sent whole, whatever it had
# before; so one that was started again is sent the adapter like any other.

ADAPTER_NAME = "slime"


class AdapterDiskPublisher(DiskPublisher):
    """Names to the engines the folder of each version: an adapter as PEFT writes it."""

    def _stage(self, version: int) -> Staged:
        with self._version_folder(version) as unfinished:
            size = file_bytes(Path(path) for path in self._source.export_adapter(unfinished, version))
        return Staged(size, self._folder_of(version))

    async def _announce(self, client: EngineClient, staged: Staged, version: int) -> None:
        assert staged.folder is not None
        await client.load_lora_adapter(
            ADAPTER_NAME,
            staged.folder,
            version,
            flush_cache=self._settings.flush_cache,
            timeout_s=self._settings.timeout_s,
        )


class AdapterInMemoryPublisher(AdapterDiskPublisher, FolderInMemoryPublisher):
    """The same in shared memory; the folder is gone after the update."""


class AdapterBroadcastPublisher(BroadcastPublisher):
    """A and B through a process group; engines check each bucket before it is sent and merge with the last."""

    def _plan_buckets(self) -> Buckets:
        self._adapter, buckets = self._source.adapter_buckets()
        return buckets

    def _send(self, version: int) -> None:
        self._source.broadcast_adapter(version)

    async def _compare_shapes(self) -> None:
        """Nothing: no weight changes before the last bucket, so a shape that does not fit does no harm."""
