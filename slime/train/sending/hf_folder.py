"""The trained weights as a Hugging Face folder, written by all ranks that own some of them.

Invariant: the folder is whole or not there. A model that fits into one file is written by one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from slime.models.saving import MAX_SHARD_BYTES, Beside, FolderDraft, ShardWriter
from slime.train.backends.hf import HfBucket
from slime.train.backends.protocol import TrainBackend
from slime.train.checkpoints.not_written import written_together


def save_hf(
    backend: TrainBackend,
    source: str,
    path: str,
    *,
    dtype: torch.dtype,
    buffer_size: int,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    beside: Beside | None = None,
) -> None:
    """Weights in `dtype` with the small files of `source`; all ranks together. A `NotWritten` leaves nothing behind.

    `beside` puts more files into the folder; rank 0 calls it.
    """
    world, what = backend.topology.world, f"the Hugging Face folder {path}"
    draft: FolderDraft | None = None

    def begin(_: Iterator[HfBucket]) -> None:
        nonlocal draft
        draft = FolderDraft.begin(source, path)

    try:
        written_together(world, iter(()), begin if world.rank == 0 else None, what)
        (staging,) = world.union([] if draft is None else [str(draft.staging)])
        part = draft or FolderDraft(Path(staging), Path(path))
        _write_weights(backend, part, what, dtype=dtype, buffer_size=buffer_size, max_shard_bytes=max_shard_bytes)
        written_together(world, iter(()), None if draft is None else lambda _: part.finish(dtype, beside=beside), what)
    finally:
        if draft is not None:
            draft.discard()


def _write_weights(
    backend: TrainBackend,
    draft: FolderDraft,
    what: str,
    *,
    dtype: torch.dtype,
    buffer_size: int,
    max_shard_bytes: int,
) -> None:
    rank, plan = backend.topology.world.rank, backend.hf_plan(dtype, buffer_size)
    fits = sum(tensor.nbytes for bucket in plan for tensor in bucket) <= max_shard_bytes
    owners = (0,) if fits else None

    def write(buckets: Iterator[HfBucket]) -> None:
        writer: ShardWriter | None = None
        for bucket in buckets:
            if bucket.tensors is not None:
                writer = writer or draft.writer(None, name=f"rank-{rank:05d}", max_shard_bytes=max_shard_bytes)
                for name, tensor in bucket.tensors.items():
                    writer.add(name, tensor)
        if writer is not None:
            writer.finish()

    count = len(backend.hf_plan(dtype, buffer_size, owners=owners))
    buckets = backend.hf_buckets(dtype, buffer_size, owners=owners)
    each = backend.progress.over(buckets, "writing a Hugging Face folder: bucket", count)
    written_together(backend.topology.world, each, write, what)
