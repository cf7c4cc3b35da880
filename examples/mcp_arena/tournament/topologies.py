"""Tournament topologies as pure generators: the pairs of each round, and the resulting order of the players.

A topology of n players (0 ... n-1, the best seed first) yields rounds, which are lists of pairs whose matches do not
depend on one another, receives the scores of each round, and returns the level of every player. A score is the first
player's share of the point: 1, 0, or 1/2 for a tie; None is a match that the judge could not decide.

| topology | matches of n players | an undecided match |
|---|---|---|
| `round_robin` | n (n-1) / 2 | does not count |
| `swiss` | floor(n/2) ceil(log2 n) | half a point each |
| `double_elimination` | 2n - 2, and one more if the unbeaten player loses the final | as a tie |
| `seeded_single_elimination` | 2n - 2: all against one, which determines the seeds, then n - 1 | as a tie |
| `single_elimination` | n - 1 | as a tie |

In an elimination, one player of each pair is out. After a tie this is the worse seed, which then gets the same level as
the other player. So equal answers get equal ranks independent of the draw. A player with no decided match has no level.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass

Level = tuple[float, ...]
"""Result of a player, comparable within one tournament: greater is better."""


def rank_rewards(levels: Sequence[Level | None]) -> list[float | None]:
    """Reward each player with the share of the others that it beats: 1 for the best, 0 for the last; a tie counts half.

    With n players in order p = 0 (last) ... n-1 (best), the reward is p / (n - 1). Equal levels share the mean of their
    places, so the mean over all players is always 1/2. A single player gets 1/2. A player without a level (None) gets
    None, and the others are ranked without it.
    """
    known = sorted(level for level in levels if level is not None)
    if len(known) < 2:
        return [None if level is None else 0.5 for level in levels]
    places: dict[Level, list[int]] = {}
    for place, level in enumerate(known):
        places.setdefault(level, []).append(place)
    share = {level: sum(own) / len(own) / (len(known) - 1) for level, own in places.items()}
    return [None if level is None else share[level] for level in levels]


Pair = tuple[int, int]
Score = float | None
Rounds = Generator[list[Pair], Sequence[Score], list[Level]]
Topology = Callable[[int], Rounds]

TIE = 0.5
BYE = 1.0


@dataclass(frozen=True)
class Played:
    """Result of a tournament: levels in the order of the players, and every match with its score."""

    levels: list[Level | None]
    matches: list[tuple[Pair, Score]]

    @property
    def undecided(self) -> int:
        """Number of matches without a score."""
        return sum(score is None for _, score in self.matches)

    @property
    def ties(self) -> int:
        """Number of tied matches."""
        return sum(score == TIE for _, score in self.matches)


async def play(
    topology: Topology, seeds: Sequence[int], score_round: Callable[[list[Pair]], Awaitable[Sequence[Score]]]
) -> Played:
    """Play `topology` among the players in `seeds`, the best first; `score_round` scores the matches of a round.

    `seeds` is a permutation of 0 ... n-1; pairs and levels refer to its members.
    """
    rounds, matches = topology(len(seeds)), list[tuple[Pair, Score]]()
    try:
        pairs = next(rounds)
        while True:
            named = [(seeds[a], seeds[b]) for a, b in pairs]
            scores = await score_round(named)
            matches += zip(named, scores, strict=True)
            pairs = rounds.send(scores)
    except StopIteration as end:
        by_seed: list[Level] = end.value
    decided = {player for pair, score in matches if score is not None for player in pair}
    levels: list[Level | None] = [None] * len(seeds)
    for seed, player in enumerate(seeds):
        if player in decided or len(seeds) == 1:
            levels[player] = by_seed[seed]
    return Played(levels, matches)


def round_robin(n: int) -> Rounds:
    """Play all against all; the level is the mean score over the decided matches."""
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    scores = yield pairs
    points: list[list[float]] = [[] for _ in range(n)]
    for (a, b), score in zip(pairs, scores, strict=True):
        if score is not None:
            points[a].append(score)
            points[b].append(1 - score)
    return [(sum(own) / len(own) if own else TIE,) for own in points]


def swiss(n: int) -> Rounds:
    """Play ceil(log2 n) rounds among players with similar points, avoiding repeated pairs where possible.

    If n is odd, the lowest player without a bye so far gets one, which counts as a point. The level is the player's
    points, then the sum of its opponents' points (Buchholz).
    """
    points, met = [0.0] * n, [set[int]() for _ in range(n)]
    had_bye: set[int] = set()
    for _ in range(math.ceil(math.log2(n)) if n > 1 else 0):
        order = sorted(range(n), key=lambda player: (-points[player], player))
        if n % 2:
            resting = next(player for player in reversed(order) if player not in had_bye)
            order.remove(resting)
            had_bye.add(resting)
        pairs = _pair_unmet(order, met)
        scores = yield pairs
        for (a, b), score in zip(pairs, scores, strict=True):
            share = TIE if score is None else score
            points[a] += share
            points[b] += 1 - share
            met[a].add(b)
            met[b].add(a)
        if n % 2:
            points[resting] += BYE
    return [(points[player], sum(points[other] for other in sorted(met[player]))) for player in range(n)]


def single_elimination(n: int) -> Rounds:
    """Play a knockout; the best seeds skip the first round if n is not a power of two.

    In every round the best remaining seed meets the worst one. The level is the round in which a player lost.
    """
    alive, level, shares = list(range(n)), [0] * n, dict[int, int]()
    rounds = math.ceil(math.log2(n)) if n > 1 else 0
    for number in range(rounds):
        passing = 2 ** (rounds - number) - len(alive)
        pairs = _pair_ends(alive[passing:])
        scores = yield pairs
        fell = _losers(pairs, scores, shares)
        for player in alive:
            level[player] = number if player in fell else number + 1
        alive = [player for player in alive if player not in fell]
    return _levels_after_ties(level, shares)


def seeded_single_elimination(n: int) -> Rounds:
    """Play all others against the first player, then a single elimination seeded by these scores.

    The level is the round in which a player lost, then its score against the first player.
    """
    pairs = [(player, 0) for player in range(1, n)]
    scores = yield pairs
    points = [TIE, *(TIE if score is None else score for score in scores)]
    seeds = sorted(range(n), key=lambda player: (-points[player], player))
    rounds, fell = single_elimination(n), list[Level]()
    try:
        pairs = next(rounds)
        while True:
            pairs = rounds.send((yield [(seeds[a], seeds[b]) for a, b in pairs]))
    except StopIteration as end:
        fell = end.value
    return [(*fell[seeds.index(player)], points[player]) for player in range(n)]


def double_elimination(n: int) -> Rounds:
    """Play a knockout in which a player is out after two losses.

    The unbeaten players play each other, and so do the players with one loss; if their number is odd, the best seed
    rests. In the final, the last unbeaten player meets the last one with one loss, and again if it loses. The level is
    the step at which a player was out.
    """
    unbeaten, beaten = list(range(n)), list[int]()
    level, shares, step = [0] * n, dict[int, int](), 0
    while len(unbeaten) > 1 or len(beaten) > 1:
        step += 1
        upper, lower = _pair_ends(unbeaten[len(unbeaten) % 2 :]), _pair_ends(beaten[len(beaten) % 2 :])
        scores = yield [*upper, *lower]
        dropped = _losers(upper, scores[: len(upper)], {})
        out = _losers(lower, scores[len(upper) :], shares)
        for player in [*unbeaten, *beaten]:
            level[player] = step - 1 if player in out else step
        unbeaten = [player for player in unbeaten if player not in dropped]
        beaten = sorted({*beaten, *dropped} - out)
    if n > 1:
        final = (unbeaten[0], beaten[0])
        scores = yield [final]
        if scores[0] is not None and scores[0] < TIE:
            scores = yield [final]
        last = TIE if scores[0] is None else scores[0]
        level[final[0]] += last >= TIE
        level[final[1]] += last <= TIE
    return _levels_after_ties(level, shares)


TOPOLOGIES: dict[str, Topology] = {
    "round_robin": round_robin,
    "swiss": swiss,
    "double_elimination": double_elimination,
    "seeded_single_elimination": seeded_single_elimination,
    "single_elimination": single_elimination,
}


def expected_matches(name: str, n: int) -> int:
    """Number of matches of a topology among n players (for double elimination without the second final)."""
    rounds = math.ceil(math.log2(n)) if n > 1 else 0
    return {
        "round_robin": n * (n - 1) // 2,
        "swiss": n // 2 * rounds,
        "double_elimination": 2 * (n - 1),
        "seeded_single_elimination": 2 * (n - 1),
        "single_elimination": n - 1,
    }[name]


def _pair_ends(players: Sequence[int]) -> list[Pair]:
    """Pair the best seed with the worst, the second with the last but one, ..."""
    return [(players[i], players[-1 - i]) for i in range(len(players) // 2)]


def _losers(pairs: Sequence[Pair], scores: Sequence[Score], shares: dict[int, int]) -> set[int]:
    """The loser of each match; after a tie the worse seed, and `shares` maps it to the player that it tied with."""
    losers = set()
    for (a, b), score in zip(pairs, scores, strict=True):
        better, worse = min(a, b), max(a, b)
        if score is None or score == TIE:
            losers.add(worse)
            shares[worse] = better
        else:
            losers.add(b if score > TIE else a)
    return losers


def _levels_after_ties(level: Sequence[int], shares: dict[int, int]) -> list[Level]:
    """Build the levels; a player that lost by a tie gets the final level of the player that it tied with."""
    found: list[Level] = []
    for player in range(len(level)):
        while player in shares:  # leads to better seeds, so the loop ends
            player = shares[player]
        found.append((float(level[player]),))
    return found


def _pair_unmet(order: Sequence[int], met: Sequence[set[int]]) -> list[Pair]:
    """Pair neighbours in `order`, avoiding players that have met as far as swaps allow."""
    left, pairs = list(order), list[Pair]()
    while left:
        first = left.pop(0)
        at = next((i for i, other in enumerate(left) if other not in met[first]), None)
        if at is None and (swapped := _find_swap(first, left[0], pairs, met)) is not None:
            pairs[swapped[0]], pair = swapped[1], swapped[2]
            pairs.append(pair)
            left.pop(0)
            continue
        pairs.append((first, left.pop(at or 0)))
    return pairs


def _find_swap(a: int, b: int, pairs: Sequence[Pair], met: Sequence[set[int]]) -> tuple[int, Pair, Pair] | None:
    """Find the latest pair with which a and b, who have met, can exchange partners; return it and the two new pairs."""
    for at in range(len(pairs) - 1, 0, -1):  # the first pair, which plays for the lead, is never changed
        c, d = pairs[at]
        for one, two in (((c, a), (d, b)), ((c, b), (d, a))):
            if one[1] not in met[one[0]] and two[1] not in met[two[0]]:
                return at, one, two
    return None
