"""The picture: held-out success over the rollouts of all stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_stages(stages: Mapping[str, Sequence[tuple[int, float]]], out: Path) -> Path:
    """One line through the (rollout, success) of each stage, and where stages end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.2), layout="constrained")
    axes = figure.add_subplot()
    points = [point for scores in stages.values() for point in scores]
    axes.plot(*zip(*points, strict=True), color="#2563eb", marker="o")
    begins = 0
    for name, scores in stages.items():
        ends = scores[-1][0]
        axes.axvline(ends, color="#94a3b8", linewidth=1, linestyle="--")
        axes.text((begins + ends) / 2, 1.02, name, ha="center", fontsize=9, color="#334155")
        begins = ends
    axes.set_ylim(0, 1)
    axes.set_xlabel("rollout")
    axes.set_ylabel("held-out success")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=80)
    return out
