"""The folder of one run, which may be on storage that several machines share.

Invariant: at most one live run owns it. Its lock is released with the process. Some storage does not share locks
between machines, and some keeps the locks of a dead machine for a while. Therefore the owner also touches the lock file
every few seconds as a heartbeat.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from slime.cluster.watchdog.background import Repeated
from slime.errors import UserError

BEAT_S = 5.0
"""Seconds between two heartbeats."""
SILENCE_S = 20.0
"""An owner on another machine without a heartbeat for this long is dead."""
RELEASE_S = 180.0
"""Longest time that a file server may keep the lock of a dead machine (NFS: its lease, 90 s)."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOCK = ".lock"


@dataclass(frozen=True)
class Owner:
    """The process that owns, or owned, a run folder; `host` and `boot` of its machine are empty if unknown."""

    pid: str
    host: str = ""
    boot: str = ""

    @classmethod
    def here(cls) -> Self:
        boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        return cls(str(os.getpid()), socket.gethostname(), boot)

    @classmethod
    def read_from(cls, lock_fd: int) -> Self | None:
        """Read the owner from the lock file; None if the last owner released it."""
        words = os.pread(lock_fd, 512, 0).decode(errors="replace").split()
        return cls(*words[:3]) if words else None

    @property
    def is_elsewhere(self) -> bool:
        """True for an owner on another machine, whose locks may not be visible here."""
        here = Owner.here()
        return bool(self.host) and self.host != here.host and (not self.boot or self.boot != here.boot)

    def __str__(self) -> str:
        return f"process {self.pid}" + (f" on {self.host}" if self.is_elsewhere else "")


class RunDir(os.PathLike[str]):
    """Creates and locks `path`; a second run in the same folder is a `UserError`. It can be used as a path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock_fd = -1
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            lock_fd = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(
                f"the run folder {self.path} can't be written ({error.strerror}): choose another one with --output-dir"
            ) from error
        try:
            self._claim(lock_fd)
        except BaseException:
            os.close(lock_fd)
            raise
        owner = Owner.here()
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{owner.pid} {owner.host} {owner.boot}\n".encode(), 0)
        self._lock_fd = lock_fd
        self._beating = Repeated("run-folder", self._beat, BEAT_S)

    def _claim(self, lock_fd: int) -> None:
        """Take the lock; from an owner on another machine only if it has no heartbeat."""
        locked = _locked(lock_fd)
        owner = Owner.read_from(lock_fd) or Owner("unknown")
        if locked and not owner.is_elsewhere:
            return
        is_alive = not owner.is_elsewhere
        if not is_alive:  # the file is reopened for each look, as the cached attributes of an open one may be old
            first, deadline = self._touched(), time.monotonic() + SILENCE_S
            while not is_alive and time.monotonic() < deadline:
                time.sleep(min(0.5, SILENCE_S / 10))
                is_alive = self._touched() != first
        if is_alive:
            raise UserError(
                f"the run folder {self.path} is in use by a run that is still alive ({owner}): "
                "wait for it, or choose another folder with --output-dir"
            )
        deadline = time.monotonic() + RELEASE_S
        while not _locked(lock_fd):
            if time.monotonic() > deadline:
                raise UserError(
                    f"the run folder {self.path} is locked by {owner}, which has no heartbeat: make sure that it has "
                    "ended, or choose another folder with --output-dir"
                )
            time.sleep(min(1.0, BEAT_S / 5))

    def _touched(self) -> int:
        fd = os.open(self.path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # storage that is unreachable for a while: the next write reports it
            os.utime(self._lock_fd)

    @property
    def logs(self) -> Path:
        """The folder with one log file per process."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def memory(self) -> Path:
        """Used memory of devices and host, by phase of the steps."""
        return self.path / "memory.jsonl"

    @property
    def config(self) -> Path:
        """The resolved config, reloadable with --config."""
        return self.path / "config.yaml"

    @property
    def journal(self) -> Path:
        """The SQLite database of every sample from its prompt to its training step."""
        return self.path / "journal.sqlite"

    def release(self) -> None:
        """Release the folder for another run. Safe to call again."""
        if self._lock_fd >= 0:
            self._beating.stop()
            with contextlib.suppress(OSError):  # a full disk: then the next run checks for a heartbeat
                os.ftruncate(self._lock_fd, 0)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __fspath__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        return self.path / name

    def __str__(self) -> str:
        return str(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


def _locked(lock_fd: int) -> bool:
    """Try to take the lock; return True on success."""
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
