"""The folder of one run. The invariant: at most one live run owns it, by a lock that ends with the process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

from slime.errors import UserError


class RunDir(os.PathLike[str]):
    """Creates and locks `path`; a second run in the same folder is a UserError. Usable wherever a path is."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock_fd = -1
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            lock_fd = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(
                f"the run folder {self.path} can't be written ({error.strerror}): choose another one with --output-dir"
            ) from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock_fd, 64, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock_fd)
            raise UserError(
                f"the run folder {self.path} is in use by a run that is still going (process {owner}): "
                "wait for it, or choose another folder with --output-dir"
            ) from None
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = lock_fd

    @property
    def logs(self) -> Path:
        """One log file per process."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def config(self) -> Path:
        """The resolved config, reloadable with --config."""
        return self.path / "config.yaml"

    @property
    def journal(self) -> Path:
        """Every sample from its prompt to its training step; an SQLite database."""
        return self.path / "journal.sqlite"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    def release(self) -> None:
        """Give the folder free for another run. Safe to call again."""
        if self._lock_fd >= 0:
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
