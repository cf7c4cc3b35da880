"""examples/side_by_side.py: figures and table of the compared modes."""

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
