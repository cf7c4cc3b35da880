"""The LoRA adapter that is trained, on its way to the engines: in a folder as PEFT writes it, or through their group.

Invariant: A and B leave as they are trained, in float32 and whole, with all that an engine needs to make of its own
weights those that the trainers would send. All ranks call each function together; rank 0 writes and sends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.models.peft_adapter import write_adapter
from slime.train.backends.protocol import TrainBackend, TrainedAdapter
from slime.train.checkpoints.not_written import written_together

Layout = list[dict[str, Any]]


def trained_adapter(backend: TrainBackend) -> TrainedAdapter:
    """The adapter of a run that trains one."""
    if backend.adapter is None:
        raise RuntimeError("an adapter was asked of a run without --lora-rank")
    return backend.adapter


def export_adapter(backend: TrainBackend, folder: Path, *, version: int) -> list[Path]:
    """Write the adapter's files; rank 0 returns their paths."""
    info, paths = trained_adapter(backend), list[Path]()

    def write(tensors: Any) -> None:
        base, targets = str(info.base), info.peft_targets
        paths.extend(
            write_adapter(folder, dict(tensors), info.facts, base_model=base, target_modules=targets, sync=False)
        )

    tensors = backend.progress.over(backend.full_adapter(), "writing the adapter: tensor")
    world, what = backend.topology.world, f"version {version} of the adapter to {folder}"
    written_together(world, tensors, write if world.rank == 0 else None, what)
    return paths


def adapter_layout(backend: TrainBackend) -> Layout:
    """Name, dtype and shape of each tensor that `send_adapter` sends, in its order."""
    return [
        {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in backend.full_adapter()
    ]


def send_adapter(backend: TrainBackend, group: dist.ProcessGroup | None, *, buffer_size: int) -> None:
    """Broadcast every tensor to `group`, which rank 0 is in; at most about `buffer_size` bytes are on their way."""
    sent: list[torch.Tensor] = []
    works: list[Any] = []
    filled = 0
    for _, tensor in backend.progress.over(backend.full_adapter(), "sending the adapter: tensor"):
        if group is None:
            continue
        sent.append(tensor.detach().contiguous())
        works.append(dist.broadcast(sent[-1], src=0, group=group, async_op=True))
        filled += sent[-1].nbytes
        if filled >= buffer_size:
            _arrive(works)
            sent, works, filled = [], [], 0
    _arrive(works)
    if backend.topology.world.device.type == "cuda":
        torch.cuda.synchronize(backend.topology.world.device)


def _arrive(works: list[Any]) -> None:
    for work in works:
        assert work is not None
        work.wait()
