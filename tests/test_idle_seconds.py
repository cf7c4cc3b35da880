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


def test_idle_time_is_step_time_minus_its_parts() -> None:
    assert idle_seconds(STEP) == pytest.approx(0.25)


def test_overlapped_generation_counts_only_its_wait_time() -> None:
    assert idle_seconds(STEP | {"perf/rollout_wait_time": 0.1, "perf/step_time": 6.0}) == pytest.approx(0.15)


def test_idle_time_of_a_step_without_training_or_weight_update() -> None:
    assert idle_seconds({"perf/step_time": 2.0, "perf/rollout_wait_time": 1.5}) == pytest.approx(0.5)


def test_straggler_time_is_limited_by_the_rollout_wait_time() -> None:
    tail = {"perf/rollout_tail_time": 3.0}
    assert straggler_seconds(tail, 4.2) == {"perf/straggler_wait_time": 3.0}
    assert straggler_seconds(tail, 0.1) == {"perf/straggler_wait_time": 0.1}, "the rest went on beside training"
    assert straggler_seconds({"perf/rollout_time": 4.0}, 4.2) == {}
