"""Where a data source keeps its position: `<folder>/rollout/data_state_<rollout id>.json`.

Invariant: a state file is either absent or complete; it is written beside its final name, flushed, and renamed.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from slime.errors import UserError

_NAME = re.compile(r"^data_state_(\d+)\.json$")


def state_path(folder: str | Path, rollout_id: int) -> Path:
    """The state file of one rollout."""
    return Path(folder) / "rollout" / f"data_state_{rollout_id}.json"


def latest_state_path(folder: str | Path) -> Path | None:
    """The state file with the highest rollout id, or None."""
    found = saved_rollouts(folder)
    return state_path(folder, max(found)) if found else None


def saved_rollouts(folder: str | Path) -> set[int]:
    """The rollouts that have a state file."""
    names = (path.name for path in (Path(folder) / "rollout").glob("*"))
    return {int(match[1]) for name in names if (match := _NAME.match(name))}


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write all or nothing, and durably."""
    write_durably(path, json.dumps(state).encode())


def write_durably(path: Path, content: bytes) -> None:
    """Write a file so that it is found whole or not at all, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_file(path.parent)


def fsync_file(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def read_state(path: Path) -> dict[str, Any]:
    """The state in `path`; a `UserError` when it is damaged."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the saved data position is unreadable ({error}); resume from another one") from error
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds no saved data position; resume from another one")
    return state
