"""Weights through shared memory: the trainer writes safetensors buckets, engines on the same machine map them.

The invariant: the files live only from their writing to the end of the update; at most one version exists at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from slime.engine.client import EngineClient, PauseMode
from slime.weights.publisher import RunAsync, Staged, WeightPublisher, WeightSource
from slime.weights.staging import StagingFolder, remove_stale


class TensorPublisher(WeightPublisher):
    """Stages under `root` (shared memory, as a rule) and names the files to the engines."""

    def __init__(
        self,
        source: WeightSource,
        clients: Sequence[EngineClient],
        run_async: RunAsync,
        *,
        root: Path,
        timeout_s: float = 600.0,
        pause_mode: PauseMode = "abort",
    ) -> None:
        super().__init__(source, clients, run_async, timeout_s=timeout_s, pause_mode=pause_mode)
        remove_stale(root)
        self._staging = StagingFolder(root)

    def _stage(self, version: int) -> Staged:
        folder = self._staging.subfolder(f"v{version:06d}")
        try:
            return Staged(folder, tuple(Path(path) for path in self._source.export_weights(folder, version)))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def _announce(self, client: EngineClient, staged: Staged, version: int) -> None:
        await client.update_weights_from_tensor_files(staged.files, version, timeout_s=self._timeout_s)

    def _retire(self, staged: Staged, version: int, *, arrived: bool) -> None:
        shutil.rmtree(staged.folder, ignore_errors=True)

    def close(self) -> None:
        self._staging.close()
