"""Idle time of a step, and time spent waiting for the last responses of a rollout."""

import pytest

from slime.observability.metrics import idle_seconds, straggler_seconds

STEP = {
    "perf/step_time": 10.0,
    "perf/rollout_wait_time": 4.2,
    "perf/rollout_time": 4.0,
    "perf/train_time": 5.0,
    "perf/update_weights_time": 0.5,
    "perf/switch_time": 0.25,
}


def test_what_is_left_of_a_step() -> None:
    assert idle_seconds(STEP) == pytest.approx(0.25)


def test_generation_that_goes_on_beside_training_counts_as_far_as_it_was_waited_for() -> None:
    assert idle_seconds(STEP | {"perf/rollout_wait_time": 0.1, "perf/step_time": 6.0}) == pytest.approx(0.15)


def test_a_step_without_training_or_weights() -> None:
    assert idle_seconds({"perf/step_time": 2.0, "perf/rollout_wait_time": 1.5}) == pytest.approx(0.5)


def test_stragglers_are_waited_for_as_long_as_anybody_waits() -> None:
    tail = {"perf/rollout_tail_time": 3.0}
    assert straggler_seconds(tail, 4.2) == {"perf/straggler_wait_time": 3.0}
    assert straggler_seconds(tail, 0.1) == {"perf/straggler_wait_time": 0.1}, "the rest went on beside training"
    assert straggler_seconds({"perf/rollout_time": 4.0}, 4.2) == {}
