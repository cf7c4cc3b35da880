"""Logs metrics from a plugin, under the import path of slime plugins.

They go to the trackers of the plugin's run: metrics.jsonl, and TensorBoard and W&B if the run uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.config.plugins.tracking import log_metrics


def init_tracking(args: Any, primary: bool = True, **kwargs: Any) -> None:
    """Do nothing: the run has opened its trackers. Existing plugins call this."""


def log(args: Any, metrics: Mapping[str, Any], step_key: str) -> None:
    """Log one record of metrics; `metrics[step_key]` is their step, else the rollout that is trained on.

    In the training processes, rank 0's metrics are stored and written when the rollout's training is done.
    """
    log_metrics(metrics, step_key)


def finish_tracking(args: Any) -> None:
    """Do nothing: the run closes its trackers when it ends."""
