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

    A thread writes one file while the next bucket is gathered. `keep` gets this rank's tensors, `earlier` the parts
    that this rank sends to others.
    """
    paths: list[Path] = []

    def write(buckets: Iterator[HfBucket]) -> None:
        writing: Future[None] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="weight-files") as thread:
            for number, bucket in enumerate(buckets, start=1):
                if bucket.tensors is None:
                    continue
                if writing is not None:
                    writing.result()
                folder.mkdir(parents=True, exist_ok=True)
                paths.append(folder / f"weights-v{version:06d}-{number:05d}.safetensors")
                on_host = {}
                for name, tensor in bucket.tensors.items():
                    ready = tensor.to("cpu").contiguous()
                    is_view = ready.untyped_storage().nbytes() != ready.nbytes  # such as one expert of a stacked tensor
                    on_host[name] = ready.clone() if is_view else ready
                writing = thread.submit(save_file, on_host, paths[-1], metadata={"format": "pt"})
                if keep is not None:
                    keep(bucket.tensors)
            if writing is not None:
                writing.result()

    plan = backend.export.plan(dtype, buffer_size)
    buckets = backend.progress.over(backend.export.buckets(plan, earlier), "writing weights: bucket", len(plan))
    write_together(backend.topology.world, buckets, write, _what(folder, version))
    return paths


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

    def write(buckets: Iterator[HfBucket]) -> None:
        writer: ShardWriter | None = None
        for bucket in buckets:
            for name, tensor in (bucket.tensors or {}).items():
                prefix = f"rank-{world.rank:05d}"
                writer = writer or part.writer(None, name=prefix, max_shard_bytes=max_shard_bytes)
                writer.add(name, tensor)
        if writer is not None:
            writer.finish()

    try:
        write_together(world, iter(()), begin if world.rank == 0 else None, what)
        (staging,) = world.union([] if draft is None else [str(draft.staging)])
        part = draft or FolderDraft(Path(staging), Path(path))
        plan = backend.export.plan(dtype, buffer_size)
        if sum(tensor.nbytes for bucket in plan for tensor in bucket.tensors) <= max_shard_bytes:
            plan = backend.export.plan(dtype, buffer_size, (0,))  # one file instead of the shards of each rank
        buckets = backend.export.buckets(plan)
        each = backend.progress.over(buckets, "writing a Hugging Face folder: bucket", len(plan))
        write_together(world, each, write, what)
        write_together(world, iter(()), None if draft is None else lambda _: part.finish(dtype, beside=beside), what)
    finally:
        if draft is not None:
            draft.discard()
