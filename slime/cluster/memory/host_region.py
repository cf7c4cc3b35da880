"""Host memory that processes of one machine share: a file in shared memory, mapped once and kept.

Invariant: its maker has every page of it before anybody is told its path, so a full machine is an `OSError` there and
never a signal later. Each process that has a GPU pins it once, so that copies run at the full speed of the bus.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import torch

from slime.cluster.memory.pinned import pin


class HostRegion:
    """The mapping of one file; `data` are its bytes."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._inode = os.fstat(descriptor).st_ino
        memory = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
        pin(memory)
        self.data = torch.from_numpy(memory)

    @classmethod
    def create(cls, path: Path, size: int) -> HostRegion:
        """A new file of so many bytes; one that was there is replaced."""
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.truncate(descriptor, size)  # macOS
            return cls(path, descriptor)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path) -> HostRegion:
        """One that another process made."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            return cls(path, descriptor)
        finally:
            os.close(descriptor)

    @property
    def is_current(self) -> bool:
        """Whether the file at the path is still this one."""
        try:
            return self.path.stat().st_ino == self._inode
        except FileNotFoundError:
            return False
