"""A LoRA adapter instead of whole weights, for embedded engines: each merges it into the weights of its model folder.

The invariant: an engine that took an adapter has the bytes that the trainers would have sent whole, whatever it had
before; so one that was started again is sent the adapter like any other.
"""

from __future__ import annotations

from pathlib import Path

from slime.engine.http.client import EngineClient
from slime.weights.broadcast import BroadcastPublisher, Buckets
from slime.weights.disk import DiskPublisher, file_bytes
from slime.weights.publisher import Staged
from slime.weights.tensor import FolderInMemoryPublisher

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
