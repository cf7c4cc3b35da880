"""Staging folders in shared memory for data in transit, and removal of those that dead runs left behind.

Invariant: a staging folder is locked (flock) while its owner lives, so a folder that can be locked has no owner and can
be deleted. This also holds if containers share one /dev/shm and cannot see each other's processes.
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
"""The data in transit: weights to engines, samples to trainers."""
_LOCK = "owner.lock"

logger = logging.getLogger(__name__)


class StagingFolder:
    """A folder owned by this process; `close` removes it, or the next run if this one was killed."""

    def __init__(self, root: Path, kind: str) -> None:
        if kind not in KINDS:
            raise ValueError(f"unknown kind of staging folder {kind}: choose one of {KINDS}")
        token = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        fresh = root / f".new-slime-{kind}-{token}"
        fresh.mkdir(mode=0o700)
        # Locked under a name that the cleaner ignores, then renamed: the cleaner never sees an owned, unlocked folder.
        self._lock_fd = os.open(fresh / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = fresh.rename(root / f"slime-{kind}-{token}")

    def subfolder(self, name: str) -> Path:
        """Make an empty folder inside; one left by an earlier attempt is replaced."""
        folder = self.path / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        if self._lock_fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def choose_root(needed_bytes: int, preferred: Path = SHARED_MEMORY) -> tuple[Path, str]:
    """Choose a folder to stage `needed_bytes` (shared memory, else the temporary folder); return it with the reason."""
    fallback = Path(tempfile.gettempdir())
    if not os.access(preferred, os.W_OK | os.X_OK):
        return fallback, f"{preferred} is not writable"
    free = shutil.disk_usage(preferred).free
    if free < needed_bytes:
        return fallback, f"{preferred} has {free / 2**30:.1f} GiB free and {needed_bytes / 2**30:.1f} GiB may be needed"
    return preferred, f"{preferred} has room"


def remove_stale(root: Path) -> list[Path]:
    """Remove the staging folders under `root` whose owners are gone; return the removed ones."""
    removed = []
    for folder in sorted(path for kind in KINDS for path in root.glob(f"slime-{kind}-*")):
        try:
            lock_fd = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:  # owned by another user, or being removed right now
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
