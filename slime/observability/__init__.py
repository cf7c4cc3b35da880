"""Output of a run: its folder, metrics, progress display, logs, plots, and memory peaks."""

from __future__ import annotations

from pathlib import Path

from slime.observability.logs import configure_logging
from slime.observability.memory import MemorySampler, memory_bytes
from slime.observability.metrics import MetricsLog, read_metrics
from slime.observability.plots import draw_curves
from slime.observability.progress import Progress, print_summary
from slime.observability.run_dir import RunDir
from slime.observability.terminal import make_progress

__all__ = [
    "MemorySampler",
    "MetricsLog",
    "Progress",
    "RunDir",
    "configure_logging",
    "draw_curves",
    "make_progress",
    "memory_bytes",
    "print_summary",
    "read_metrics",
]

__path__.append(str(Path(__file__).parents[1] / "compat" / "observability"))  # import paths of upstream
