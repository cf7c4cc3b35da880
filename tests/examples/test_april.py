"""examples/april: long-tailed lengths, the pupil, the files, the reward, and learning with partial rollouts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.config.plugins import load_function
from tests.examples.conftest import EXAMPLES, Ran


def load(file: str, name: str) -> Any:
    return load_function(f"{EXAMPLES / file}:{name}", what=name)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_countdown_marks_multiples_of_seven() -> None:
    countdown = load("april/task.py", "countdown")
    assert countdown(16) == "15 14! 13 12 11 10 9 8 7! 6 5 4 3 2 1 "
    assert countdown(8, shouts=False) == "7 6 5 4 3 2 1 "


def test_question_is_the_start_of_a_countdown() -> None:
    assert load("april/task.py", "question")(16) == "19 18 17 16 "


def test_lengths_have_a_long_tail() -> None:
    source = load("april/task.py", "starts")(random.Random(0), {20})
    drawn = sorted(next(source) for _ in range(20_000))
    assert drawn[0] == 8
    assert 150 < drawn[-1] <= 199
    assert 20 not in drawn
    assert drawn[10_000] <= 14
    assert 0.02 < sum(start > 100 for start in drawn) / len(drawn) < 0.05


def test_pupil_forgets_marks_and_held_out_prompts_are_excluded(tmp_path: Path) -> None:
    countdown = load("april/task.py", "countdown")
    files = load("april/task.py", "write_files")(tmp_path, demonstrations=800, training=300, held_out=40, seed=5)
    apart = {row["prompt"] for row in rows(files.held_out)}
    shown, training = rows(files.demonstrations), rows(files.training)
    assert (len(apart), len(shown), len(training)) == (40, 800, 300)
    assert not apart & {row["prompt"] for row in shown + training}
    assert all(row["label"] == countdown(int(row["prompt"].split()[-1])) for row in training)
    said = {
        shouts: [countdown(int(row["prompt"].split()[-1]), shouts=shouts) for row in shown] for shouts in (True, False)
    }
    forgot = [row["label"] == quiet for row, quiet in zip(shown, said[False], strict=True)]
    assert 0.5 < sum(forgot) / len(forgot) < 0.7
    assert all(row["label"] == loud for row, loud, no in zip(shown, said[True], forgot, strict=True) if not no)


def test_reward_requires_the_complete_and_terminated_answer() -> None:
    right = load("april/task.py", "right_answer")
    assert right(None, SimpleNamespace(response="8 7! 6 <|im_end|>", label="8 7! 6 ")) == 1.0
    assert right(None, SimpleNamespace(response="8 7 6 <|im_end|>", label="8 7! 6 ")) == 0.0
    assert right(None, SimpleNamespace(response="8 7! 6", label="8 7! 6 ")) == 0.0


def test_a_number_is_one_token(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    words = load("april/task.py", "countdown").__globals__["WORDS"]
    texts = load("april/task.py", "tokenizer_texts")()
    folder = load("tiny_chat.py", "make_model")(tmp_path, texts, words=words, seed=1, width=32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question, countdown = load("april/task.py", "question"), load("april/task.py", "countdown")
    for start in (8, 77, 199):
        assert len(tokenizer.encode(question(start), add_special_tokens=False)) == 4
        assert len(tokenizer.encode(countdown(start), add_special_tokens=False)) == start - 1


@pytest.mark.examples
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_partial_rollouts_learn_from_mixed_version_samples(run_example: Callable[..., Ran]) -> None:
    ran = run_example("april/run.py", "--warm-up-steps", "70", "--steps", "14", "--modes", "partial")
    assert "\npartial  " in ran.output, ran.output[-3000:]
    rewards = ran.series("rollout/raw_reward", "partial")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards
    assert max(ran.series("rollout/response_len/max", "partial")) > 60
    assert max(ran.series("rollout/staleness/max", "partial")) > 0
    assert sum(ran.series("rollout/mixed_version_frac", "partial")) > 0
    assert not any(ran.series("rollout/failed/count", "partial"))
    assert not any(ran.series("rollout/thrown_away_tokens", "partial"))
    assert (ran.folder / "modes.png").stat().st_size < 60_000
