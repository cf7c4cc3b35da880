"""A folder in shared memory for data in transit, and the removal of those that dead runs left behind.

The invariant: a staging folder is locked (flock) for as long as its owner lives, so a folder that can be locked belongs
to nobody and may go. That holds also where containers share one /dev/shm and cannot see each other's processes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Self

SHARED_MEMORY = Path("/dev/shm")
KINDS = ("weights", "shares")
"""What is in transit: weights to engines, samples to trainers."""
_LOCK = "owner.lock"

logger = logging.getLogger(__name__)


class StagingFolder:
    """A folder of this process alone; gone after `close`, or after the next run's start if this one was killed."""

    def __init__(self, root: Path, kind: str) -> None:
        if kind not in KINDS:
            raise ValueError(f"nobody would look for a folder of {kind}: choose one of {KINDS}")
        token = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        fresh = root / f".new-slime-{kind}-{token}"
        fresh.mkdir(mode=0o700)
        # Locked under a name the cleaner does not look at, then renamed: it never meets an owned, unlocked folder.
        self._lock_fd = os.open(fresh / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = fresh.rename(root / f"slime-{kind}-{token}")

    def subfolder(self, name: str) -> Path:
        """A new, empty folder inside; one left by an earlier attempt is replaced."""
        folder = self.path / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder

    def close(self) -> None:
        """Remove the folder. Safe to call again."""
        if self._lock_fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def choose_root(needed_bytes: int, preferred: Path = SHARED_MEMORY) -> tuple[Path, str]:
    """Where to stage `needed_bytes`, and why there: shared memory if it has room, else the temporary folder."""
    fallback = Path(tempfile.gettempdir())
    if not os.access(preferred, os.W_OK | os.X_OK):
        return fallback, f"{preferred} is not writable"
    free = shutil.disk_usage(preferred).free
    if free < needed_bytes:
        return fallback, f"{preferred} has {free / 2**30:.1f} GiB free and {needed_bytes / 2**30:.1f} GiB may be needed"
    return preferred, f"{preferred} has room"


def remove_stale(root: Path) -> list[Path]:
    """Remove the staging folders under `root` whose owners are gone; returns what was removed."""
    removed = []
    for folder in sorted(path for kind in KINDS for path in root.glob(f"slime-{kind}-*")):
        try:
            lock_fd = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:  # somebody else's, or being removed right now
            continue
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
            logger.info("removed %s, left behind by a run that is gone", folder)
        finally:
            os.close(lock_fd)
    return removed
