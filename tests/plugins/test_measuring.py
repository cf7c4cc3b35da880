"""Tests of `slime.utils.{metric_utils,timer,logging_utils,tracking_utils}`."""

from __future__ import annotations

import asyncio
import logging
import math
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from slime.config.plugins import tracking
from slime.config.plugins.tracking import forward_metrics_to
from slime.errors import UserError
from slime.utils.logging_utils import configure_logger
from slime.utils.metric_utils import (
    compression_ratio,
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
)
from slime.utils.timer import Timer, inverse_timer, timer
from slime.utils.tracking_utils import finish_tracking, init_tracking, log


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Fake clock in seconds, which the test advances, with a fresh global timer."""
    now = [100.0]
    monkeypatch.setattr("slime.utils.timer.time.perf_counter", lambda: now[0])
    Timer.clear_instances()
    yield now
    Timer.clear_instances()


def test_timer_adds_up_seconds_by_name(clock: list[float]) -> None:
    @timer
    def work(seconds: float) -> float:
        clock[0] += seconds
        return seconds

    @timer
    async def wait(seconds: float) -> float:
        clock[0] += seconds
        return seconds

    with timer("outer"):
        assert work(2.0) == 2.0
        with inverse_timer("outer"):
            clock[0] += 10.0
        assert asyncio.run(wait(1.0)) == 1.0
    work(0.5)
    assert Timer().log_dict() == {"work": 2.5, "wait": 1.0, "outer": 3.0}
    assert Timer() is Timer()
    Timer().reset("work")
    Timer().add("wait", 4.0)
    assert Timer().log_dict() == {"wait": 5.0, "outer": 3.0}
    Timer().reset()
    assert Timer().log_dict() == {}
    with pytest.raises(ValueError, match="the timer never was not started"):
        Timer().end("never")


def test_timer_adds_up_every_call_of_a_recursive_function(clock: list[float]) -> None:
    @timer
    def countdown(n: int) -> None:
        clock[0] += 1.0
        if n:
            countdown(n - 1)

    countdown(2)
    assert Timer().log_dict() == {"countdown": 3.0 + 2.0 + 1.0}


def test_pass_rate_and_statistics_of_rewards() -> None:
    assert dict_add_prefix({"a": 1, "b": 2}, "eval/") == {"eval/a": 1, "eval/b": 2}
    rewards = [1, 0, 0, 0, 1, 1, 0.5, 0]
    found = compute_pass_rate(rewards, 4)
    assert found == compute_pass_rate(rewards, 4, num_groups=2)
    expected = {k: np.mean([1 - math.comb(4 - c, k) / math.comb(4, k) for c in (1, 2)]) for k in (1, 2, 4)}
    assert found == pytest.approx({f"pass@{k}": value for k, value in expected.items()})
    assert compute_pass_rate([1, 0], 1) == {}
    with pytest.raises(UserError, match="8 rewards are not 3 groups of 4"):
        compute_pass_rate(rewards, 4, num_groups=3)
    assert compute_statistics([3, 1, 2, 6]) == {"mean": 3.0, "median": 2.5, "max": 6.0, "min": 1.0}


def test_compression_ratio_and_repetition_of_texts() -> None:
    text = "0123456789" * 2000
    for algorithm in ("zlib", "gzip", "bz2", "lzma"):
        ratio, saved = compression_ratio(text, algorithm=algorithm)
        assert ratio > 10
        assert saved == pytest.approx(100 * (1 - 1 / ratio))
    assert compression_ratio("") == (math.inf, 0.0)
    assert has_repetition(text)
    assert not has_repetition("a text of its own")
    with pytest.raises(UserError, match="unknown algorithm 'rar'"):
        compression_ratio(text, algorithm="rar")


def test_rollout_step_can_count_train_steps() -> None:
    args = Namespace(
        wandb_always_use_train_step=False, rollout_batch_size=4, n_samples_per_prompt=4, global_batch_size=8
    )
    assert compute_rollout_step(args, 3) == 3
    args.wandb_always_use_train_step = True
    assert compute_rollout_step(args, 3) == 6


def test_metrics_go_to_the_run_that_calls_the_plugin(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_warned", set())
    outer: list[Any] = []
    inner: list[Any] = []
    metrics = {
        "rollout/step": 4,
        "time": 7,
        "a": 1,
        "b": np.float32(0.5),
        "c": torch.tensor([2.0]),
        "d": "text",
        "e": [1, 2],
    }
    init_tracking(None, primary=False, router_addr="x")
    with caplog.at_level(logging.WARNING):
        with forward_metrics_to(lambda *record: outer.append(record)):
            with forward_metrics_to(lambda *record: inner.append(record)):
                log(None, metrics, step_key="rollout/step")
                log(None, {"e": torch.zeros(2)}, step_key="rollout/step")
            log(None, {"a": 2, "step": 5}, "step")
        log(None, {"a": 3}, "train/step")
    finish_tracking(None)
    assert inner == [
        ({"rollout/step": 4, "plugin/time": 7, "a": 1, "b": 0.5, "c": 2.0, "d": "text"}, "rollout/step"),
        ({}, "rollout/step"),
    ]
    assert outer == [({"a": 2, "step": 5}, "step")]
    assert [record.getMessage() for record in caplog.records] == [
        "the metric e is a list and not logged: log numbers and texts",
        "no run calls plugins in this process: the metrics ['a'] are not logged",
    ]


def test_configure_logger_keeps_the_existing_handlers() -> None:
    before = list(logging.getLogger().handlers)
    configure_logger(prefix=" rollout")
    assert logging.getLogger().handlers == before
