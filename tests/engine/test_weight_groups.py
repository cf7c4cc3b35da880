"""The engine's end of process groups with a trainer, without an engine."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from slime.cluster.ports import free_port
from slime.engine.embedded.refusals import NotArrived
from slime.engine.embedded.weights import groups as module
from slime.engine.embedded.weights.groups import Announced, Rendezvous, WeightGroups
from tests.engine.orders import rank_zero


def test_leaving_waits_for_no_collective_that_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer sends nothing, and the receiving thread ends between the first broadcast and the second."""
    port, groups, was_left = free_port(), WeightGroups(), threading.Event()
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(groups.join, Rendezvous("g", "gloo", "127.0.0.1", port, 1, 2))
        trainer = rank_zero("g", port)
        joining.result(60)
    begun: list[Any] = []
    broadcast, leave_group = module.dist.broadcast, module.leave_process_group

    def slow_broadcast(*arguments: Any, **options: Any) -> Any:
        if begun:
            assert was_left.wait(60)
            raise RuntimeError("the group is not registered")
        begun.append(None)
        return broadcast(*arguments, **options)

    def left(*arguments: Any, **options: Any) -> None:
        leave_group(*arguments, **options)
        was_left.set()
        [thread] = [one for one in threading.enumerate() if one.name == "load"]
        thread.join(60)  # so that nobody else has the group

    monkeypatch.setattr(module.dist, "broadcast", slow_broadcast)
    monkeypatch.setattr(module, "leave_process_group", left)
    bucket = Announced("g", ("a", "b"), (torch.float32,) * 2, ((4,), (4,)), 1, 1)
    arriving = groups.receive(bucket, torch.device("cpu"))
    while not begun:
        pass
    leaving = threading.Thread(target=groups.leave, args=("g",), daemon=True)
    leaving.start()
    leaving.join(20)
    is_held = leaving.is_alive()
    del trainer  # ends what was begun
    leaving.join(60)
    assert not is_held
    with pytest.raises(NotArrived, match="left before the bucket arrived"):
        arriving.result(1)
