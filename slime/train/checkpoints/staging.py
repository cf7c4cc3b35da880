"""Checkpoints that are not in their place yet, as anybody sees them in the folder: `.iter_0000003.tmp-<process>`.

Invariant: such a folder is there from the first file of a checkpoint until it is whole and gets its name, or was given
up; the latest file names it after that.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slime.cluster.watchdog import waiting
from slime.config.model_folder import read_latest

POLL_S = 0.2
NAMING_S = 5.0
"""A folder that is in its place is named as the latest at once, or never."""

LEFT_BEHIND = re.compile(r"\.iter_\d{7,}\.(tmp|old)-\d+")
"""What a write that was broken off may leave: the new folder, or the one that it was about to replace."""

logger = logging.getLogger(__name__)


def staging_folder(target: Path, writer: int) -> Path:
    """Where a process writes what will be `target`."""
    return target.with_name(f".{target.name}.tmp-{writer}")


def staging_folders(target: Path) -> list[Path]:
    """Those that any process writes, or left behind."""
    return list(target.parent.glob(f".{target.name}.tmp-*"))


def let_end(target: Path, whom: str, alive: Callable[[], bool], *, timeout_s: float, flag: str) -> None:
    """Give a checkpoint that is being written the time to become the latest, as long as it gets on."""
    logger.warning("%s is being written: waiting until it is whole", target)
    before = -1
    with waiting(whom, f"to write {target}", timeout_s=timeout_s, flag=flag) as wait:
        while alive() and not wait.is_over() and (written := _bytes_written(target)) is not None:
            if written != before:
                wait.renew()
            before = written
            time.sleep(POLL_S)
    with waiting(whom, f"to name {target}", timeout_s=NAMING_S) as wait:
        while alive() and not wait.is_over() and not _is_latest(target):
            time.sleep(POLL_S)


def _bytes_written(target: Path) -> int | None:
    """How much there is of a checkpoint under way; None when it is in its place, or was given up."""
    folders = staging_folders(target)
    if not folders:
        return None
    total = 0
    for file in (file for folder in folders for file in folder.glob("*")):
        with suppress(FileNotFoundError):  # it went into its place meanwhile
            total += file.stat().st_size
    return total


def _is_latest(target: Path) -> bool:
    return read_latest(target.parent) == str(int(target.name.removeprefix("iter_")))
