"""examples/distillation: questions without answers, agreement of the placements, and learning in both placements."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.examples.conftest import EXAMPLES, Ran, modules_of

HERE = EXAMPLES / "distillation"


@pytest.fixture
def module() -> Iterator[Callable[[str], ModuleType]]:
    with modules_of(HERE) as load:
        yield load


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_running_sums_are_modulo_ten_and_the_pupil_skips_summands(module: Callable[[str], ModuleType]) -> None:
    problem = module("task").Problem(7, (1, 4, 2, 3))
    assert (problem.question, problem.answer()) == ("1423:7", "8247")
    assert problem.answer((False, True, True, False)) == "8881"


def test_student_questions_have_no_labels_and_exclude_held_out(
    module: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    files = module("task").write_files(tmp_path, held_out=64, seed=1)
    questions, held_out = rows(files.questions), rows(files.held_out)
    assert all(list(row) == ["prompt"] for row in questions)
    assert (len(questions), len(held_out)) == (2560 - 64, 64)
    shown = {row["prompt"] for file in (files.right, files.pupil, files.questions) for row in rows(file)}
    assert not shown & {row["prompt"] for row in held_out}
    right = {row["prompt"]: row["label"] for row in rows(files.right)}
    pupil = rows(files.pupil)
    assert 0.02 < sum(right[row["prompt"]] == row["label"] for row in pupil) / len(pupil) < 0.07  # 0.45 to the fourth
    firsts = sum(right[row["prompt"]][0] == row["label"][0] for row in pupil) / len(pupil)
    assert 0.4 < firsts < 0.5


@pytest.mark.parametrize(("always", "label", "found"), [("<eos>", "", 0.75), ("3", "33333", 0.0)])
def test_accuracy_counts_only_right_and_terminated_answers(
    module: Callable[[str], ModuleType], tmp_path: Path, always: str, label: str, found: float
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = module("tiny_copying").make_model(tmp_path / "model", seed=1, width=32)
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    with torch.no_grad():  # layers add nothing, and one token always has the largest logit
        for name, weight in network.named_parameters():
            weight.fill_(0.0 if name.endswith("proj.weight") else 1.0)
        network.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids(always)] = 2.0
    network.save_pretrained(model)
    held_out = tmp_path / "held_out.jsonl"
    labels = [label, "no", label, label]
    held_out.write_text("".join(json.dumps({"prompt": "1423:7", "label": one}) + "\n" for one in labels))
    assert module("task").accuracy(model, held_out) == found


def dump(folder: Path, *samples: dict[str, Any]) -> Path:
    folder.mkdir()
    entries = [{"format": "slime-train-dump"}, *({"sample_indices": place} | row for place, row in enumerate(samples))]
    (folder / "train_0.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


def sample(tokens: list[int], said: list[float], kl: list[float]) -> dict[str, Any]:
    return {"tokens": tokens, "teacher_log_probs": said, "opd_reverse_kl": kl}


def test_agreement_compares_teacher_log_probs_and_kl(module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    placements = module("placements")
    one = dump(tmp_path / "one", sample([1, 2, 3], [-1.0, -2.0], [0.5, 0.0]), sample([1, 4], [-3.0], [1.0]))
    other = dump(tmp_path / "other", sample([1, 2, 3], [-1.0, -2.25], [0.375, 0.0]), sample([1, 5], [-9.0], [1.0]))
    none = dump(tmp_path / "none", sample([9], [0.0], [0.0]))
    found = placements.agreement(one, other)
    assert found == (0.5, 0.25, 0.125)
    assert not found.holds(alike=0.98, apart=0.5)
    assert not found.holds(alike=0.5, apart=0.2)
    assert found.holds(alike=0.5, apart=0.25)
    assert not placements.agreement(one, none).holds(alike=0.0, apart=100.0)


@pytest.mark.parametrize(
    ("after", "said", "code"), [((0.9, 0.95), -2.0, 0), ((0.9, 0.6), -2.0, 1), ((0.9, 0.95), -2.1, 1)]
)
def test_exit_code_depends_on_both_placements_and_their_agreement(
    module: Callable[[str], ModuleType], tmp_path: Path, after: tuple[float, float], said: float, code: int
) -> None:
    for name, score, log_prob in zip(("engine", "trainer"), after, (-2.0, said), strict=True):
        folder = dump(tmp_path / name, sample([1, 2], [log_prob], [0.5]))
        records: list[dict[str, Any]] = [
            {"kind": "eval", "step": 0, "eval/held-out": 0.2},
            {"kind": "rollout", "rollout_id": 0, "step": 0, "rollout/opd_reverse_kl": 0.5},
            {"kind": "eval", "step": 1, "eval/held-out": score},
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    args = Namespace(output_dir=tmp_path, placements=["engine", "trainer"])
    assert module("run").report(args, 1.0, 0.5) == code


@pytest.mark.examples
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_student_learns_without_rewards_in_both_placements(
    run_example: Callable[..., Ran], module: Callable[[str], ModuleType]
) -> None:
    ran = run_example("distillation/run.py", "--steps", "6", "--eval-interval", "6", "--seed", "3")
    for place in ("engine", "trainer"):
        before, after = ran.series("eval/held-out", place)
        assert after > before + 0.3, (place, before, after)
        assert set(ran.series("rollout/raw_reward", place)) == {0.0}
        kl = ran.series("rollout/opd_reverse_kl", place)
        assert len(kl) == 6
        assert sum(kl[-2:]) < 0.5 * sum(kl[:2]), kl
    same = module("placements").agreement(ran.folder / "engine", ran.folder / "trainer")
    assert same.alike >= 0.98
    assert same.apart < 1e-3
    assert same.kl_apart < 1e-3
    first = [ran.series("rollout/teacher_log_probs", place)[0] for place in ("engine", "trainer")]
    assert first[0] == pytest.approx(first[1], abs=0.05)
    assert (ran.folder / "curve.png").stat().st_size < 60_000
