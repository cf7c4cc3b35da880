"""Device nodes of this machine that a sandbox is given: what a program inside needs to use a GPU."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from slime.errors import UserError

_NVIDIA = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia[0-9]*", "nvidia-caps/nvidia-cap[0-9]*")
"""The control nodes, managed memory, the cards themselves, and the parts that a card may be divided into."""


def nvidia_devices(folder: Path = Path("/dev")) -> list[str]:
    """The nodes of this machine's NVIDIA cards and of their driver; empty where there are none."""
    return sorted(str(path) for pattern in _NVIDIA for path in folder.glob(pattern))


def checked_devices(devices: Sequence[str | Path]) -> tuple[str, ...]:
    """Their paths, if each is a character device below /dev; UserError otherwise: disks are not handed out."""
    paths = sorted({os.path.normpath(path) for path in devices})
    for path in paths:
        if not path.startswith("/dev/") or not os.path.exists(path):
            raise UserError(f"there is no device {path} to show to a sandbox: name a node below /dev that exists")
        if not stat.S_ISCHR(os.stat(path).st_mode):
            raise UserError(f"{path} is no character device: a sandbox is shown such ones only, as GPUs are")
    return tuple(paths)
