"""In which precision a run computes, and why.

Invariant: the answer is a function of the flags, the device, the size of the model and this machine, so trainers,
engines and the plan come to the same one.
"""

from __future__ import annotations

from slime.cluster.cpu import bfloat16_unit

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
