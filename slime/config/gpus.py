"""How many NVIDIA GPUs this process may use, found out without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")


def nvidia_gpu_count() -> int:
    """GPUs of the machine, restricted by CUDA_VISIBLE_DEVICES."""
    installed = _installed_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or installed == 0:
        return installed
    chosen = [part.strip() for part in visible.split(",") if part.strip()]
    usable = chosen[: chosen.index("-1")] if "-1" in chosen else chosen
    return min(len(usable), installed)


def _installed_gpus() -> int:
    if _DRIVER_FOLDER.is_dir():
        found = sum(1 for _ in _DRIVER_FOLDER.iterdir())
        if found:
            return found
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0


def nvidia_gpu_memory() -> int | None:
    """Bytes of memory of the smallest GPU, or None where that cannot be found out."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes = [int(line) for line in listing.stdout.split() if line.isdigit()]
    return min(sizes) * 2**20 if sizes and listing.returncode == 0 else None
