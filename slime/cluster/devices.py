"""Devices, CPU cores and compute precision of this machine.

Torch is imported only inside the functions that need it. CPU features come from what the operating system reports;
nothing is measured.

Invariant: the dtype of a run is a function of the flags, the device, the model size and this machine, so trainers,
engines and the plan choose the same one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from slime.errors import UserError


def gpu_count() -> int:
    """Return the number of CUDA devices visible to this process."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def resolve_device(device: str) -> str:
    """Resolve `--device` to "cpu" or "cuda"."""
    if device == "cpu":
        return "cpu"
    if device not in ("auto", "cuda"):
        raise UserError(f"--device {device} is unknown: choose auto, cpu or cuda")
    if gpu_count() > 0:
        return "cuda"
    if device == "auto":
        return "cpu"
    raise UserError("--device cuda: this machine shows no CUDA device; use --device cpu or auto")


def visible_gpus(indices: Sequence[int]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a child that may use these of the driver's visible GPUs."""
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
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_process(processes: int) -> dict[str, str]:
    """Return the environment that splits this machine's cores evenly; variables that are already set stay."""
    wanted = split_cores(cpu_cores(), processes)
    return {name: value for name, value in wanted.items() if name not in os.environ}


def split_cores(cores: int, processes: int) -> dict[str, str]:
    """Return the environment in which `processes` share `cores` evenly.

    An OpenMP thread without work spins for about ten microseconds and then sleeps. Engines and trainers use the same
    cores in turn: the long default spin takes a core from the busy process (a step of the quickstart takes 1.3 times as
    long), and no spin at all slows small operations (0.7 of the tokens/s).
    """
    return {"OMP_NUM_THREADS": str(max(1, cores // max(1, processes))), "GOMP_SPINCOUNT": "10000"}


CPUINFO = Path("/proc/cpuinfo")

BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16", "bf16")
"""Linux's names of bfloat16 units: Intel tiles, Intel and AMD vectors, Arm (Graviton3, Grace, newer Neoverse)."""


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Parse the features of the first core from /proc/cpuinfo: `flags` on x86, `Features` on Arm."""
    for line in cpuinfo.splitlines():
        name, _, words = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return frozenset(words.split())
    return frozenset()


def bfloat16_unit(*, platform: str = sys.platform, cpuinfo: Path = CPUINFO) -> str | None:
    """Return the unit with which this CPU multiplies bfloat16 matrices, or None if it has none that torch uses.

    Torch has kernels for these units only on Linux. Apple's chips have such units from the M2 on, but torch's macOS
    builds do not use them.
    """
    if platform != "linux":
        return None
    try:
        flags = cpu_flags(cpuinfo.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return next((unit for unit in BFLOAT16_UNITS if unit in flags), None)


SMALL_MODEL = 50_000_000
"""Models with fewer parameters use float32 on a CPU even with bfloat16 units: multiplication does not dominate their
run time, and float32 is more exact."""
SLOWDOWN = 40
"""Slowdown of a 135 M model in bfloat16 against float32 on a CPU without bfloat16 units (Neoverse N1)."""


def choose_dtype(dtype: str, device: str, parameters: int | None) -> tuple[str, str]:
    """Resolve `--dtype` to "float32" or "bfloat16" for a model size (None: unknown); return it with the reason."""
    if dtype != "auto":
        return dtype, "as asked for"
    if device.startswith("cuda"):
        return "bfloat16", "the GPU's precision"
    unit = bfloat16_unit()
    if unit is None:
        return "float32", "this CPU has no bfloat16 units"
    if parameters is not None and parameters < SMALL_MODEL:
        return "float32", "a small model on a CPU"
    return "bfloat16", f"this CPU has units for it, {unit}"


def resolve_dtype(dtype: str, device: str, parameters: int | None) -> str:
    return choose_dtype(dtype, device, parameters)[0]


def resolve_rollout_dtype(rollout_dtype: str, dtype: str, device: str, parameters: int | None) -> str:
    """Resolve `--rollout-dtype` to "float32" or "bfloat16"; auto is the same as `--dtype`.

    `parameters` is the size of the trained model, also for its teachers: a run has one precision.
    """
    return resolve_dtype(dtype if rollout_dtype == "auto" else rollout_dtype, device, parameters)


def slow_dtype_note(flag: str, dtype: str, device: str) -> str | None:
    """Return a warning for a dtype that this CPU can only emulate, or None."""
    if dtype not in ("bfloat16", "float16") or device.startswith("cuda") or bfloat16_unit() is not None:
        return None
    return (
        f"{flag} {dtype}: this CPU has no units for it and is about {SLOWDOWN} times slower than in float32: "
        f"leave out {flag}"
    )
