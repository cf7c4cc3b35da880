"""Weights that come through a process group with the trainer.

Invariant: names and shapes are checked before the first tensor is received, and a bucket is received whole before any
of it is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slime.cluster.process_group import join_process_group, leave_process_group
from slime.engine.embedded.sampling_params import BadRequest

_JOIN_TIMEOUT_S = 600.0
_DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8)
}


class NotArrived(BadRequest):
    """The sender is gone, or its deadline ran out: nothing is wrong with the request itself (503)."""


@dataclass(frozen=True)
class Announced:
    """A bucket as it was announced: what is going to come, as which part of an update."""

    group_name: str
    names: Sequence[str]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[tuple[int, ...]]
    number: int
    count: int

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Announced:
        """SGLang's fields; `bucket` ([1, 3]: the first of three) says that an update goes on, and is ours."""
        names, dtypes, shapes = body.get("names"), body.get("dtypes"), body.get("shapes")
        if not isinstance(names, list) or not isinstance(dtypes, list) or not isinstance(shapes, list):
            raise BadRequest("give names, dtypes and shapes, three lists")
        if not len(names) == len(dtypes) == len(shapes):
            raise BadRequest(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes do not go together")
        if wrong := [kind for kind in dtypes if kind not in _DTYPES]:
            raise BadRequest(f"dtype {wrong[0]!r} is not among {', '.join(_DTYPES)}")
        number, count = body.get("bucket", (1, 1))
        return cls(
            str(body.get("group_name", "weight_update_group")),
            names,
            [_DTYPES[kind] for kind in dtypes],
            [tuple(int(size) for size in shape) for shape in shapes],
            int(number),
            int(count),
        )

    @property
    def is_last(self) -> bool:
        return self.number == self.count


class WeightGroups:
    """The process groups that this engine is in, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, dist.ProcessGroup] = {}

    def join(self, body: dict[str, Any]) -> None:
        """Join as SGLang's `/init_weights_update_group` says; waits for all the others."""
        try:
            name, backend = str(body.get("group_name", "weight_update_group")), str(body.get("backend", "nccl"))
            address, port = str(body["master_address"]), int(body["master_port"])
            rank, world_size = int(body["rank_offset"]), int(body["world_size"])
        except (KeyError, TypeError, ValueError) as cause:
            raise BadRequest(
                f"give master_address, master_port, rank_offset and world_size: {type(cause).__name__} {cause}"
            ) from cause
        if name in self._groups:
            raise BadRequest(f"this engine is in a group {name!r} already")
        try:
            self._groups[name] = join_process_group(
                address=address,
                port=port,
                rank=rank,
                world_size=world_size,
                name=name,
                backend=backend,
                timeout_s=_JOIN_TIMEOUT_S,
            )
        except (RuntimeError, ValueError) as cause:  # torch has no narrower type for all that can go wrong here
            raise BadRequest(f"cannot join the group {name!r} at {address}:{port}: {cause}") from cause

    def leave(self, name: str) -> None:
        if name not in self._groups:
            raise BadRequest(f"this engine is in no group {name!r}")
        leave_process_group(self._groups.pop(name))

    def receive(self, bucket: Announced, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of a bucket, on `device`."""
        if bucket.group_name not in self._groups:
            raise BadRequest(f"this engine is in no group {bucket.group_name!r}: call /init_weights_update_group first")
        group = self._groups[bucket.group_name]
        tensors = [
            torch.empty(shape, dtype=kind, device=device)
            for kind, shape in zip(bucket.dtypes, bucket.shapes, strict=True)
        ]
        try:
            works = [dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in tensors]
            for work in works:
                assert work is not None
                work.wait()
        except RuntimeError as cause:  # torch has no narrower type for it
            raise NotArrived(f"bucket {bucket.number} of {bucket.count} did not arrive: {cause}") from cause
        return dict(zip(bucket.names, tensors, strict=True))
