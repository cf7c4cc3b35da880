"""Receives weights through process groups with the trainer.

Invariant: names and shapes are checked before the first tensor is received, and a bucket is received whole before any
of it is copied. Receiving runs outside of the engine's thread: a trainer that sends nothing delays no other request,
and leaving the group ends the wait.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from slime.cluster.process_group import join_process_group, leave_process_group
from slime.engine.embedded.errors import BadRequest, BucketNotReceived, Conflict
from slime.models.peft_adapter import AdapterConfig

_JOIN_TIMEOUT_S = 600.0
_MOST_GROUPS = 8
DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8)
}


@dataclass(frozen=True)
class AnnouncedBucket:
    """A bucket that a trainer announced: the tensors that it will send, and their part of the update."""

    group_name: str
    names: Sequence[str]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[tuple[int, ...]]
    number: int
    count: int
    adapter: AdapterConfig | None = None
    """Set if the tensors are those of a LoRA adapter."""

    @property
    def is_last(self) -> bool:
        return self.number == self.count

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(zip(self.names, self.shapes, strict=True))

    @property
    def source(self) -> str:
        return f"group {self.group_name}"


@dataclass(frozen=True)
class Rendezvous:
    """The address at which the members of a process group connect, and the rank of this engine."""

    name: str
    backend: str
    address: str
    port: int
    rank: int
    world_size: int


Tensors = dict[str, torch.Tensor]


@dataclass(eq=False)
class _Membership:
    """A group that this engine has joined, or is joining while `group` is None."""

    group: dist.ProcessGroup | None = None
    arriving: list[Future[Tensors]] = field(default_factory=list)
    """Announced buckets that have not arrived yet, in the order of their announcement."""


class WeightGroups:
    """The process groups that this engine has joined or is joining, by name; thread-safe."""

    def __init__(self) -> None:
        self._groups: dict[str, _Membership] = {}
        self._lock = threading.Lock()

    def join(self, meeting: Rendezvous) -> None:
        """Join a group (SGLang's `/init_weights_update_group`); waits for all other members."""
        name, own = meeting.name, _Membership()
        with self._lock:
            if name in self._groups:
                raise BadRequest(f"this engine is in a group {name!r} already, or is joining it", "group_name")
            if len(self._groups) >= _MOST_GROUPS:
                raise Conflict(f"this engine is in {_MOST_GROUPS} groups already: leave one first")
            self._groups[name] = own
        group: dist.ProcessGroup | None = None
        try:
            group = join_process_group(**vars(meeting), timeout_s=_JOIN_TIMEOUT_S)
        except (OSError, RuntimeError, ValueError) as cause:  # torch has no narrower type for these errors
            raise BadRequest(f"cannot join the group {name!r} at {meeting.address}:{meeting.port}: {cause}") from cause
        finally:
            with self._lock:
                own.group, was_left = group, self._groups.get(name) is not own
                if group is None and not was_left:
                    del self._groups[name]
        if was_left:
            leave_process_group(group)
            raise BucketNotReceived(f"the group {name!r} was left before all its members had joined")

    def leave(self, name: str) -> None:
        """Leave a group, or stop joining it; its buckets that have not arrived end with `BucketNotReceived`."""
        with self._lock:
            own = self._groups.pop(name, None)
            if own is None:
                raise BadRequest(f"this engine is not in a group {name!r}", "group_name")
            ended, own.arriving = own.arriving, []
        for future in ended:
            future.set_exception(BucketNotReceived(f"the group {name!r} was left before the bucket arrived"))
        if own.group is not None:
            held, own.group = [own.group], None
            leave_process_group(held[0], is_busy=bool(ended))
            # Dropping the last reference to a gloo group waits for its collectives: another thread does it.
            threading.Thread(target=held.clear, name="leave", daemon=True).start()

    def receive(self, bucket: AnnouncedBucket, device: torch.device) -> Future[Tensors]:
        """Receive the tensors of a bucket to `device`, in a thread of their own.

        After the group was left, gloo holds that thread until the sender closes its connection or the group's timeout
        expires.
        """
        future: Future[Tensors] = Future()
        future.set_running_or_notify_cancel()  # not cancellable: the sender sends, also after the client disconnected
        with self._lock:
            own = self._groups.get(bucket.group_name)
            if own is None or own.group is None:
                raise BadRequest(
                    f"this engine is not in a group {bucket.group_name!r}: call /init_weights_update_group first"
                )
            before = own.arriving[-1] if own.arriving else None
            own.arriving.append(future)
            group = own.group

        def run() -> None:
            if before is not None:
                before.exception()  # collectives run one after another
            tensors: Tensors = {}
            failure: Exception | None = None
            try:
                if not future.done():
                    tensors = _received(group, bucket, device)
            except Exception as cause:  # noqa: BLE001 - torch has no narrower type for these errors
                # Raised without the cause, whose frames refer to the group: dropping the last reference to a gloo group
                # waits for its collectives, and a cycle would be collected in any thread, such as the event loop's.
                failure = BucketNotReceived(f"bucket {bucket.number} of {bucket.count} did not arrive: {cause}")
            with self._lock:
                if future not in own.arriving:
                    return  # the group was left
                own.arriving.remove(future)
            if failure is None:
                future.set_result(tensors)
            else:
                future.set_exception(failure)

        threading.Thread(target=run, name="load", daemon=True).start()
        return future


def _received(group: dist.ProcessGroup, bucket: AnnouncedBucket, device: torch.device) -> Tensors:
    tensors = {
        name: torch.empty(shape, dtype=kind, device=device)
        for name, kind, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True)
    }
    works = [dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in tensors.values()]
    for work in works:
        assert work is not None
        work.wait()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # the engine's thread copies in a stream of its own
    return tensors
