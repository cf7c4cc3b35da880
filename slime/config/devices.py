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
    installed = sum(1 for _ in _DRIVER_FOLDER.iterdir()) if _DRIVER_FOLDER.is_dir() else 0
    installed = installed or len(_query_memory())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or installed == 0:
        return installed
    chosen = [part.strip() for part in visible.split(",") if part.strip()]
    usable = chosen[: chosen.index("-1")] if "-1" in chosen else chosen
    return min(len(usable), installed)


def nvidia_gpu_memory() -> int | None:
    """Return the memory of the smallest GPU in bytes, or None if it is unknown."""
    sizes = [int(line) for line in _query_memory() if line.isdigit()]
    return min(sizes) * 2**20 if sizes else None


def _query_memory() -> list[str]:
    """Return the MiB of each GPU as nvidia-smi prints them; empty if it is not installed or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


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
