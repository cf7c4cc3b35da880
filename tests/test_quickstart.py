"""Data, model and verdict of the quickstart. benchmarks/quickstart_seeds.py and `make quickstart` test learning."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", QUICKSTART / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def arithmetic() -> ModuleType:
    return load("arithmetic")


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("a", "b", "right", "forgetful"),
    [(47, 85, "231", "22"), (12, 34, "64", "64"), (19, 13, "23", "22"), (90, 20, "011", "01"), (99, 99, "891", "88")],
)
def test_sums_are_written_ones_digit_first(arithmetic: ModuleType, a: int, b: int, right: str, forgetful: str) -> None:
    assert arithmetic.added(a, b) == right
    assert arithmetic.added_without_carrying(a, b) == forgetful


def test_held_out_sums_are_in_no_other_file(arithmetic: ModuleType, tmp_path: Path) -> None:
    problems = arithmetic.write_problems(tmp_path, held_out=300, seed=3)
    held_out = {row["prompt"] for row in rows(problems.held_out)}
    training = {row["prompt"] for row in rows(problems.training)}
    pupil = {row["prompt"] for row in rows(problems.warm_up)}
    assert len(held_out) == 300
    assert len(training) == 7800
    assert pupil == training
    assert not held_out & training


def test_warm_up_data_drops_the_carry_at_the_documented_rate(arithmetic: ModuleType, tmp_path: Path) -> None:
    problems = arithmetic.write_problems(tmp_path, held_out=300, seed=1)
    forgot, had_to_carry = 0, 0
    for row in rows(problems.warm_up):
        a, b = map(int, row["prompt"].removesuffix("=").split("+"))
        right, forgetful = arithmetic.added(a, b), arithmetic.added_without_carrying(a, b)
        assert row["label"] in (right, forgetful)
        had_to_carry += right != forgetful
        forgot += right != forgetful and row["label"] == forgetful
    assert forgot / had_to_carry == pytest.approx(arithmetic.FORGETS, abs=0.02)


def test_printed_model_size_is_correct(arithmetic: ModuleType, tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = arithmetic.make_model(tmp_path / "model", seed=1)
    with safe_open(folder / "model.safetensors", "np") as weights:
        count = sum(weights.get_tensor(name).size for name in weights.keys())  # noqa: SIM118
    assert f"a model of {count / 1e6:.1f} M parameters" in (QUICKSTART / "run.py").read_text()


def test_verdict_depends_on_the_final_accuracy() -> None:
    run = load("run")
    assert run.verdict(0.3, 0.95).startswith("It learned to add: of 300 sums it never trained on it answers 95.0%")
    assert run.verdict(0.3, 0.89).startswith("It did not learn to add (90% is expected)")


def test_importing_the_run_script_does_not_import_torch() -> None:
    code = f"import sys; sys.path.insert(0, {str(QUICKSTART)!r}); import run; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
