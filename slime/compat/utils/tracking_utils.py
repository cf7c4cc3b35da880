"""Logging metrics from a plugin, under the path that slime plugins import it from.

They reach metrics.jsonl, TensorBoard and W&B of the run that the plugin is in, whichever of them the run has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.config.plugins.tracking import log_metrics


def init_tracking(args: Any, primary: bool = True, **kwargs: Any) -> None:
    """Nothing to do: the run has opened its record. Existing plugins call this."""


def log(args: Any, metrics: Mapping[str, Any], step_key: str) -> None:
    """One record of metrics; `metrics[step_key]` is their step, else the rollout that is trained on.

    In the training processes rank 0's are kept, and written when the rollout's training is done.
    """
    log_metrics(metrics, step_key)


def finish_tracking(args: Any) -> None:
    """Nothing to do: the run closes its record when it ends."""
