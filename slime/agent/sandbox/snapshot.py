"""A prepared file tree that many sandboxes start from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime.errors import UserError


@dataclass(frozen=True)
class Snapshot:
    """A folder that no sandbox changes: each writes over it, into a layer of its own.

    `root`: it is a whole root file system, and becomes the sandbox's; else it becomes the working folder. All of it
    belongs to the sandbox's user inside. `how`: laid over where the kernel can, else copied; or one of the two.
    """

    path: Path
    """A text is taken too."""
    root: bool = False
    how: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        if not self.path.is_dir():
            raise UserError(f"there is no folder {self.path} to start sandboxes from: prepare it first")
        if self.how not in ("auto", "overlay", "copy"):
            raise UserError(f"a snapshot is taken by auto, overlay or copy, not {self.how!r}")
