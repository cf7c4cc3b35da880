"""The rewards: a tournament among the plans for one trip, and for evaluation whether a plan is the cheapest.

`--custom-rm-path examples/mcp_arena/arena.py:by_rank --group-rm --custom-config-path FILE`, where the file's
`arena_topology` names the tournament and `arena_judge_url` the judge's server (without one a function judges).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from task import INVALID, JUDGE, JUDGE_PROMPT, cost_of
from tournament import Judge, ServedJudge, Tournament
from tournament.rewards import asked_for, said_in_the_end

from slime.data.sample import Sample


def bill(sample: Sample) -> str:
    """What the judge is shown of a plan: its price."""
    cost = cost_of(asked_for(sample), said_in_the_end(sample))
    return INVALID if cost is None else str(cost)


def cheaper(args: Any, first: Sample, second: Sample) -> float:
    """A judge that is a function: the lower price wins, no plan loses against any."""
    costs = [float("inf") if shown == INVALID else float(shown) for shown in map(bill, (first, second))]
    return 0.5 if costs[0] == costs[1] else float(costs[0] < costs[1])


def served(url: str) -> ServedJudge:
    """A judge that is a model."""
    return ServedJudge(url, system=JUDGE, prompt=JUDGE_PROMPT, answer_of=bill, max_tokens=4)


async def by_rank(args: Any, samples: list[Sample]) -> list[float]:
    """The rewards of a group, from a tournament among its plans."""
    judge: Judge = served(args.arena_judge_url) if args.arena_judge_url else cheaper
    tournament = Tournament(judge, args.arena_topology, swap=bool(args.arena_judge_url))
    return await tournament.rewards(args, samples)


def is_cheapest(args: Any, sample: Sample) -> float:
    """1 for a plan than which there is no cheaper one; what held-out trips are scored by."""
    return float(bill(sample) == sample.label)
