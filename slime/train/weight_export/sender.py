"""The trainer side of a weight update: files, deltas, broadcasts, checksums.

Invariant: the announced buckets are the ones that are sent, and every tensor is sent in the rollout's dtype. All ranks
call each verb together. Each rank makes files, deltas and checksums of the tensors it owns; only rank 0 broadcasts to
the engines. The LoRA adapter is exported as PEFT files or through the engines' process group: A and B are sent whole
and in float32, as they are trained, with everything that an engine needs to compute the merged weights from its own
weights; rank 0 writes and sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from slime.train.actor import Actor
from slime.train.backend import NamedTensor, TrainedAdapter
from slime.train.backends.hf_buckets import plan_bucket_ranges
from slime.train.checkpoints.errors import write_together
from slime.train.verbs import verb
from slime.train.weight_export.files import export_weights
from slime.train.weight_export.ipc import SENDER_RANKS, SharedWeights, tensor_layouts

if TYPE_CHECKING:
    from slime.train.weight_export.delta import PublishedWeights

Layout = list[JsonObject]
"""Name, dtype and shape of each tensor of a bucket."""


class WeightSender:
    """Verbs of a weight update, and the state between updates.

    That is the last published bytes (in delta mode) and the process group with the engines; `shared` has the verbs of
    shared memory.
    """

    def __init__(self, config: Config, actor: Actor, *, dtype: torch.dtype, device: str) -> None:
        self._actor = actor
        self._backend = actor.backend
        self._dtype = dtype
        self._buffer_size = config.update_weight_buffer_size
        self._encoding = config.update_weight_delta_encoding
        self._checksum = delta_checksum(config.update_weight_delta_checksum, device)
        self._group: dist.ProcessGroup | None = None
        self.shared = SharedWeights(actor, dtype=dtype, buffer_size=config.update_weight_buffer_size)
        self.published: PublishedWeights | None = None
        if config.update_weight_mode == "delta":
            from slime.train.weight_export.delta import PublishedWeights  # imports zstandard and xxhash

            self.published = PublishedWeights()

    # files

    @verb()
    def export_weights(self, out_dir: str, version: int) -> list[str]:
        """Write all weights as safetensors files with Hugging Face names; return the files of this rank."""
        self._actor.remember_exported(version)
        published = self.published
        if published is not None:
            published.forget_version()
        paths = export_weights(
            self._backend,
            Path(out_dir),
            version=version,
            dtype=self._dtype,
            buffer_size=self._buffer_size,
            keep=None if published is None else published.keep,
            earlier=published,
        )
        if published is not None:
            published.version = version
        return [str(path) for path in paths]

    @verb()
    def export_delta(self, out_dir: str, version: int, base_version: int) -> JsonObject:
        """Write this rank's share of the changes since `base_version` as a file of blobs; return a `DeltaPart`."""
        if self.published is None:
            raise RuntimeError("--update-weight-mode: a delta needs the mode delta")
        from slime.train.weight_export.delta import export_delta

        self._actor.remember_exported(version)
        part = export_delta(
            self._backend,
            self.published,
            Path(out_dir),
            version=version,
            base_version=base_version,
            dtype=self._dtype,
            buffer_size=self._buffer_size,
            encoding=self._encoding,
            checksum=self._checksum,
        )
        return part.to_dict()

    @verb()
    def export_adapter(self, out_dir: str, version: int) -> list[str]:
        """Write the files of the LoRA adapter in PEFT's format on rank 0 (the others return an empty list)."""
        self._actor.remember_exported(version)
        backend, info, paths = self._backend, self._adapter, list[Path]()

        def write(tensors: Iterator[NamedTensor]) -> None:
            base, targets = str(info.base), info.peft_targets
            written = write_adapter(
                Path(out_dir), dict(tensors), info.facts, base_model=base, target_modules=targets, sync=False
            )
            paths.extend(written)

        tensors = backend.progress.over(backend.full_adapter(), "writing the adapter: tensor")
        world, what = backend.topology.world, f"version {version} of the adapter to {out_dir}"
        write_together(world, tensors, write if world.rank == 0 else None, what)
        return [str(path) for path in paths]

    # broadcast

    @verb()
    def join_engines(self, address: str, port: int, world_size: int, name: str, backend: str, timeout_s: float) -> None:
        """Join a process group with all engines as rank 0, and wait for them; other ranks are not members."""
        if self._backend.topology.world.rank != 0:
            return
        self.leave_engines()
        self._group = join_process_group(
            address=address, port=port, rank=0, world_size=world_size, name=name, backend=backend, timeout_s=timeout_s
        )

    def leave_engines(self) -> None:
        """Leave the engines' group; safe without one."""
        group, self._group = self._group, None
        if group is not None:
            leave_process_group(group)

    @verb()
    def weight_buckets(self) -> list[Layout]:
        """Describe the buckets that `broadcast_weights` sends."""
        plan = self._backend.export.plan(self._dtype, self._buffer_size, SENDER_RANKS)
        return [tensor_layouts(bucket.tensors) for bucket in plan]

    @verb()
    def broadcast_weights(self, version: int) -> None:
        """Send all tensors to the engines, bucket by bucket; return when the engines have all of them."""
        self._actor.remember_exported(version)
        backend = self._backend
        plan = backend.export.plan(self._dtype, self._buffer_size, SENDER_RANKS)
        buckets = backend.progress.over(backend.export.buckets(plan), "sending weights: bucket", len(plan))
        self._broadcast((bucket.tensors or {}).values() for bucket in buckets)

    @verb()
    def adapter_buckets(self) -> tuple[JsonObject, list[Layout]]:
        """Return the adapter's config for the engines, and the buckets that `broadcast_adapter` sends."""
        layout: Layout = [
            {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            for name, tensor in self._backend.full_adapter()
        ]
        ranges = plan_bucket_ranges([4 * prod(tensor["shape"]) for tensor in layout], self._buffer_size)
        return self._adapter.facts.to_dict(), [layout[start:end] for start, end in ranges]

    @verb()
    def broadcast_adapter(self, version: int) -> None:
        """Send the adapter's tensors, as `adapter_buckets` lists them; return when the engines have all of them."""
        self._actor.remember_exported(version)

        def buckets() -> Iterator[list[torch.Tensor]]:
            bucket: list[torch.Tensor] = []
            tensors = self._backend.full_adapter()
            for _, tensor in self._backend.progress.over(tensors, "sending the adapter: tensor"):
                bucket.append(tensor.detach())
                if sum(one.nbytes for one in bucket) >= self._buffer_size:
                    yield bucket
                    bucket = []
            yield bucket

        self._broadcast(buckets())

    def _broadcast(self, buckets: Iterator[Iterable[torch.Tensor]]) -> None:
        """Send buckets from rank 0, one after the other; a failure closes the group, so that engines don't hang."""
        try:
            for bucket in buckets:
                if self._group is None:
                    continue
                sent = [tensor.contiguous() for tensor in bucket]
                for work in [dist.broadcast(tensor, src=0, group=self._group, async_op=True) for tensor in sent]:
                    assert work is not None
                    work.wait()
            if self._backend.topology.device.type == "cuda":
                torch.cuda.synchronize(self._backend.topology.device)
        except BaseException:
            self.leave_engines()
            raise

    # checks

    @verb()
    def weight_checksums(self) -> dict[str, str]:
        """Compute the xxh3-128 of every tensor that this rank owns, in the rollout's dtype."""
        from slime.models.delta.apply import tensor_checksums

        export = self._backend.export
        buckets = self._backend.progress.over(
            export.buckets(export.plan(self._dtype, self._buffer_size)), "checksums: bucket"
        )
        return tensor_checksums(pair for bucket in buckets for pair in (bucket.tensors or {}).items())

    @property
    def _adapter(self) -> TrainedAdapter:
        """The adapter of a run that trains one."""
        if self._backend.adapter is None:
            raise RuntimeError("--lora-rank: the run trains no adapter, so none can be exported")
        return self._backend.adapter
