"""The picture: how many kernels of a rollout were right at once, and how fast the right ones were."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_kernels(rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Of the rows of a run's metrics those that hold a rollout's kernels, above each other: shares and speeds."""
    from matplotlib.figure import Figure

    kernels = [row for row in rows if "kernels/right_at_once" in row]
    steps = list(range(len(kernels)))
    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(steps, [row["kernels/right_at_once"] for row in kernels], color="#2563eb", marker="o")
    above.set_ylim(0, 1)
    above.set_ylabel("right at once")
    speeds = [row.get("kernels/speed", math.nan) for row in kernels]  # none where none was right
    below.plot(steps, speeds, color="#dc2626", marker="o")
    below.set_ylim(bottom=0)
    below.set_ylabel("times naive")
    below.set_xlabel("rollout")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=80)
    return out
