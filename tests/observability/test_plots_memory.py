from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.observability.memory import MemorySampler, memory_bytes
from slime.observability.plots import (
    EVAL_SCORES,
    LOSSES,
    REWARDS,
    TASK_REWARDS,
    RunPlots,
    draw_curves,
    metric_points,
    smooth,
)

RECORDS = [
    {"kind": "eval", "step": 0, "rollout_id": 0, "eval/held-out": 0.1, "eval/held-out-pass@4": 0.3},
    {"kind": "rollout", "step": 1, "rollout_id": 1, "rollout/raw_reward": 0.4},
    {"kind": "rollout", "step": 0, "rollout_id": 0, "rollout/raw_reward": 0.2, "rollout/rewards": 0.0},
    {"kind": "rollout", "step": 2, "rollout_id": 2, "rollout/raw_reward": None},
    {"kind": "eval", "step": 2, "rollout_id": 1, "eval/held-out": 0.6, "eval/held-out-truncated_ratio": 0.0,
     "eval/held-out/response_len/mean": 3.0, "eval/code": 0.5, "eval/step": 2},
]  # fmt: skip


def test_reward_eval_and_task_points_are_sorted_by_step() -> None:
    assert metric_points(RECORDS, REWARDS, "rollout_id") == {"raw_reward": [(0, 0.2), (1, 0.4)]}
    assert metric_points(RECORDS, EVAL_SCORES, "step") == {"held-out": [(0, 0.1), (2, 0.6)], "code": [(2, 0.5)]}
    of_tasks = [{"rollout_id": i, "rollout/code/raw_reward": i / 4, "rollout/a/b/raw_reward": None} for i in (1, 0)]
    of_tasks.append({"rollout_id": 2, "rollout/a/b/raw_reward": 1.0, "rollout/code/share": 0.5})
    assert metric_points([*RECORDS, *of_tasks], TASK_REWARDS, "rollout_id") == {
        "code": [(0, 0.0), (1, 0.25)],
        "a/b": [(2, 1.0)],
    }


def test_smoothing_is_a_weighted_mean() -> None:
    assert smooth([3.0, 3.0, 3.0], half_life=2) == pytest.approx([3.0, 3.0, 3.0])
    assert smooth([0.0, 1.0], half_life=1) == pytest.approx([0.0, 1.0 / 1.5])
    assert smooth([], half_life=1) == []


LOSS_RECORDS = [{"kind": "train", "step": step, "rollout_id": step, "train/loss": 2.0 - step} for step in (1, 0)]


def write(folder: Path, records: list[dict[str, Any]]) -> Path:
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return metrics


def test_reward_curve_is_drawn(tmp_path: Path) -> None:
    drawn = draw_curves(write(tmp_path, RECORDS + LOSS_RECORDS), tmp_path / "plots", "a run")
    assert drawn == {"reward curve": tmp_path / "plots" / "reward.png"}
    assert os.listdir(tmp_path / "plots") == ["reward.png"]
    data = drawn["reward curve"].read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") == 1200


def test_run_without_rewards_gets_loss_and_evaluation_curves(tmp_path: Path) -> None:
    assert metric_points(LOSS_RECORDS, LOSSES, "step") == {"loss": [(0, 2.0), (1, 1.0)]}
    evaluation = {"kind": "eval", "step": 2, "rollout_id": 1, "eval/math": 0.5}
    drawn = draw_curves(write(tmp_path, [*LOSS_RECORDS, evaluation]), tmp_path)
    assert drawn == {"reward curve": tmp_path / "reward.png", "loss curve": tmp_path / "loss.png"}
    assert all(path.is_file() for path in drawn.values())


def test_no_plot_without_points(tmp_path: Path) -> None:
    assert draw_curves(write(tmp_path, []), tmp_path) == {}
    assert not (tmp_path / "reward.png").exists()


def test_plots_are_redrawn_periodically_and_at_the_end(tmp_path: Path) -> None:
    now = [0.0]
    curves = RunPlots(write(tmp_path, RECORDS), first_s=20.0, interval_s=60.0, now=lambda: now[0])
    assert not curves.redraw()
    now[0] = 20.0
    assert curves.redraw()
    assert curves._drawing is not None
    assert curves._drawing.wait(600) == 0
    assert (tmp_path / "reward.png").is_file()
    now[0] = 79.0
    assert not curves.redraw()
    now[0] = 80.0
    assert curves.redraw()
    drawing = curves._drawing
    write(tmp_path, LOSS_RECORDS)
    assert curves.finish() == {"loss curve": tmp_path / "loss.png"}
    assert drawing.poll() is not None, "the drawing outlived the run"
    (tmp_path / "loss.png").unlink()
    assert curves.finish() == {"loss curve": tmp_path / "loss.png"}
    assert not (tmp_path / "loss.png").exists()  # the final plots are drawn only once


def test_plot_write_error_does_not_fail_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "reward.png").mkdir()
    assert RunPlots(write(tmp_path, RECORDS)).finish() == {}
    assert "could not be drawn" in caplog.text


def test_memory_bytes_counts_a_64_mib_allocation() -> None:
    before = memory_bytes([os.getpid()])
    block = mmap.mmap(-1, 64 * 2**20)
    block.write(b"x" * (64 * 2**20))
    after = memory_bytes([os.getpid()])
    block.close()
    assert 60 * 2**20 < after - before < 140 * 2**20


def test_memory_of_an_exited_process_is_zero() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert memory_bytes([gone.pid]) == 0


def test_memory_sampler_remembers_the_peak() -> None:
    code = "x = bytearray(b'x') * (100 * 2**20); print('big', flush=True); input(); del x; "
    code += "print('small', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    with MemorySampler(lambda: [child.pid], interval_s=0.01) as sampler:
        while sampler.peak_bytes == 0:
            time.sleep(0.005)
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        assert memory_bytes([child.pid]) < 100 * 2**20
        child.communicate("\n")
    assert sampler.stop() == sampler.peak_bytes >= 100 * 2**20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no signal at the parent's death")
def test_drawing_ends_with_a_killed_driver(tmp_path: Path) -> None:
    """The drawing process waits for a writer of its metrics file, a pipe, so it cannot end by itself."""
    metrics = tmp_path / "metrics.jsonl"
    os.mkfifo(metrics)
    code = (
        "import sys, time; from pathlib import Path; from slime.observability.plots import RunPlots\n"
        "curves = RunPlots(Path(sys.argv[1]), first_s=0.0); curves.redraw()\n"
        "print(curves._drawing.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(metrics)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        drawing = psutil.Process(int(driver.stdout.readline()))
        with metrics.open("w"):  # opens when the other process reads
            driver.kill()
            drawing.wait(60)
