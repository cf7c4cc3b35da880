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
