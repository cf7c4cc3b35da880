"""The data source: every environment at the edge of what the policy can do, and most problems where it can learn most.

Each environment has a level. Problems are made at that level, some below it, so that what was learned stays. When
enough answers at the level are in, the success rate decides: near one the level rises, near zero it falls, and counting
begins anew. Environments are drawn with weights p (1 - p) of their estimated success p, the variance of a reward of 0
or 1: what the policy never or always solves teaches nothing.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from environments import ENVIRONMENTS

from slime.utils.tracking_utils import log
from slime.utils.types import Sample

RISES, FALLS = 0.75, 0.1
"""Success at which a level is left, upwards or downwards."""
ENOUGH = 32
"""Answers at a level before it is judged."""
BELOW = 0.25
"""How often a problem is easier than the level."""
LEAST_WEIGHT = 0.03
"""Of an environment that is always or never solved: it would not come back otherwise."""
CURVES = "difficulty.json"


class Difficulty:
    """The level of one environment, and what is known of the success at it."""

    def __init__(self, level: int = 1, right: float = 0.0, seen: int = 0) -> None:
        self.level, self.right, self.seen = level, right, seen

    @property
    def success(self) -> float:
        """Estimated as if one in two answers had been right before anything was seen."""
        return (self.right + 1) / (self.seen + 2)

    @property
    def weight(self) -> float:
        """How much there is to learn."""
        return max(LEAST_WEIGHT, self.success * (1 - self.success))

    def observe(self, level: int, rewards: list[float]) -> None:
        """Answers to one problem; those to problems of another level say nothing about this one."""
        if level != self.level:
            return
        self.right += sum(rewards)
        self.seen += len(rewards)
        if self.seen < ENOUGH:
            return
        rate = self.right / self.seen
        if rate >= RISES:
            self.level, self.right, self.seen = self.level + 1, 0.0, 0
        elif rate <= FALLS:
            self.level, self.right, self.seen = max(1, self.level - 1), 0.0, 0
        else:
            self.right, self.seen = self.right / 2, self.seen // 2  # what is older counts less


class AdaptiveEnvironments:
    """Problems without end. What it has learned of the policy is its state."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.made = 0
        self.difficulties = {name: Difficulty() for name in ENVIRONMENTS}
        self.history: list[dict[str, Any]] = []

    def get_samples(self, num_samples: int) -> list[Sample]:
        """New problems; each becomes a group of --n-samples-per-prompt."""
        return [self._problem() for _ in range(num_samples)]

    def observe_samples(self, rollout_id: int, groups: list[list[Sample]]) -> None:
        """The success of a whole rollout moves levels and weights."""
        for group in groups:
            rewards = [float(sample.reward) for sample in group if sample.reward is not None]
            self.difficulties[group[0].metadata["environment"]].observe(group[0].metadata["level"], rewards)
        now = {name: one.level for name, one in self.difficulties.items()}
        self.history.append({"rollout": rollout_id, "levels": now})
        mean = sum(now.values()) / len(now)
        log(self.args, {"difficulty/mean": mean, "rollout/step": rollout_id}, "rollout/step")
        _write(Path(self.args.output_dir) / CURVES, self.history)

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain values."""
        known = {name: [one.level, one.right, one.seen] for name, one in self.difficulties.items()}
        return {"made": self.made, "difficulties": known, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.made, self.history = state["made"], list(state["history"])
        self.difficulties = {name: Difficulty(*known) for name, known in state["difficulties"].items()}

    def _problem(self) -> Sample:
        rng = random.Random(f"{self.args.rollout_seed}/{self.made}")
        self.made += 1
        names = list(self.difficulties)
        (name,) = rng.choices(names, [self.difficulties[name].weight for name in names])
        top = self.difficulties[name].level
        level = rng.randint(1, top) if rng.random() < BELOW else top
        question = ENVIRONMENTS[name].question(level, rng)
        metadata = {"environment": name, "level": level, "question": question}
        return Sample(prompt=ENVIRONMENTS[name].prompt(question), metadata=metadata)


def right_answer(args: Any, sample: Sample) -> float:
    """1 if the environment accepts the answer."""
    problem = sample.metadata
    return float(ENVIRONMENTS[problem["environment"]].verify(problem["question"], sample.response.strip()))


def _write(path: Path, value: Any) -> None:
    """Whoever draws the curves meanwhile never reads half a file."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(value))
    os.replace(beside, path)
