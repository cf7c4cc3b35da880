"""Where the seconds of a step went, told from its metrics."""

from __future__ import annotations

from typing import Any


def idle_seconds(metrics: dict[str, Any]) -> float:
    """What of a step was none of its parts: neither engines nor trainers had anything to do."""
    waited = metrics["perf/rollout_wait_time"]
    generating = min(waited, metrics.get("perf/rollout_time", waited))  # in asynchronous modes it goes on besides
    parts = ("perf/train_time", "perf/update_weights_time", "perf/switch_time")
    known = sum(metrics.get(name, 0.0) for name in parts)
    return max(0.0, float(metrics["perf/step_time"] - generating - known))


def straggler_seconds(metrics: dict[str, Any], waited: float) -> dict[str, float]:
    """How long the trainers waited for the last tenth of a rollout: both the wait and that tenth end with the rollout.

    Nothing where it is not known, as with a rollout function of the user's.
    """
    tail = metrics.get("perf/rollout_tail_time")
    return {} if tail is None else {"perf/straggler_wait_time": min(waited, tail)}
