"""tools/same_numbers.py, which compares two commits: detection and report of differences."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tools import same_numbers

(RUN,) = same_numbers.chosen_runs(["rloo"], [1], ["float32"])


def write_results(folder: Path, numbers: dict[str, float], weight: torch.Tensor) -> Path:
    folder.mkdir()
    (folder / f"{RUN.file_name}.json").write_text(json.dumps(numbers))
    save_file({"w": weight}, folder / f"{RUN.file_name}.safetensors")
    return folder


def test_reports_any_changed_bit_and_ignores_new_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, weight = {"train/loss": 0.1, "train/gap": math.nan, "train/kl": 0.0}, torch.tensor([0.0, 1.0])
    old = write_results(tmp_path / "old", numbers, weight)
    same = same_numbers.compare(RUN, old, write_results(tmp_path / "same", {**numbers, "train/new": 1.0}, weight))
    assert same.is_none
    assert same.new == ("train/new",)
    assert same_numbers.show([RUN], [same], "0123456789abcdef") == 0
    off = {"train/loss": math.nextafter(0.1, 1.0), "train/kl": -0.0}
    found = same_numbers.compare(RUN, old, write_results(tmp_path / "off", off, torch.tensor([-0.0, 1.0])))
    assert (found.numbers, found.tensors, found.size) == (3, 1, math.inf)  # one of the three is missing
    assert "train/loss: 0.1 -> 0.1000000000" in found.first
    assert same_numbers.show([RUN], [found], "0123456789abcdef") == 1
    said = capsys.readouterr().out
    assert "1 of 1 trainings have the same numbers" in said
    assert "0 of 1 trainings have the same numbers" in said


def test_weights_with_another_shape_or_dtype_differ(tmp_path: Path) -> None:
    old = write_results(tmp_path / "old", {}, torch.zeros(2))
    for name, weight in {"shape": torch.zeros(1, 2), "dtype": torch.zeros(2, dtype=torch.bfloat16)}.items():
        assert same_numbers.compare(RUN, old, write_results(tmp_path / name, {}, weight)).tensors == 1


def test_rejects_invalid_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        ([], "--against is needed"),
        (["--against", "no-such-commit"], "--against no-such-commit is no commit of"),
        (["--against", "HEAD", "--only", "nothing"], "no case has one of these words: nothing; there are: grpo"),
    ):
        with pytest.raises(SystemExit) as end:
            same_numbers.main(words)
        assert end.value.code == 2
        assert sentence in capsys.readouterr().err
