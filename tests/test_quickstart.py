"""Data, model and verdict of the quickstart. benchmarks/quickstart_seeds.py and `make quickstart` test learning."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from slime.cli import main
from slime.quickstart import arithmetic, verdict

ROOT = Path(__file__).parents[1]


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("a", "b", "right", "without_carry"),
    [(47, 85, "231", "22"), (12, 34, "64", "64"), (19, 13, "23", "22"), (90, 20, "011", "01"), (99, 99, "891", "88")],
)
def test_sums_are_written_ones_digit_first(a: int, b: int, right: str, without_carry: str) -> None:
    assert arithmetic.added(a, b) == right
    assert arithmetic.added_without_carrying(a, b) == without_carry


def test_held_out_sums_are_in_no_other_file(tmp_path: Path) -> None:
    problems = arithmetic.write_problems(tmp_path, held_out=300, seed=3)
    held_out = {row["prompt"] for row in rows(problems.held_out)}
    training = {row["prompt"] for row in rows(problems.training)}
    warm_up = {row["prompt"] for row in rows(problems.warm_up)}
    assert len(held_out) == 300
    assert len(training) == 7800
    assert warm_up == training
    assert not held_out & training


def test_warm_up_data_drops_the_carry_at_the_documented_rate(tmp_path: Path) -> None:
    problems = arithmetic.write_problems(tmp_path, held_out=300, seed=1)
    dropped, has_carry = 0, 0
    for row in rows(problems.warm_up):
        a, b = map(int, row["prompt"].removesuffix("=").split("+"))
        right, without_carry = arithmetic.added(a, b), arithmetic.added_without_carrying(a, b)
        assert row["label"] in (right, without_carry)
        has_carry += right != without_carry
        dropped += right != without_carry and row["label"] == without_carry
    assert dropped / has_carry == pytest.approx(arithmetic.CARRY_DROPPED, abs=0.02)


def test_printed_model_size_is_correct(tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = arithmetic.make_model(tmp_path / "model", seed=1)
    with safe_open(folder / "model.safetensors", "np") as weights:
        count = sum(weights.get_tensor(name).size for name in weights.keys())  # noqa: SIM118
    text = (ROOT / "slime/quickstart/__init__.py").read_text()
    assert f"a model of {count / 1e6:.1f} M parameters" in text


def test_verdict_depends_on_the_final_accuracy() -> None:
    assert verdict(0.3, 0.95).startswith("It learned to add: of 300 held-out sums it answers 95.0% right")
    assert verdict(0.3, 0.89).startswith("It did not learn to add (90% is expected)")
    assert verdict(0.3, 0.4, is_short=True).startswith("A short run: of 300 held-out sums")


def test_help_and_wrong_sizes_need_no_torch(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from slime.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    for words, expected in ((["--help"], "0 False"), (["--steps", "-1"], "2 False")):
        done = subprocess.run(
            [sys.executable, "-c", code, "quickstart", *words], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == expected
    assert main(["quickstart", "--steps", "-1"]) == 2
    assert "--steps -1: must be at least 0" in capfd.readouterr().err


@pytest.mark.processes
def test_quickstart_runs_from_a_wheel_in_an_empty_folder(tmp_path: Path) -> None:
    """The dependencies come from the environment of the tests, slime from the wheel."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(copied(tmp_path))],
        check=True,
    )
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    (wheel,) = tmp_path.glob("slime-*.whl")
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True)
    packages = next((environment / "lib").glob("python*")) / "site-packages"
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        [str(environment / "bin" / "slime"), "quickstart", "--steps", "2", "--warmup-steps", "3"],
        cwd=empty,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("A short run: of 300 held-out sums")
    assert (empty / "outputs/quickstart/model/model.safetensors").is_file()
    where = subprocess.run([str(python), "-c", "import slime; print(slime.__file__)"], cwd=empty, capture_output=True)
    assert Path(where.stdout.decode().strip()).is_relative_to(environment)


def copied(folder: Path) -> Path:
    """Return a copy of what a wheel is made of; the build writes beside its sources."""
    source = folder / "source"
    for name in ("pyproject.toml", "README.md", "LICENSE", "slime"):
        place = ROOT / name
        if place.is_dir():
            shutil.copytree(place, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            source.mkdir(exist_ok=True)
            shutil.copy(place, source / name)
    return source
