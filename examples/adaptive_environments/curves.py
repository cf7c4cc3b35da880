"""The picture: the level of every environment over the rollouts, and their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_levels(history: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """One thin line for each environment, a thick one for the mean."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_prop_cycle(color=colormaps["tab20"].colors)
    rollouts = [row["rollout"] for row in history]
    names = sorted(history[-1]["levels"], key=lambda name: -history[-1]["levels"][name])
    for place, name in enumerate(names):
        shift = 0.03 * (place - len(names) / 2)  # lines of one level beside each other
        levels = [row["levels"][name] + shift for row in history]
        axes.step(
            rollouts, levels, where="post", linewidth=1, alpha=0.8, label=f"{name} ({history[-1]['levels'][name]})"
        )
    means = [sum(row["levels"].values()) / len(row["levels"]) for row in history]
    axes.plot(rollouts, means, color="#334155", linewidth=3, label=f"mean ({means[-1]:.1f})")
    axes.set_xlabel("rollout")
    axes.set_ylabel("level")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=80)
    return out
