"""Staging folders of checkpoints in progress: `.iter_0000003.tmp-<process>`.

Invariant: a staging folder exists from the first file of a checkpoint until the checkpoint is complete and renamed, or
abandoned; the latest file names the checkpoint after the rename.
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
"""Time in which a renamed checkpoint becomes the latest, if it ever does."""

LEFT_BEHIND = re.compile(r"\.iter_\d{7,}\.(tmp|old)-\d+")
"""Leftovers of an interrupted write: the new folder, or the one that it was replacing."""

logger = logging.getLogger(__name__)


def staging_folder(target: Path, writer: int) -> Path:
    """Return the folder in which a process writes the future `target`."""
    return target.with_name(f".{target.name}.tmp-{writer}")


def staging_folders(target: Path) -> list[Path]:
    """List the staging folders of all processes, including leftovers."""
    return list(target.parent.glob(f".{target.name}.tmp-*"))


def wait_until_latest(target: Path, writers: str, alive: Callable[[], bool], *, timeout_s: float, flag: str) -> None:
    """Wait until a checkpoint in progress becomes the latest, as long as its size grows."""
    logger.warning("%s is being written: waiting until it is complete", target)
    before = -1
    with waiting(writers, f"to write {target}", timeout_s=timeout_s, flag=flag) as wait:
        while alive() and not wait.is_over() and (folders := staging_folders(target)):
            written = 0
            for file in (file for folder in folders for file in folder.glob("*")):
                with suppress(FileNotFoundError):  # it was renamed in the meantime
                    written += file.stat().st_size
            if written != before:
                wait.renew()
            before = written
            time.sleep(POLL_S)
    number = target.name.removeprefix("iter_")
    with waiting(writers, f"to name {target}", timeout_s=NAMING_S) as wait:
        while alive() and not wait.is_over() and read_latest(target.parent) != str(int(number)):
            time.sleep(POLL_S)
