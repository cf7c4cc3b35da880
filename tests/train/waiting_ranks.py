"""Helpers for tests in which one rank is stopped and the others block on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from slime.cluster.watchdog.registry import wait_registry
from slime.train.trainer_group import TrainerGroup
from tests.e2e.runs import wait_until


def when_rank_0_waits(group: TrainerGroup, act: Callable[[], None]) -> threading.Thread:
    """Run `act` in a thread when rank 0 is about to block on the other ranks in a training step."""

    def work() -> None:
        assert wait_until(lambda: group.processes.doing == "preparing the samples", 240)
        time.sleep(1.0)  # no progress is reported between here and the collective
        act()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def run_out_of_time() -> None:
    """Set the deadline of the running training step to now."""
    [wait] = [wait for wait in wait_registry.waits() if wait.why == "to finish train"]
    wait.deadline = time.monotonic()
