"""Weights between processes: what one shares of its GPU or of the host is what another copies, bit for bit; and deltas
that are found, applied and checksummed on the GPU are those of the CPU.

Errors are numbers of bytes, or of results, that differ.
"""

from __future__ import annotations

import base64
import multiprocessing
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from slime.engine.embedded.weights.ipc import DeviceMemory, HostMemory, SharedMemory
from slime.engine.embedded.weights.process_groups import AnnouncedBucket
from slime.models.delta.apply import apply_on_device, bytes_of, tensor_checksums
from slime.models.delta.blob import encode, sum64_of_bytes, sum64_of_tensors
from slime.models.delta.folder import DeltaPart, delta_entries, join_parts, read_index, write_part
from slime.train.backends.hf_buckets import HfBucket, HfTensor, PlannedBucket
from slime.train.timers import RankProgress
from slime.train.weight_export.delta import PublishedWeights
from slime.train.weight_export.ipc import SharedWeights

_SHAPES = {"a": (1000, 1024), "b": (7,), "c": (300, 33, 5), "d": (1,)}
_CUDA = torch.device("cuda")


def checks() -> Iterator[tuple[str, float, float]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for region in (None, f"{folder}/region"):
            where = "the GPU's memory" if region is None else "a pinned region"
            yield f"bytes that differ through {where}", float(_through(region)), 0.0
    for size in (1, 8, 4099, 40 << 20):
        data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
        differs = sum64_of_tensors([torch.from_numpy(data).to(_CUDA)]) != [sum64_of_bytes(data)]
        yield f"sum64 of {size} bytes", float(differs), 0.0
    for encoding in ("sparse", "xor", "overwrite"):
        for checksum in ("sum64", "xxh3-128"):
            yield f"bytes that differ after a delta ({encoding}, {checksum})", float(_delta(encoding, checksum)), 0.0


def _tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(_CUDA, torch.bfloat16) for name, shape in _SHAPES.items()}


def _differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> int:
    return sum(int((bytes_of(found[name]) != bytes_of(tensor)).sum()) for name, tensor in wanted.items())


class _OneRank:
    """What sharing asks of a trainer's backend."""

    def __init__(self) -> None:
        self.progress = RankProgress()
        self.topology = SimpleNamespace(world=SimpleNamespace(rank=0, union=set), device=_CUDA)
        self.export = self

    def plan(self, *_: Any) -> list[PlannedBucket[Any]]:
        tensors = tuple(HfTensor(name, shape, torch.bfloat16, 0) for name, shape in _SHAPES.items())
        return [PlannedBucket(0, (), tensors[:2]), PlannedBucket(0, (), tensors[2:])]

    def buckets(self, plan: list[PlannedBucket[Any]]) -> Iterator[HfBucket]:
        tensors = _tensors()
        for planned in plan:
            yield HfBucket(0, planned.tensors, {one.name: tensors[one.name] for one in planned.tensors})


def _share(told: Any, region: str | None) -> None:
    """A trainer: it shares, and waits until its weights are there."""
    actor: Any = SimpleNamespace(backend=_OneRank(), remember_exported=lambda version: None)
    weights = SharedWeights(actor, dtype=torch.bfloat16, buffer_size=1)  # it holds the memory until the end
    told.send(weights.share_bucket(1, 1, region))
    told.recv()


def _through(region: str | None) -> int:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    trainer = context.Process(target=_share, args=(there, region), daemon=True)
    trainer.start()
    there.close()
    answer = here.recv()
    memory = answer["memory"]
    (bucket,) = answer["buckets"]
    told = AnnouncedBucket(
        "",
        [one["name"] for one in bucket],
        [torch.bfloat16] * len(bucket),
        [tuple(one["shape"]) for one in bucket],
        1,
        1,
    )
    targets = {name: torch.zeros(shape, dtype=torch.bfloat16, device=_CUDA) for name, shape in _SHAPES.items()}
    views: Any = SimpleNamespace(targets=lambda names: targets)
    place = (
        HostMemory(memory["region"])
        if "region" in memory
        else DeviceMemory(base64.b64decode(memory["handle"]), memory["offset"], memory["device"])
    )
    opened = SharedMemory(views, _CUDA).open(place, told)
    opened.load()
    opened.close()
    here.send("done")
    trainer.join()
    return _differing(targets, _tensors())


def _delta(encoding: str, checksum: str) -> int:
    served, trained, published = _tensors(), _tensors(), PublishedWeights()
    published.keep(trained)
    for tensor in trained.values():
        tensor.view(-1)[::97] += 1
    changes = dict(published.changes(trained))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        blobs = {name: encode(one, encoding).data for name, one in changes.items()}
        write_part(folder / "rank", blobs, tensor_checksums(trained.items(), checksum))
        part = DeltaPart(path=str(folder / "rank"), names=list(blobs))
        join_parts(folder, [part], version=1, base_version=0, encoding=encoding, checksum=checksum)
        index = read_index(folder)
        assert index is not None
        apply_on_device(served, list(delta_entries(folder, index)), index)
    return _differing(served, trained)
