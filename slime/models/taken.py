"""Paths at which a folder cannot be saved, because something is there that no run put there."""

from __future__ import annotations

from pathlib import Path

from slime.errors import UserError
from slime.owned import not_from_a_run


class FolderTaken(UserError):
    """There is something at the path of a folder to be saved that no run put there."""


def refuse_to_replace(target: Path) -> None:
    """Raise for a path with anything else than what a run saved there."""
    if target.exists() and not target.is_dir():
        raise FolderTaken(f"{target} is a file: choose another path for the saved model")
    stranger = not_from_a_run(target)
    if stranger is not None:
        raise FolderTaken(f"{target} has {stranger}, which no run saved there: choose another path for the saved model")
