"""Ranks of which one is stopped: what is to happen when the others wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from slime.cluster.watchdog.registry import board
from slime.train.trainer_group import TrainerGroup
from tests.e2e.runs import wait_until


def when_rank_0_waits(group: TrainerGroup, act: Callable[[], None]) -> threading.Thread:
    """Do something when rank 0 has done what it can of a training step without the others."""

    def work() -> None:
        assert wait_until(lambda: group.processes.doing == "preparing the samples", 240)
        time.sleep(1.0)  # from there to the collective there is nothing to see
        act()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def run_out_of_time() -> None:
    """The deadline of the training step that is under way is now."""
    [wait] = [wait for wait in board.waits() if wait.why == "to finish train"]
    wait.deadline = time.monotonic()
