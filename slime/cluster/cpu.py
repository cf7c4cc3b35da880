"""What this machine's CPU can do, as far as the operating system tells it; nothing is imported or measured."""

from __future__ import annotations

import sys
from pathlib import Path

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
