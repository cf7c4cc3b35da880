"""The engine's end of process groups with a trainer, tested without an engine."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from slime.cluster.ports import free_port
from slime.engine.embedded.errors import BucketNotReceived
from slime.engine.embedded.weights import process_groups as module
from slime.engine.embedded.weights.process_groups import AnnouncedBucket, Rendezvous, WeightGroups
from tests.e2e.runs import wait_until
from tests.engine.orders import rank_zero


def test_leaving_does_not_wait_for_a_started_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer sends nothing; a broadcast starts while the group is left; the next one ends the thread."""
    port, groups, was_left = free_port(), WeightGroups(), threading.Event()
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(groups.join, Rendezvous("g", "gloo", "127.0.0.1", port, 1, 2))
        trainer = rank_zero("g", port)
        joining.result(60)
    aborted, begun = threading.Event(), threading.Event()
    broadcast = module.dist.broadcast

    def slow_broadcast(*arguments: Any, **options: Any) -> Any:
        if begun.is_set():
            assert was_left.wait(60)
            raise RuntimeError("the group is not registered")
        assert aborted.wait(60)
        work = broadcast(*arguments, **options)
        begun.set()
        return work

    def leave_slowly(group: Any, *, is_busy: bool) -> None:
        assert is_busy
        group.abort()
        aborted.set()
        assert begun.wait(60)
        module.dist.destroy_process_group(group)
        was_left.set()
        [thread] = [one for one in threading.enumerate() if one.name == "load"]
        thread.join(60)  # then no other thread references the group

    known = weakref.ref(groups._groups["g"].group)
    gc.collect()
    gc.disable()  # a cycle would keep the group
    monkeypatch.setattr(module.dist, "broadcast", slow_broadcast)
    monkeypatch.setattr(module, "leave_process_group", leave_slowly)
    bucket = AnnouncedBucket("g", ("a", "b"), (torch.float32,) * 2, ((4,), (4,)), 1, 1)
    arriving = groups.receive(bucket, torch.device("cpu"))
    leaving = threading.Thread(target=groups.leave, args=("g",), daemon=True)
    leaving.start()
    try:
        leaving.join(60)
        is_held = leaving.is_alive()
        del trainer  # ends the started collective
        assert not is_held
        assert wait_until(lambda: known() is None, 60), "only a collection would end the group"
    finally:
        gc.enable()
    with pytest.raises(BucketNotReceived, match="left before the bucket arrived"):
        arriving.result(1)
