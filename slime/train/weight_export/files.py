"""Writes training weights as files for the engines, or as a Hugging Face folder.

Invariant: the names and shapes are those of the model folder from which the run started; every tied weight appears
once. Each rank writes the buckets it owns, one at a time, while those of the others are gathered. All ranks iterate
together, and if one cannot write, all raise the error. A Hugging Face folder is complete or absent; a model that fits
into one file is written by one rank.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from slime.errors import RunFailed
from slime.models.saving import MAX_SHARD_BYTES, AddFiles, FolderDraft, ShardWriter
from slime.train.backend import TrainBackend
from slime.train.backends.hf_buckets import HfBucket, PreviousExport
from slime.train.checkpoints.errors import write_together

KeepTensors = Callable[[Mapping[str, Tensor]], None]


def export_weights(
    backend: TrainBackend,
    folder: Path,
    *,
    version: int,
    dtype: torch.dtype,
    buffer_size: int,
    keep: KeepTensors | None = None,
    earlier: PreviousExport | None = None,
) -> list[Path]:
    """Write bucket i as `weights-v{version}-{i}.safetensors`; return the paths of the buckets that this rank owns.

    `keep` gets this rank's tensors, `earlier` the parts that this rank sends to others.
    """
    files = BucketFiles(folder, prefix=f"weights-v{version:06d}")

    def write(buckets: Iterator[HfBucket]) -> None:
        with files:
            for number, bucket in enumerate(buckets, start=1):
                if bucket.tensors is not None:
                    files.write(number, bucket.tensors)
                    if keep is not None:
                        keep(bucket.tensors)

    count = len(backend.hf_plan(dtype, buffer_size))
    buckets = backend.progress.over(
        backend.hf_buckets(dtype, buffer_size, earlier=earlier), "writing weights: bucket", count
    )
    write_together(backend.topology.world, buckets, write, _what(folder, version))
    return files.paths


class BucketFiles:
    """Writes the files of one rank in a thread; each is complete at the next `write` or at the end of the context."""

    def __init__(self, folder: Path, *, prefix: str) -> None:
        self.paths: list[Path] = []
        self._folder = folder
        self._prefix = prefix
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weight-files")
        self._writing: Future[None] | None = None

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors to the host and start to write them."""
        self._finish()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._prefix}-{number:05d}.safetensors"
        on_host = {}
        for name, tensor in tensors.items():
            ready = tensor.to("cpu").contiguous()
            is_view = ready.untyped_storage().nbytes() != ready.nbytes  # such as one expert of a stacked tensor
            on_host[name] = ready.clone() if is_view else ready
        self._writing = self._pool.submit(save_file, on_host, path, metadata={"format": "pt"})
        self.paths.append(path)

    def __enter__(self) -> BucketFiles:
        return self

    def __exit__(self, *_exc: object) -> None:
        try:
            self._finish()
        finally:
            self._pool.shutdown()

    def _finish(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def export_error(folder: Path, version: int, cause: Exception) -> RunFailed:
    """Make the error for files that could not be written."""
    return RunFailed(f"cannot write {_what(folder, version)}: {cause}")


def _what(folder: Path, version: int) -> str:
    """Describe an export in an error message."""
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    return (
        f"version {version} of the weights to {folder} ({free / 2**30:.2f} GiB free there; --update-weight-transport "
        "disk and --update-weight-disk-dir choose another folder)"
    )


def save_hf(
    backend: TrainBackend,
    source: str,
    path: str,
    *,
    dtype: torch.dtype,
    buffer_size: int,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    beside: AddFiles | None = None,
) -> None:
    """Write the weights in `dtype` with the small files of `source`; all ranks call it together.

    A `NotWritten` leaves no files. `beside` adds more files to the folder; rank 0 calls it.
    """
    world, what = backend.topology.world, f"the Hugging Face folder {path}"
    draft: FolderDraft | None = None

    def begin(_: Iterator[HfBucket]) -> None:
        nonlocal draft
        draft = FolderDraft.begin(source, path)

    try:
        write_together(world, iter(()), begin if world.rank == 0 else None, what)
        (staging,) = world.union([] if draft is None else [str(draft.staging)])
        part = draft or FolderDraft(Path(staging), Path(path))
        _write_weights(backend, part, what, dtype=dtype, buffer_size=buffer_size, max_shard_bytes=max_shard_bytes)
        write_together(world, iter(()), None if draft is None else lambda _: part.finish(dtype, beside=beside), what)
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
    """Write the shards of this rank to the staging folder."""
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
    write_together(backend.topology.world, each, write, what)
