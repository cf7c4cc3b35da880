"""What this machine can compute on. Torch is imported only when asked."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

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


# What this machine's CPU can do, as far as the operating system tells it; nothing is imported or measured.

CPUINFO = Path("/proc/cpuinfo")

BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16", "bf16")
"""As Linux calls them: Intel tiles, vectors of Intel and AMD, vectors of Arm (Graviton3, Grace, newer Neoverse)."""


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """The features that Linux lists for the first core: `flags` on x86, `Features` on Arm."""
    for line in cpuinfo.splitlines():
        name, _, words = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return frozenset(words.split())
    return frozenset()


def bfloat16_unit(*, platform: str = sys.platform, cpuinfo: Path = CPUINFO) -> str | None:
    """The unit with which this CPU multiplies bfloat16 matrices; None where there is none or none that torch uses.

    Torch has kernels for them on Linux alone. Apple's chips have such units from the M2 on, but torch's builds for
    macOS multiply bfloat16 without them.
    """
    if platform != "linux":
        return None
    try:
        flags = cpu_flags(cpuinfo.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return next((unit for unit in BFLOAT16_UNITS if unit in flags), None)


# In which precision a run computes, and why.
#
# Invariant: the answer is a function of the flags, the device, the size of the model and this machine, so trainers,
# engines and the plan come to the same one.

SMALL_MODEL = 50_000_000
"""Parameters below which a CPU computes in float32 even if it has bfloat16 units: what such a model's operations take
is not the multiplying, and float32 is the more exact one."""
SLOWDOWN = 40
"""Times that a 135 M model took longer in bfloat16 than in float32 on a CPU without units for it (Neoverse N1)."""


def choose_dtype(dtype: str, device: str, parameters: int | None) -> tuple[str, str]:
    """`--dtype` as "float32" or "bfloat16" for a model of so many parameters (None: unknown), and the reason."""
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
    """`--dtype` as "float32" or "bfloat16"."""
    return choose_dtype(dtype, device, parameters)[0]


def resolve_rollout_dtype(rollout_dtype: str, dtype: str, device: str, parameters: int | None) -> str:
    """`--rollout-dtype` as "float32" or "bfloat16": auto is the same as `--dtype`.

    `parameters` are those of the model that is trained, for its teachers too: one run, one precision.
    """
    return resolve_dtype(dtype if rollout_dtype == "auto" else rollout_dtype, device, parameters)


def slow_dtype_note(flag: str, dtype: str, device: str) -> str | None:
    """What to say of a precision that was asked for on a CPU that has to imitate it; None if nothing is wrong."""
    if dtype not in ("bfloat16", "float16") or device.startswith("cuda") or bfloat16_unit() is not None:
        return None
    return (
        f"{flag} {dtype}: this CPU has no units for it and is about {SLOWDOWN} times slower than in float32: "
        f"leave out {flag}"
    )
