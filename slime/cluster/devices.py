"""What this machine can compute on. Torch is imported only when asked."""

from __future__ import annotations

import os
from collections.abc import Sequence

from slime.errors import UserError


def gpu_count() -> int:
    """The number of CUDA devices visible to this process."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def resolve_device(device: str) -> str:
    """`--device` as "cpu" or "cuda"."""
    if device == "cpu":
        return "cpu"
    if device not in ("auto", "cuda"):
        raise UserError(f"--device {device} is unknown: choose auto, cpu or cuda")
    if gpu_count() > 0:
        return "cuda"
    if device == "auto":
        return "cpu"
    raise UserError("--device cuda was asked for but this machine shows no CUDA device: use --device cpu or auto")


def visible_gpus(indices: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for a child that may use these of the driver's own visible GPUs."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if own is None else [name.strip() for name in own.split(",") if name.strip()]
    available = gpu_count() if names is None else len(names)
    if indices and max(indices) >= available:
        raise UserError(
            f"GPU number {max(indices)} is needed but only {available} are visible: "
            "lower --rollout-num-gpus or --actor-num-gpus-per-node, or share the GPUs with --colocate"
        )
    return ",".join(str(index) if names is None else names[index] for index in indices)


def cpu_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_process(processes: int) -> dict[str, str]:
    """The environment that splits this machine's cores evenly among `processes`; what the user has set stays."""
    wanted = split_cores(cpu_cores(), processes)
    return {name: value for name, value in wanted.items() if name not in os.environ}


def split_cores(cores: int, processes: int) -> dict[str, str]:
    """The environment in which `processes` share `cores` evenly.

    A thread that waits for work spins for some ten microseconds and then sleeps. Engines and trainers take turns on
    the same cores: spinning for long, as is the default, takes a core from the one that works (a step of the
    quickstart then takes 1.3 times as long), and not spinning at all makes small operations slow (0.7 of the tokens/s).
    """
    return {"OMP_NUM_THREADS": str(max(1, cores // max(1, processes))), "GOMP_SPINCOUNT": "10000"}
