"""Metrics of a run: `metrics.jsonl` is the record, TensorBoard and W&B are views of it.

Invariants: one line is one whole JSON object without NaN. The lines of a resumed run are those that an uninterrupted
run would have written (records of rollouts that are repeated are dropped first). The file of an earlier, unrelated run
in the same folder is renamed, never overwritten. The same holds for `completions.jsonl`, the record of the few
completions that the views show as tables.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from slime.config import Config
from slime.observability.trackers import TensorBoardTracker, WandbTracker
from slime.storage.json_types import JsonMapping, JsonObject

Scalar = float | int | str | None


class MetricsLog:
    """Writes records `{"kind", "step", "rollout_id", "time", <name>: <value>, ...}`.

    `start_rollout_id` is the first rollout of this process: 0 for a new run, otherwise earlier records are kept and
    continued. With `again` the existing records belong to this run even if it starts at 0. A value that is not finite
    becomes null, and is counted in `nonfinite` and in the record's `nonfinite_values`.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], config: Config, *, start_rollout_id: int = 0, again: bool = False
    ) -> None:
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self.completions = folder / "completions.jsonl"
        self.nonfinite = 0
        kept, completions = (_keep_records(path, start_rollout_id, again) for path in (self.path, self.completions))
        self.kept: list[JsonObject] = kept
        """Records that an earlier attempt of the run has written."""
        self.wandb_run_id: str | None = None
        self._trackers: list[TensorBoardTracker | WandbTracker] = []
        if config.use_tensorboard:
            names = [name for name in (config.tb_project_name, config.tb_experiment_name) if name]
            self._trackers.append(TensorBoardTracker(Path(folder, "tensorboard", *names), kept, completions))
        if config.use_wandb:
            tracker = WandbTracker(config, folder)
            self.wandb_run_id = tracker.run_id
            self._trackers.append(tracker)
        self._file = self.path.open("a", encoding="utf-8")
        self._lock = threading.Lock()  # plugins log from their own threads

    def log(
        self, metrics: JsonMapping, step: int, kind: str = "rollout", *, rollout_id: int | None = None
    ) -> JsonObject:
        """Write one record. `step` counts rollouts for the kinds "rollout", "eval" and "perf", and optimizer steps for
        "train", with `rollout_id` as the rollout that the step belongs to."""
        record: JsonObject = {"kind": kind, "step": step, "rollout_id": step if rollout_id is None else rollout_id}
        record["time"] = round(time.time(), 3)
        values: dict[str, Scalar] = {}
        for name, value in metrics.items():
            if value is None or isinstance(value, bool | int | float | str):
                values[name] = value
            elif isinstance(value, np.generic) or getattr(value, "ndim", None) == 0:
                values[name] = value.item()
            else:
                raise TypeError(
                    f"metric {name} is a {type(value).__name__}: only single numbers and texts can be logged"
                )
        bad = sum(isinstance(value, float) and not math.isfinite(value) for value in values.values())
        record |= {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        if bad:
            record["nonfinite_values"] = bad
        line = json.dumps(record, allow_nan=False) + "\n"
        with self._lock:
            self.nonfinite += bad
            self._file.write(line)
            self._file.flush()
            for tracker in self._trackers:
                tracker.write(record)
        return record

    def log_completions(self, name: str, rows: Sequence[JsonMapping], step: int, kind: str, *, rollout_id: int) -> None:
        """Write one table, `<name>/completions`, of rows `{"prompt", "response", "label", "reward"}`, unless empty."""
        if not rows:
            return
        record = {"kind": kind, "step": step, "rollout_id": rollout_id, "time": round(time.time(), 3), "name": name}
        table: list[dict[str, Scalar]] = []
        for row in rows:
            cells: dict[str, Scalar] = {}
            for key, value in row.items():
                if isinstance(value, str):
                    value = value.encode("utf-8", "replace").decode("utf-8")  # not all text is valid UTF-8
                cells[key] = str(value) if isinstance(value, float) and not math.isfinite(value) else value
            table.append(cells)
        record["rows"] = table
        with self.completions.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
        for tracker in self._trackers:
            tracker.write_completions(record)

    def close(self) -> None:
        """Close the file and all views. Safe to call again."""
        self._file.close()
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[JsonObject]:
    """Read all complete records of a metrics file; a last line that a crash cut off is left out."""
    records = []
    with Path(path).open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                records.append(json.loads(line))
    return records


def _keep_records(path: Path, start_rollout_id: int, again: bool) -> list[JsonObject]:
    """Prepare the file for appending: keep the records before `start_rollout_id`, or rename the whole file."""
    if not path.exists():
        return []
    if start_rollout_id == 0 and not again:
        number = 1
        while (unused := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        path.rename(unused)
        return []
    kept = [record for record in read_metrics(path) if record["rollout_id"] < start_rollout_id]
    rewritten = path.with_name(path.name + ".tmp")
    with rewritten.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    rewritten.replace(path)
    return kept


def idle_seconds(metrics: JsonObject) -> float:
    """Return the seconds of a step in which neither engines nor trainers worked."""
    waited = metrics["perf/rollout_wait_time"]
    generating = min(waited, metrics.get("perf/rollout_time", waited))  # in asynchronous modes it overlaps training
    parts = ("perf/train_time", "perf/update_weights_time", "perf/switch_time")
    known = sum(metrics.get(name, 0.0) for name in parts)
    return max(0.0, float(metrics["perf/step_time"] - generating - known))


def straggler_seconds(metrics: JsonObject, waited: float) -> dict[str, float]:
    """Return the seconds that the trainers waited for the last tenth of a rollout, as a metric.

    Both the wait and the last tenth end with the rollout. Empty if its time is unknown, as with a user's rollout
    function.
    """
    tail = metrics.get("perf/rollout_tail_time")
    return {} if tail is None else {"perf/straggler_wait_time": min(waited, tail)}
