"""examples/side_by_side.py: figures, table and plot of the compared modes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.config.plugins import load_function
from tests.examples.conftest import EXAMPLES


def load(file: str, name: str) -> Any:
    return load_function(f"{EXAMPLES / file}:{name}", what=name)


def record(kind: str, number: int, **metrics: float) -> str:
    return json.dumps({"kind": kind, "step": number, "rollout_id": number, **metrics}) + "\n"


def test_figures_and_table_leave_out_the_first_three_steps(tmp_path: Path) -> None:
    figures_of, table = load("side_by_side.py", "figures_of"), load("side_by_side.py", "table")
    lines = [record("eval", 0, **{"eval/held-out": 0.25})]
    for number in range(5):
        waited = 9.0 if number < 3 else 1.0
        seconds = {"perf/step_time": 4 * waited, "perf/rollout_wait_time": waited, "perf/straggler_wait_time": 0.5}
        ages = {"rollout/staleness/mean": 1.0, "rollout/staleness/max": number, "rollout/mixed_version_frac": 0.2}
        lines.append(record("rollout", number, **seconds, **ages, **{"rollout/response_len/max": 90 + number}))
    (tmp_path / "metrics.jsonl").write_text("".join([*lines, record("eval", 5, **{"eval/held-out": 0.75})]))
    one = figures_of(tmp_path, 128)
    assert one._asdict() == {
        "samples_per_s": 32.0,
        "waited_s": 1.0,
        "straggler_s": 0.5,
        "staleness": 1.0,
        "oldest": 4,
        "mixed": pytest.approx(0.2),
        "longest": 94,
        "before": 0.25,
        "after": 0.75,
    }
    title, sync, partial = table({"sync": one, "partial": one._replace(samples_per_s=48.0)}).splitlines()
    assert title.split()[:3] == ["mode", "samples/s", "ratio"]
    assert sync.split()[:3] == ["sync", "32.0", "1.00x"]
    assert partial.split()[:3] == ["partial", "48.0", "1.50x"]
    assert partial.endswith("25.0% -> 75.0%")


def timed(rollout_id: int, seconds: float, reward: float | None) -> dict[str, Any]:
    return {"rollout_id": rollout_id, "perf/step_time": seconds, "rollout/raw_reward": reward}


def test_reward_by_seconds_sums_step_times() -> None:
    records = [timed(1, 3.0, 0.5), {"rollout_id": 1, "train/loss": 0.1}, timed(0, 2.0, 0.25), timed(2, 1.0, None)]
    reward_by_seconds = load("side_by_side.py", "reward_by_seconds")
    assert reward_by_seconds([*records, timed(3, 4.0, 0.75)]) == [(2.0, 0.25), (5.0, 0.5), (10.0, 0.75)]
    assert reward_by_seconds([{"rollout_id": 0, "rollout/raw_reward": 0.2}]) == [], "nobody knows how long these took"


def test_comparison_draws_several_runs_into_one_plot(tmp_path: Path) -> None:
    for name in ("fast", "slow"):
        (tmp_path / name).write_text("".join(json.dumps(timed(i, 1.0, i / 9)) + "\n" for i in range(9)))
    (tmp_path / "none").write_text("")
    runs = {name: tmp_path / name for name in ("fast", "slow", "none")}
    picture = load("side_by_side.py", "draw_comparison")(runs, tmp_path / "pictures/modes.png", "both")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 60_000
    assert [file.name for file in picture.parent.iterdir()] == ["modes.png"]
