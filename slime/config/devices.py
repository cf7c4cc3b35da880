"""Count NVIDIA GPUs and their memory without importing torch, and parse `--plan-cluster` (`8x8x80`)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")


def nvidia_gpu_count() -> int:
    """Count the GPUs of the machine, restricted by CUDA_VISIBLE_DEVICES."""
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
    """Return the memory of the smallest GPU in bytes, or None if it is unknown."""
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


_CLUSTER_PATTERN = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)")


@dataclass(frozen=True)
class PlannedCluster:
    """The cluster of `--plan-cluster`, which does not have to exist."""

    nodes: int
    gpus_per_node: int
    gpu_memory: int
    """Bytes."""

    @classmethod
    def parse(cls, text: str) -> PlannedCluster:
        """Parse nodes, GPUs per node and GiB per GPU, separated by x."""
        match = _CLUSTER_PATTERN.fullmatch(text)
        assert match is not None, "checked with the flags"
        nodes, gpus, gib = map(int, match.groups())
        return cls(nodes, gpus, gib * 2**30)

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.nodes} x {self.gpus_per_node} GPUs of {self.gpu_memory // 2**30} GiB"


def check_planned_cluster(text: str) -> str | None:
    """Check a value of --plan-cluster; return the rest of an error sentence, or None."""
    return None if _CLUSTER_PATTERN.fullmatch(text) else "must be nodes, GPUs per node and GiB per GPU, such as 8x8x80"
