from __future__ import annotations

from typing import Any

from slime.config import Config
from slime.data.sample import Sample
from slime.rollout.debug_data import completion_rows, evaluated_samples, truncate_middle

CONFIG = Config(reward_key="score", eval_reward_key="right")


def completed_sample(number: int, **changes: Any) -> Sample:
    sample = Sample(index=number, prompt=f"question {number}", response=f"answer {number}", label="7", reward=1.0)
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def test_completion_rows_are_spread_over_all_samples() -> None:
    samples = [completed_sample(number) for number in range(10)]
    rows = completion_rows(CONFIG, samples, 4)
    assert [row["prompt"] for row in rows] == ["question 0", "question 2", "question 5", "question 7"]
    assert rows[1] == {"prompt": "question 2", "response": "answer 2", "label": "7", "reward": 1.0}
    assert [row["prompt"] for row in completion_rows(CONFIG, samples[:3], 4)] == [f"question {n}" for n in range(3)]
    assert completion_rows(CONFIG, [completed_sample(0, response="")], 4) == []


def test_completion_row_converts_messages_labels_and_rewards_to_text() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    sample = completed_sample(0, prompt=messages, label=[1, 2], response="x" * 5000, reward={"score": 0.5, "right": 1})
    (row,) = completion_rows(CONFIG, [sample], 4)
    assert row["prompt"] == 'system: be brief\nuser: [{"type": "text", "text": "hi"}]'
    assert (row["label"], row["reward"]) == ("[1, 2]", 0.5)
    assert row["response"] == "x" * 666 + " … 4000 more characters … " + "x" * 334
    assert completion_rows(CONFIG, [sample], 4, evaluation=True)[0]["reward"] == 1
    assert completion_rows(Config(), [sample], 4)[0]["reward"] == '{"score": 0.5, "right": 1}'
    assert completion_rows(CONFIG, [completed_sample(0, reward=None, label=None)], 4)[0]["label"] == ""


def test_long_text_is_shortened_in_the_middle() -> None:
    assert truncate_middle("abc", 3) == "abc"
    assert truncate_middle("abcdef" + "-" * 10 + "xyz", 9) == "abcdef … 10 more characters … xyz"


def test_evaluated_samples_are_collected_from_any_evaluation_output() -> None:
    first, second, failed = completed_sample(0), completed_sample(1), completed_sample(2, response="")
    data: dict[str, Any] = {
        "math": {"rewards": [1.0], "samples": [first, [second]], "failed": [failed]},
        "own": {"rewards": [1.0]},
        "odd": {"rewards": [1.0], "samples": ["no sample"]},
        "number": 0.5,
    }
    assert evaluated_samples(data) == {"math": [first, second, failed], "own": [], "odd": []}
