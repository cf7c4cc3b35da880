"""What a run shows and leaves behind: its folder, metrics, progress, logs, plots, and its peak of memory."""

from slime.observe.display import make_progress
from slime.observe.logs import configure_logging
from slime.observe.memory import MemorySampler, memory_bytes
from slime.observe.metrics import MetricsLog, read_metrics
from slime.observe.plots import draw_curves
from slime.observe.progress import Progress, print_summary
from slime.observe.run_dir import RunDir

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
