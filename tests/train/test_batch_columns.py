"""Tests mask sums and finiteness scans over all samples against numpy per sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slime.train.samples import batch_columns
from slime.train.samples.batch_columns import first_not_finite, is_trained_on, mask_totals
from slime.train.samples.rollout_data import report_samples

RNG = np.random.default_rng(0)


@pytest.fixture(params=["at once", "in chunks", "in threads"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "at once":
        monkeypatch.setattr(batch_columns, "_AT_ONCE", 100)
    if request.param == "in threads":
        monkeypatch.setattr(batch_columns, "_WORTH_THREADS", 1)


@pytest.mark.usefixtures("cut")
def test_mask_totals_match_numpy() -> None:
    masks = [RNG.integers(0, 2, n).astype(np.int8) for n in (5, 0, 90, 300, 1, 99, 7, 150)]
    masks += [np.broadcast_to(np.int8(v), (n,)) for v, n in ((1, 4), (0, 200), (1, 0), (3, 50))]
    masks += [np.full(9, 0.3, np.float32), np.array([-1, 1], np.int8), np.full(40, 127, np.int8)]
    masks = [masks[place] for place in RNG.permutation(len(masks))]
    assert mask_totals(masks) == [int(mask.sum()) for mask in masks]
    assert [is_trained_on(mask) for mask in masks] == [bool(mask.any()) for mask in masks]
    assert mask_totals([]) == []


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_finds_first_non_finite_column(bad: float) -> None:
    columns = [RNG.standard_normal(n).astype(np.float32) for n in (50, 0, 70, 400, 3, 60)]
    assert first_not_finite(columns) is None
    columns[3][-1] = bad
    columns[5][0] = -bad
    assert first_not_finite(columns) == 3


@pytest.mark.usefixtures("cut")
def test_finite_columns_with_overflowing_sum_are_accepted() -> None:
    huge = np.full(30, np.finfo(np.float32).max)
    assert first_not_finite([huge, -huge, huge]) is None
    assert first_not_finite([huge, np.array([np.nan], np.float32)]) == 1


def test_non_finite_samples_are_reported_after_one_scan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    column = [torch.arange(float(length)) for length in (3, 0, 5, 2)]
    masks = [torch.ones(len(values)) for values in column]
    data = {"loss_masks": masks, "sample_indices": [7, 8, 9, 10], "response_lengths": [3, 0, 5, 2]}
    looks: list[int] = []
    isfinite = torch.isfinite
    monkeypatch.setattr(torch, "isfinite", lambda values: looks.append(values.numel()) or isfinite(values))

    def reported(positions: range) -> list[str]:
        found = [(position, column[position]) for position in positions]
        return report_samples(data, found, "log-probs", rollout_id=0, run_dir=str(tmp_path))

    assert reported(range(4)) == []
    assert looks == [10]
    column[2][4] = float("nan")
    masks[2][4] = 0
    assert reported(range(4)) == []
    column[3][0] = float("inf")
    [sentence] = reported(range(4))
    assert sentence.startswith("sample 10 has log-probs")
    assert reported(range(0)) == []
