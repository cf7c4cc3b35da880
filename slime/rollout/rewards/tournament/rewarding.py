"""`Tournament`: the rewards of a group by rank, for `--group-rm`."""

from __future__ import annotations

import asyncio
import difflib
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.rewards.errors import RewardError
from slime.rollout.rewards.tournament.judging import Calls, Judge, Match
from slime.rollout.rewards.tournament.ranking import rank_rewards
from slime.rollout.rewards.tournament.topologies import TOPOLOGIES, Pair, Played, Score, play

NOTED = "tournament"
"""Where a group's first sample carries what was played, which `rollout/tournament_*` are the sums of."""


@dataclass(frozen=True)
class Account:
    """What a group's tournament took."""

    matches: int
    judge_calls: int
    judge_failures: int
    ties: int
    undecided: int


class Tournament:
    """Compares the answers of each group in pairs and rewards them by rank, 0 for the last to 1 for the best.

    A player is a rollout: samples that one attempt was split into play as one, by the last of them, and share its
    reward. Failed samples do not play. A player whose matches all stayed undecided is given up as a failure, as the
    judge said nothing about it; if that is everybody the group fails. The draw depends on the group's index alone.
    """

    def __init__(self, judge: Judge, topology: str = "seeded_single_elimination", **how: Any) -> None:
        """`how` goes to `Match`: swap, tries, first_pause_s, concurrency."""
        if topology not in TOPOLOGIES:
            near = difflib.get_close_matches(topology, TOPOLOGIES, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"unknown tournament {topology!r}{hint}; known: {', '.join(TOPOLOGIES)}")
        self.topology = topology
        self._match = Match(judge, **how)

    async def rewards(self, args: Any, samples: Sequence[Sample]) -> list[float]:
        """One reward for each sample, in their order; those of samples that are given up do not count."""
        rollouts: dict[Any, list[Sample]] = {}
        for position, sample in enumerate(samples):
            if sample.status is not Sample.Status.FAILED:
                own = ("alone", position) if sample.rollout_id is None else sample.rollout_id
                rollouts.setdefault(own, []).append(sample)
        if not rollouts:
            return [0.0] * len(samples)
        played, calls = await self._played(args, [members[-1] for members in rollouts.values()])
        earned: dict[int, float] = {}
        for members, reward in zip(rollouts.values(), rank_rewards(played.levels), strict=True):
            for sample in members:
                earned[id(sample)] = _settled(sample, reward)
        first = next(iter(rollouts.values()))[0]
        first.metadata[NOTED] = asdict(
            Account(len(played.matches), calls.made, calls.failed, played.ties, played.undecided)
        )
        return [earned.get(id(sample), 0.0) for sample in samples]

    async def _played(self, args: Any, players: Sequence[Sample]) -> tuple[Played, Calls]:
        calls = Calls()

        async def score_round(pairs: list[Pair]) -> Sequence[Score]:
            return await asyncio.gather(*(self._match.score(args, players[a], players[b], calls) for a, b in pairs))

        seeds = list(range(len(players)))
        random.Random(players[0].group_index or 0).shuffle(seeds)
        played = await play(TOPOLOGIES[self.topology], seeds, score_round)
        if all(level is None for level in played.levels):
            raise RewardError(
                f"the judge decided none of {len(played.matches)} matches ({calls.failed} of {calls.made} calls failed)"
            )
        return played, calls


def _settled(sample: Sample, reward: float | None) -> float:
    """The reward of a sample; without one it is given up."""
    if reward is None:
        sample.status, sample.failure = Sample.Status.FAILED, "reward: the judge decided none of its matches"
        return 0.0
    return reward
