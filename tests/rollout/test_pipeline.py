"""Rollout feeds: order, look-ahead, blocking during updates, and propagation of failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from slime.cluster.watchdog import BackgroundDied, raise_failures
from slime.data.sample import Sample
from slime.rollout.pipeline import GeneratedRollout, OneStepAheadFeed, RolloutMaker, make_feed

PATIENCE_S = 120.0


class GatedMaker:
    """A rollout maker whose rollouts finish when the test releases them."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.failing: set[int] = set()
        self._may = threading.Semaphore(0)
        self._changed = threading.Condition()

    def get(self, number: int) -> GeneratedRollout:
        with self._changed:
            self.begun.append(number)
            self._changed.notify_all()
        assert self._may.acquire(timeout=PATIENCE_S)
        if number in self.failing:
            raise RuntimeError(f"rollout {number} broke")
        return GeneratedRollout([number], {"number": number}, False)

    def finish(self, count: int = 1) -> None:
        for _ in range(count):
            self._may.release()

    def wait_begun(self, numbers: list[int]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.begun == numbers, PATIENCE_S), self.begun


@pytest.fixture
def workshop() -> Iterator[GatedMaker]:
    made = GatedMaker()
    yield made
    made.finish(10)


def ahead(workshop: Any, *, start: int = 0, total: int = 4, ready: int = 1) -> OneStepAheadFeed:
    return OneStepAheadFeed(workshop, start=start, total=total, ready=ready)


def test_synchronous_rollout_is_made_when_it_is_requested(make_runtime: Any) -> None:
    asked: list[int] = []

    def rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        asked.append(rollout_id)
        return [[Sample(index=0, tokens=[1, 2], response_length=1, reward=1.0)]]

    maker = RolloutMaker(make_runtime([]), rollout, None, log=lambda *_: False, at_work=nullcontext)
    feed = make_feed(maker, start=0, total=9, replayed=[])
    assert asked == []
    assert [sample.index for sample in feed.get(3).samples[0]] == [0]
    assert asked == [3]


def test_next_rollout_is_generated_during_training(workshop: Any) -> None:
    feed = ahead(workshop)
    workshop.finish()
    assert feed.get(0).samples == [0]
    workshop.wait_begun([0, 1])  # while the caller trains on rollout 0
    workshop.finish()
    assert feed.get(1).samples == [1]
    workshop.wait_begun([0, 1, 2])
    feed.close()


def test_feed_keeps_at_most_the_requested_number_ready(workshop: Any) -> None:
    feed = ahead(workshop, total=9, ready=2)
    workshop.finish(9)
    workshop.wait_begun([0, 1])
    with feed.undisturbed():  # both are made, and no third one was started
        assert workshop.begun == [0, 1]
    assert feed.get(0).samples == [0]
    workshop.wait_begun([0, 1, 2])
    feed.close()


def test_weight_update_waits_for_the_rollout_in_progress(workshop: Any) -> None:
    feed = ahead(workshop)
    workshop.finish()
    feed.get(0)
    workshop.wait_begun([0, 1])
    entered, leave = threading.Event(), threading.Event()

    def update() -> None:
        with feed.undisturbed():
            entered.set()
            assert leave.wait(PATIENCE_S)

    thread = threading.Thread(target=update)
    thread.start()
    assert not entered.wait(0.2)  # rollout 1 is in progress
    workshop.finish()
    assert entered.wait(PATIENCE_S)
    assert feed.get(1).samples == [1]
    assert workshop.begun == [0, 1]  # rollout 2 waits for the new weights
    leave.set()
    thread.join(PATIENCE_S)
    workshop.wait_begun([0, 1, 2])
    feed.close()


def test_failed_rollout_is_raised_by_its_get(workshop: Any) -> None:
    workshop.failing = {1}
    feed = ahead(workshop)
    workshop.finish(2)
    assert feed.get(0).samples == [0]
    with pytest.raises(BackgroundDied, match="rollouts ahead died of RuntimeError: rollout 1 broke"):
        feed.get(1)
    with pytest.raises(BackgroundDied):
        raise_failures()  # other waiters see the failure too
    feed.close()
    with feed.undisturbed():
        pass  # does not wait for a thread that has ended


def test_feed_starts_at_the_resume_point_and_stops_at_the_total(workshop: Any) -> None:
    feed = ahead(workshop, start=2, total=4, ready=5)
    workshop.finish(4)
    assert [feed.get(number).samples for number in (2, 3)] == [[2], [3]]
    assert workshop.begun == [2, 3]
