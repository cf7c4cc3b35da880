"""A trainer rank's side of a weight update other than whole files: deltas, broadcasts, checksums.

Invariant: buckets are cut the same way when they are announced and when they are sent, and every tensor leaves in the
rollout's dtype. All ranks call each method together; only rank 0 meets the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime.cluster.process_group import join_process_group, leave_process_group
from slime.config import Config
from slime.train.backends.protocol import TrainBackend
from slime.train.sending.adapter import adapter_layout, send_adapter, trained_adapter
from slime.train.sending.export import hf_layout, hf_tensors, rollout_dtype

if TYPE_CHECKING:
    from slime.train.sending.delta import Published


class WeightSender:
    """What stays between two updates: the last published bytes (in delta mode), and the group with the engines."""

    def __init__(self, config: Config, *, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffer_size = config.update_weight_buffer_size
        self._encoding = config.update_weight_delta_encoding
        self._checksum = config.update_weight_delta_checksum
        self._group: dist.ProcessGroup | None = None
        self.published: Published | None = None
        if config.update_weight_mode == "delta":
            from slime.train.sending.delta import Published  # zstandard and xxhash, which other runs do without

            self.published = Published(dtype)

    def export_delta(self, backend: TrainBackend, folder: Path, *, version: int, base_version: int) -> dict[str, Any]:
        """This rank's share of the delta from `base_version` to `version`."""
        if self.published is None:
            raise RuntimeError("a delta was asked of a run without --update-weight-mode delta")
        from slime.train.sending.delta import DeltaExporter

        exporter = DeltaExporter(self.published, encoding=self._encoding, checksum=self._checksum)
        return exporter.export(backend, folder, version=version, base_version=base_version).to_dict()

    def buckets(self, backend: TrainBackend) -> list[list[dict[str, Any]]]:
        """What `broadcast` is going to send."""
        layout = hf_layout(backend, self._dtype)
        facts = [
            {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            for name, tensor in layout
        ]
        return [facts[start:end] for start, end in cut_buckets([t.nbytes for _, t in layout], self._buffer_size)]

    def join(self, *, address: str, port: int, world_size: int, name: str, backend: str, timeout_s: float) -> None:
        """Wait for all engines in a process group of its own, as rank 0."""
        self.leave()
        self._group = join_process_group(
            address=address, port=port, rank=0, world_size=world_size, name=name, backend=backend, timeout_s=timeout_s
        )

    def broadcast(self, backend: TrainBackend) -> None:
        """Send all tensors to the engines, bucket by bucket; a failure closes the group, or they would wait for it."""
        try:
            self._broadcast(backend)
        except BaseException:
            self.leave()
            raise

    def _broadcast(self, backend: TrainBackend) -> None:
        sizes = [tensor.nbytes for _, tensor in hf_layout(backend, self._dtype)]
        tensors = hf_tensors(backend)
        ranges = cut_buckets(sizes, self._buffer_size)
        for start, end in backend.progress.over(ranges, "sending weights: bucket", len(ranges)):
            sent, works = [], []
            for _ in range(start, end):
                _, tensor = next(tensors)
                if self._group is not None:
                    sent.append(tensor.detach().to(rollout_dtype(tensor.dtype, self._dtype)).contiguous())
                    works.append(dist.broadcast(sent[-1], src=0, group=self._group, async_op=True))
            for work in works:
                assert work is not None
                work.wait()
        if backend.topology.world.device.type == "cuda":
            torch.cuda.synchronize(backend.topology.world.device)

    def adapter_buckets(self, backend: TrainBackend) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
        """What an engine must know of the adapter, and what `broadcast_adapter` is going to send."""
        facts, layout = trained_adapter(backend).facts.to_dict(), adapter_layout(backend)
        ranges = cut_buckets([4 * prod(tensor["shape"]) for tensor in layout], self._buffer_size)
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
        """Of every tensor as the engines should have it; empty on ranks other than the first."""
        tensors = backend.progress.over(hf_tensors(backend), "checksums: tensor")
        if backend.topology.world.rank == 0:
            from slime.models.delta.tensors import tensor_checksums

            return tensor_checksums((name, t.to(rollout_dtype(t.dtype, self._dtype))) for name, t in tensors)
        for _ in tensors:
            pass
        return {}


def cut_buckets(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Consecutive ranges whose sizes add up to at most `limit`; a larger single one gets a range of its own."""
    ranges, start, filled = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and filled + size > limit:
            ranges.append((start, index))
            start, filled = index, 0
        filled += size
    if start < len(sizes):
        ranges.append((start, len(sizes)))
    return ranges
