"""From levels to rewards."""

from __future__ import annotations

from collections.abc import Sequence

Level = tuple[float, ...]
"""How far a player came, to be compared with others of the same tournament: the greater, the better."""


def rank_rewards(levels: Sequence[Level | None]) -> list[float | None]:
    """For each player the share of the others that it is ahead of, a tie counting half: 1 for the best, 0 for the last.

    With n players in order p = 0 (last) ... n-1 (best) the reward is p / (n - 1); equal levels share the mean of their
    places, so the mean over all is 1/2 whatever was tied. A player alone has 1/2; one without a level (None) has none,
    and the others are ranked as if it had not been there.
    """
    known = sorted(level for level in levels if level is not None)
    if len(known) < 2:
        return [None if level is None else 0.5 for level in levels]
    places: dict[Level, list[int]] = {}
    for place, level in enumerate(known):
        places.setdefault(level, []).append(place)
    share = {level: sum(own) / len(own) / (len(known) - 1) for level, own in places.items()}
    return [None if level is None else share[level] for level in levels]
