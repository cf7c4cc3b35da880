"""Rewards by rank: the answers to one prompt are compared in pairs, and the resulting order gives their rewards.

from tournament import ServedJudge, Tournament

tournament = Tournament(ServedJudge(prompt=PROMPT), topology="swiss")

async def reward(args, samples):  # --custom-rm-path this_file.py:reward --group-rm
    return await tournament.rewards(args, samples)
"""

from .rewards import Judge, JudgeFailed, Match, ServedJudge, Tournament, verdict_of
from .topologies import (
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
