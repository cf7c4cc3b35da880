"""Weights that come through a process group with the trainer.

Invariant: names and shapes are checked before the first tensor is received, and a bucket is received whole before any
of it is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from slime.cluster.process_group import join_process_group, leave_process_group
from slime.engine.embedded.refusals import BadRequest, Conflict, NotArrived
from slime.models.adapter import AdapterFacts

_JOIN_TIMEOUT_S = 600.0
_MOST_GROUPS = 8
DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8)
}


@dataclass(frozen=True)
class Announced:
    """A bucket as it was announced: what is going to come, as which part of an update."""

    group_name: str
    names: Sequence[str]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[tuple[int, ...]]
    number: int
    count: int
    adapter: AdapterFacts | None = None
    """Set where the tensors are those of a LoRA adapter."""

    @property
    def is_last(self) -> bool:
        return self.number == self.count

    def left_of(self, version: str | None) -> str | None:
        """What is to be said of an update that ends with this bucket; None where it is whole."""
        return None if self.is_last else f"only {self.number} of {self.count} buckets of version {version} came"


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of a group meet, and which of them this engine is."""

    name: str
    backend: str
    address: str
    port: int
    rank: int
    world_size: int


class WeightGroups:
    """The process groups that this engine is in or about to join, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, dist.ProcessGroup | None] = {}  # None: still waiting for the others
        self._lock = threading.Lock()

    def join(self, meeting: Rendezvous) -> None:
        """Join as SGLang's `/init_weights_update_group` says; waits for all the others."""
        name = meeting.name
        with self._lock:
            if name in self._groups:
                raise BadRequest(f"this engine is in a group {name!r} already, or about to join it", "group_name")
            if len(self._groups) >= _MOST_GROUPS:
                raise Conflict(f"this engine is in {_MOST_GROUPS} groups already: leave one first")
            self._groups[name] = None
        group: dist.ProcessGroup | None = None
        try:
            group = join_process_group(
                address=meeting.address,
                port=meeting.port,
                rank=meeting.rank,
                world_size=meeting.world_size,
                name=name,
                backend=meeting.backend,
                timeout_s=_JOIN_TIMEOUT_S,
            )
        except (OSError, RuntimeError, ValueError) as cause:  # torch has no narrower type for all that can go wrong
            raise BadRequest(f"cannot join the group {name!r} at {meeting.address}:{meeting.port}: {cause}") from cause
        finally:
            with self._lock:
                if group is None:
                    del self._groups[name]
                else:
                    self._groups[name] = group

    def leave(self, name: str) -> None:
        with self._lock:
            group = self._groups.get(name)
            if group is None:
                raise BadRequest(f"this engine is in no group {name!r}", "group_name")
            del self._groups[name]
        leave_process_group(group)

    def receive(self, bucket: Announced, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of a bucket, on `device`."""
        group = self._groups.get(bucket.group_name)
        if group is None:
            raise BadRequest(f"this engine is in no group {bucket.group_name!r}: call /init_weights_update_group first")
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
