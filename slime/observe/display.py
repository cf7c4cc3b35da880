"""Which display a run has."""

from __future__ import annotations

from rich.console import Console

from slime.config import Config
from slime.observe.live import RichProgress
from slime.observe.progress import NoProgress, PlainProgress, Progress


def make_progress(config: Config, total: int, *, start: int = 0, title: str = "slime") -> Progress:
    """The display for `--progress`; rollouts are numbered `start` .. `total - 1`."""
    console = Console(highlight=False)
    kind = config.progress
    if kind == "auto":
        kind = "rich" if console.is_terminal else "plain"
    if kind == "none":
        return NoProgress(console, total)
    if kind == "rich":
        return RichProgress(total, start=start, title=title, console=console)
    return PlainProgress(total, start=start, console=console)
