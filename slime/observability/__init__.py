"""Output of a run: its folder, metrics, progress display, logs, plots, and memory peaks."""

from pathlib import Path

__path__.append(str(Path(__file__).parents[1] / "compat" / "observability"))  # import paths of upstream
