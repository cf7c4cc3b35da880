"""Word problems of examples/smollm2: correct labels, disjoint split, reward from the last number."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import slime
from slime.config.plugins import load_function
from slime.data.sample import Sample
from slime.driver.inputs import TrainingResult

FILE = Path(__file__).resolve().parents[1] / "examples/smollm2/word_problems.py"


@pytest.mark.parametrize(
    ("response", "reward"), [("12", 1.0), ("5 + 7 = 12.", 1.0), ("12 or 13", 0.0), ("112", 0.0), ("twelve", 0.0)]
)
def test_reward_compares_the_last_number_with_the_label(response, reward) -> None:
    right_answer = load_function(f"{FILE}:right_answer", what="--custom-rm-path", params=("args", "sample"))
    assert right_answer(None, Sample(response=response, label="12")) == reward


def test_thousands_separators_are_part_of_a_number() -> None:
    last_number = load_function(f"{FILE}:last_number", what="last_number")
    assert last_number("3 and 1,250") == "1250"


def test_questions_have_correct_labels_and_no_overlap(tmp_path) -> None:
    write_questions = load_function(f"{FILE}:write_questions", what="write_questions")
    training, held_out = write_questions(tmp_path, training=300, held_out=50, seed=7)
    rows = {path: [json.loads(line) for line in path.read_text().splitlines()] for path in (training, held_out)}
    assert (len(rows[training]), len(rows[held_out])) == (300, 50)
    facts = {}
    for path in rows:
        for row in rows[path]:
            a, b = (int(number) for number in re.findall(r"\d+", row["messages"][-1]["content"]))
            kind = row["metadata"]["kind"]
            assert row["label"] == str(a + b if kind == "+" else a - b)
            assert int(row["label"]) > 0
            facts.setdefault(path, set()).add((kind, max(a, b), min(a, b)))
    assert len(facts[held_out]) == 50
    assert not facts[held_out] & facts[training]


def test_example_sets_no_dtype_flags(tmp_path, monkeypatch) -> None:
    """bfloat16 is 40 times slower than float32 on a CPU without units for it, so slime chooses the dtype."""
    flags: dict[str, object] = {}

    def remembered(**given):
        flags.update(given)
        return TrainingResult(tmp_path, evaluations=[(0, {"eval/held-out": 0.1})])

    main = load_function(f"{FILE.with_name('run.py')}:main", what="main")
    monkeypatch.setitem(main.__globals__, "convert", lambda folder: folder)
    monkeypatch.setattr(slime, "run", remembered)
    monkeypatch.setattr("sys.argv", ["run.py", "--output-dir", str(tmp_path)])
    assert main() == 0
    assert flags["device"] == "cpu"
    assert not {"dtype", "rollout_dtype"} & flags.keys()
