"""Memory peaks per phase of a step."""

from __future__ import annotations

import json
from pathlib import Path

from slime.observability.memory import PhaseMemory, host_used_bytes
from slime.observability.plots import draw_curves, memory_points

GIB = 2**30


def test_memory_peak_is_attributed_to_its_phase(tmp_path: Path) -> None:
    now = {"device": 1 * GIB, "host": 4 * GIB}
    used = {"device": lambda: now["device"], "host": lambda: now["host"]}
    with PhaseMemory(tmp_path / "memory.jsonl", used, interval_s=3600) as memory:
        memory.enter("rollout")
        now["device"] = 50 * GIB
        memory.enter("train")
        now["device"] = 20 * GIB
        peaks = memory.peaks()
        assert peaks == {
            "perf/device_memory_start_peak_gib": 1,
            "perf/host_memory_start_peak_gib": 4,
            "perf/device_memory_rollout_peak_gib": 50,
            "perf/host_memory_rollout_peak_gib": 4,
            "perf/device_memory_train_peak_gib": 50,
            "perf/host_memory_train_peak_gib": 4,
        }
        assert memory.peaks() == {"perf/device_memory_train_peak_gib": 20, "perf/host_memory_train_peak_gib": 4}
    rows = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
    assert [(row["phase"], row["device"]) for row in rows] == [
        ("start", 1.0),
        ("rollout", 1.0),
        ("rollout", 50.0),
        ("train", 50.0),
        ("train", 20.0),
    ]


def test_memory_points_cover_the_last_seconds_and_are_plotted(tmp_path: Path) -> None:
    rows = [{"t": float(t), "phase": "train" if t % 2 else "rollout", "host": 1.0 + t, "device": 2.0} for t in range(9)]
    file = tmp_path / "memory.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"t": 9.0, "pha')
    assert [row["t"] for row in memory_points(file, last_s=3.0) or []] == [5.0, 6.0, 7.0, 8.0]
    drawn = draw_curves(tmp_path / "metrics.jsonl", tmp_path)
    assert drawn == {"memory": tmp_path / "memory.png"}
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_host_used_bytes_is_plausible() -> None:
    assert 2**20 < host_used_bytes() < 2**50
