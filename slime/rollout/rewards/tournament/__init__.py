"""Rewards by rank: the answers to one prompt are compared in pairs, and the resulting order gives their rewards.

from slime.rollout.rewards.tournament import ServedJudge, Tournament

tournament = Tournament(ServedJudge(prompt=PROMPT), topology="swiss")

async def reward(args, samples):  # --custom-rm-path this_file.py:reward --group-rm
    return await tournament.rewards(args, samples)
"""

from slime.rollout.rewards.tournament.rewards import Judge, JudgeFailed, Match, ServedJudge, Tournament, verdict_of
from slime.rollout.rewards.tournament.topologies import (
    TOPOLOGIES,
    Played,
    Topology,
    expected_matches,
    play,
    rank_rewards,
)

__all__ = [
    "TOPOLOGIES",
    "Judge",
    "JudgeFailed",
    "Match",
    "Played",
    "ServedJudge",
    "Topology",
    "Tournament",
    "expected_matches",
    "play",
    "rank_rewards",
    "verdict_of",
]
