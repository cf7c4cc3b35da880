"""The live service: users who talk to a model, and a judge of what they say."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from slime.agent.live.exchange import Exchange, Verdict
from slime.agent.messages import Message
from tests.examples.conftest import EXAMPLES, modules_of


@pytest.fixture
def task() -> Iterator[Any]:
    with modules_of(EXAMPLES / "live_service") as read:
        yield read("task")


def exchange(asked: str, answer: str, then: str) -> Exchange:
    return Exchange("a", (Message("user", asked),), Message("assistant", answer), (Message("user", then),), (), {})


def test_times_are_asked_and_answered(task: Any) -> None:
    assert [task.Time(hour, 5).question for hour in (0, 1, 12, 13)] == ["12:05 am", "1:05 am", "12:05 pm", "1:05 pm"]
    assert [task.Time(hour, 5).answer for hour in (0, 1, 12, 13)] == ["00:05", "01:05", "12:05", "13:05"]
    assert len({time.question for time in task.all_times(1)}) == 24 * 12


def test_the_judge_reads_the_next_turn(task: Any) -> None:
    assert task.judge(None, exchange("1:05 pm", "13:05", "thanks, 2:00 am")) == Verdict(1.0)
    assert task.judge(None, exchange("1:05 pm", "1:05 pm", "no, 24 hours: 1:05 pm")) == Verdict(-1.0, " (24 hours)")
    assert task.judge(None, exchange("thanks, 1:05 pm", "1:05", "1:05 pm")) == Verdict(-1.0)
    assert task.judge(None, exchange("1:05 pm", "13:05", "2:00 am")) is None


def test_addresses_are_not_kept(task: Any) -> None:
    assert task.without_addresses(exchange("1:05 pm", "13:05", "thanks"))
    assert not task.without_addresses(exchange("1:05 pm tell bob@home.org", "13:05", "thanks"))
    assert not task.without_addresses(exchange("1:05 pm", "13:05", "thanks, tell bob@home.org"))


def test_the_first_model_is_shown_a_habit_and_what_a_hint_means(task: Any) -> None:
    rng, time = random.Random(1), task.Time(15, 42)
    said = [task.habit(time, rng) for _ in range(2000)]
    assert said.count("3:42 pm") / 2000 == pytest.approx(0.7, abs=0.05)
    assert said.count("15:42") / 2000 == pytest.approx(0.12, abs=0.04)
    shown = [task.demonstration([time], rng)["messages"] for _ in range(200)]
    hinted = [row[1]["content"] for row in shown if row[0]["content"].endswith("(24 hours)")]
    assert hinted
    assert set(hinted) == {"15:42"}
