"""examples/live_service: users who talk to a served model, and a judge of their replies."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.agent.interaction import Exchange, Verdict
from slime.agent.messages import Message
from slime.data.buffer.reader import Choice, reading
from tests.examples.conftest import EXAMPLES, Ran, modules_of


@pytest.fixture
def task() -> Iterator[Any]:
    with modules_of(EXAMPLES / "live_service") as read:
        yield read("task")


@pytest.fixture
def program() -> Iterator[Any]:
    with modules_of(EXAMPLES / "live_service") as read:
        yield read("run")


def exchange(asked: str, answer: str, then: str) -> Exchange:
    return Exchange("a", (Message("user", asked),), Message("assistant", answer), (Message("user", then),), (), {})


def test_times_convert_from_12_to_24_hours(task: Any) -> None:
    assert [task.Time(hour, 5).question for hour in (0, 1, 12, 13)] == ["12:05 am", "1:05 am", "12:05 pm", "1:05 pm"]
    assert [task.Time(hour, 5).answer for hour in (0, 1, 12, 13)] == ["00:05", "01:05", "12:05", "13:05"]
    assert len({time.question for time in task.all_times(1)}) == 24 * 12


def test_judge_scores_the_next_user_turn(task: Any) -> None:
    assert task.judge(None, exchange("1:05 pm", "13:05", "thanks, 2:00 am")) == Verdict(1.0)
    assert task.judge(None, exchange("1:05 pm", "1:05 pm", "no, 24 hours: 1:05 pm")) == Verdict(-1.0, " (24 hours)")
    assert task.judge(None, exchange("thanks, 1:05 pm", "1:05", "1:05 pm")) == Verdict(-1.0)
    assert task.judge(None, exchange("1:05 pm", "13:05", "2:00 am")) is None


def test_exchanges_with_addresses_are_filtered_out(task: Any) -> None:
    assert task.without_addresses(exchange("1:05 pm", "13:05", "thanks"))
    assert not task.without_addresses(exchange("1:05 pm tell bob@home.org", "13:05", "thanks"))
    assert not task.without_addresses(exchange("1:05 pm", "13:05", "thanks, tell bob@home.org"))


def test_demonstrations_show_the_habit_and_the_meaning_of_a_hint(task: Any) -> None:
    rng, time = random.Random(1), task.Time(15, 42)
    said = [task.habit(time, rng) for _ in range(2000)]
    assert said.count("3:42 pm") / 2000 == pytest.approx(0.7, abs=0.05)
    assert said.count("15:42") / 2000 == pytest.approx(0.12, abs=0.04)
    shown = [task.demonstration([time], rng)["messages"] for _ in range(200)]
    hinted = [row[1]["content"] for row in shown if row[0]["content"].endswith("(24 hours)")]
    assert hinted
    assert set(hinted) == {"15:42"}


def test_answer_times_are_split_into_idle_and_during_training(program: Any, tmp_path: Path) -> None:
    notes = [{"at": 10 + number, "s": 0.1 * (number + 1), "quiet": True} for number in range(4)]
    notes += [{"at": at, "s": 1.0, "quiet": False} for at in (19.5, 20.5, 40.5)]  # before, across and after the steps
    notes += [{"at": 25 + number, "s": 0.4, "quiet": False} for number in range(3)]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(note) + "\n" for note in notes))
    metrics = [{"kind": "train", "time": at} for at in (20.0, 30.0, 40.0)]
    times = program.times_of_answers(file, metrics)
    assert times.alone == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert times.beside_training == [0.4, 0.4, 0.4]
    assert times.in_words().splitlines() == [
        "without training: p50 200 ms, p95 300 ms",
        "with training beside it: p50 400 ms, p95 400 ms",
        "ratio: p50 2.00, p95 1.33",
    ]
    assert "too few" in program.Times([0.1], [0.1, 0.2]).in_words()


@pytest.mark.examples
def test_service_learns_from_users_with_consent(run_example: Callable[..., Ran], program: Any) -> None:
    ran = run_example("live_service/run.py", "--steps", "12", "--quiet", "40", "--seed", "3")
    before, *_, after = ran.series("eval/held-out")
    assert after > before + 0.4
    assert "words of users without consent on the disk: 0 files" in ran.output
    assert re.search(r"ratio: p50 \d+\.\d\d, p95 \d+\.\d\d", ran.output)
    with reading(str(ran.folder)) as journal:
        trained = [one.sample for one in journal.samples(Choice(state="consumed"))]
    assert len({sample.metadata["live"]["id"] for sample in trained}) == len(trained) == 12 * 32
    kinds = Counter((sample.reward, bool(sample.metadata["live"]["hint"])) for sample in trained)
    assert set(kinds) == {(1.0, False), (-1.0, True), (-1.0, False)}
    said = repr([(sample.prompt, sample.metadata["live"]["followed_by"]) for sample in trained])
    assert "thanks" in said
    assert "bob@home.org" not in said
    assert program.traces_of("thanks", ran.folder)  # control: the search finds words that are present
