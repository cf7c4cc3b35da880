"""The trainer side of a weight update: files, deltas, broadcasts, checksums.

Invariant: the announced buckets are the ones that are sent, and every tensor is sent in the rollout's dtype. All ranks
call each method together. Each rank makes files, deltas and checksums of the tensors it owns; only rank 0 broadcasts to
the engines. The LoRA adapter is exported as PEFT files or through the engines' process group: A and B are sent whole
and in float32, as they are trained, with everything that an engine needs to compute the merged weights from its own
weights; rank 0 writes and sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from slime.cluster.process_group import join_process_group, leave_process_group
from slime.config import Config
from slime.models.delta.folder import delta_checksum
from slime.models.peft_adapter import write_adapter
from slime.storage.json_types import JsonObject
from slime.train.backend import NamedTensor, TrainBackend, TrainedAdapter
from slime.train.backends.hf_buckets import plan_bucket_ranges
from slime.train.checkpoints.errors import write_together
from slime.train.weight_export.files import export_weights
from slime.train.weight_export.ipc import SENDER_RANKS, SharedWeights, tensor_layouts

if TYPE_CHECKING:
    from slime.train.weight_export.delta import PublishedWeights

Layout = list[JsonObject]


def trained_adapter(backend: TrainBackend) -> TrainedAdapter:
    """Return the adapter of a run that trains one."""
    if backend.adapter is None:
        raise RuntimeError("--lora-rank: the run trains no adapter, so none can be exported")
    return backend.adapter


def export_adapter(backend: TrainBackend, folder: Path, *, version: int) -> list[Path]:
    """Write the adapter's files; rank 0 returns their paths."""
    info, paths = trained_adapter(backend), list[Path]()

    def write(tensors: Iterator[NamedTensor]) -> None:
        base, targets = str(info.base), info.peft_targets
        paths.extend(
            write_adapter(folder, dict(tensors), info.facts, base_model=base, target_modules=targets, sync=False)
        )

    tensors = backend.progress.over(backend.full_adapter(), "writing the adapter: tensor")
    world, what = backend.topology.world, f"version {version} of the adapter to {folder}"
    write_together(world, tensors, write if world.rank == 0 else None, what)
    return paths


def adapter_layout(backend: TrainBackend) -> Layout:
    """Return name, dtype and shape of each tensor that `send_adapter` sends, in its order."""
    return [
        {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in backend.full_adapter()
    ]


def send_adapter(backend: TrainBackend, group: dist.ProcessGroup | None, *, buffer_size: int) -> None:
    """Broadcast every tensor from rank 0 to `group`; about `buffer_size` bytes are in flight at most."""
    sent: list[torch.Tensor] = []
    works: list[dist.Work | None] = []
    filled = 0
    for _, tensor in backend.progress.over(backend.full_adapter(), "sending the adapter: tensor"):
        if group is None:
            continue
        sent.append(tensor.detach().contiguous())
        works.append(dist.broadcast(sent[-1], src=0, group=group, async_op=True))
        filled += sent[-1].nbytes
        if filled >= buffer_size:
            _wait_all(works)
            sent, works, filled = [], [], 0
    _wait_all(works)
    if backend.topology.world.device.type == "cuda":
        torch.cuda.synchronize(backend.topology.world.device)


def _wait_all(works: list[dist.Work | None]) -> None:
    """Wait for broadcasts."""
    for work in works:
        assert work is not None
        work.wait()


class WeightSender:
    """State kept between updates: the last published bytes (in delta mode), and the group with the engines."""

    def __init__(self, config: Config, *, dtype: torch.dtype, device: str) -> None:
        self._dtype = dtype
        self._buffer_size = config.update_weight_buffer_size
        self._encoding = config.update_weight_delta_encoding
        self._checksum = delta_checksum(config.update_weight_delta_checksum, device)
        self._group: dist.ProcessGroup | None = None
        self.shared = SharedWeights(dtype=dtype, buffer_size=config.update_weight_buffer_size)
        self.published: PublishedWeights | None = None
        if config.update_weight_mode == "delta":
            from slime.train.weight_export.delta import PublishedWeights  # imports zstandard and xxhash

            self.published = PublishedWeights()

    def export(self, backend: TrainBackend, folder: Path, *, version: int) -> list[Path]:
        """Write this rank's files of whole weights."""
        published = self.published
        if published is not None:
            published.forget_version()
        paths = export_weights(
            backend,
            folder,
            version=version,
            dtype=self._dtype,
            buffer_size=self._buffer_size,
            keep=None if published is None else published.keep,
            earlier=published,
        )
        if published is not None:
            published.version = version
        return paths

    def export_delta(self, backend: TrainBackend, folder: Path, *, version: int, base_version: int) -> JsonObject:
        """Write this rank's share of the delta from `base_version` to `version`."""
        if self.published is None:
            raise RuntimeError("--update-weight-mode: a delta needs the mode delta")
        from slime.train.weight_export.delta import DeltaExporter

        exporter = DeltaExporter(
            self.published,
            dtype=self._dtype,
            encoding=self._encoding,
            checksum=self._checksum,
            buffer_size=self._buffer_size,
        )
        return exporter.export(backend, folder, version=version, base_version=base_version).to_dict()

    def buckets(self, backend: TrainBackend) -> list[list[JsonObject]]:
        """Describe the buckets that `broadcast` sends."""
        return [
            tensor_layouts(bucket) for bucket in backend.hf_plan(self._dtype, self._buffer_size, owners=SENDER_RANKS)
        ]

    def join(self, *, address: str, port: int, world_size: int, name: str, backend: str, timeout_s: float) -> None:
        """Join a process group with all engines as rank 0, and wait for them."""
        self.leave()
        self._group = join_process_group(
            address=address, port=port, rank=0, world_size=world_size, name=name, backend=backend, timeout_s=timeout_s
        )

    def broadcast(self, backend: TrainBackend) -> None:
        """Send all tensors to the engines, bucket by bucket; a failure closes the group, so that engines don't hang."""
        try:
            count = len(backend.hf_plan(self._dtype, self._buffer_size, owners=SENDER_RANKS))
            buckets = backend.hf_buckets(self._dtype, self._buffer_size, owners=SENDER_RANKS)
            for bucket in backend.progress.over(buckets, "sending weights: bucket", count):
                if self._group is None or bucket.tensors is None:
                    continue
                sent = [tensor.contiguous() for tensor in bucket.tensors.values()]
                _wait_all([dist.broadcast(tensor, src=0, group=self._group, async_op=True) for tensor in sent])
            if backend.topology.device.type == "cuda":
                torch.cuda.synchronize(backend.topology.device)
        except BaseException:
            self.leave()
            raise

    def adapter_buckets(self, backend: TrainBackend) -> tuple[JsonObject, list[list[JsonObject]]]:
        """Return the adapter's config for the engines, and the buckets that `broadcast_adapter` sends."""
        facts, layout = trained_adapter(backend).facts.to_dict(), adapter_layout(backend)
        ranges = plan_bucket_ranges([4 * prod(tensor["shape"]) for tensor in layout], self._buffer_size)
        return facts, [layout[start:end] for start, end in ranges]

    def broadcast_adapter(self, backend: TrainBackend) -> None:
        """Send the adapter to the engines; a failure closes the group, as in `broadcast`."""
        try:
            send_adapter(backend, self._group, buffer_size=self._buffer_size)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Leave the engines' group; safe without one."""
        group, self._group = self._group, None
        if group is not None:
            leave_process_group(group)

    def checksums(self, backend: TrainBackend) -> dict[str, str]:
        """Compute the checksums of the tensors that this rank owns, as the engines should have them."""
        from slime.models.delta.apply import tensor_checksums

        buckets = backend.hf_buckets(self._dtype, self._buffer_size)
        return tensor_checksums(
            pair
            for bucket in backend.progress.over(buckets, "checksums: bucket")
            for pair in (bucket.tensors or {}).items()
        )
