"""Tournaments: the best player wins for any number of players, ties share rewards, and matches are counted."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.mcp_arena.tournament import TOPOLOGIES, Played, expected_matches, play, rank_rewards
from examples.mcp_arena.tournament.topologies import Pair, Score

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 31, 33]
ALL = sorted(TOPOLOGIES)


def played(
    name: str, quality: Sequence[float], seeds: Sequence[int], score: Callable[[int, int], Score] | None = None
) -> Played:
    def by_quality(a: int, b: int) -> Score:
        return 0.5 if quality[a] == quality[b] else float(quality[a] > quality[b])

    async def score_round(pairs: list[Pair]) -> list[Score]:
        assert all(a != b for a, b in pairs)
        return [(score or by_quality)(a, b) for a, b in pairs]

    return asyncio.run(play(TOPOLOGIES[name], seeds, score_round))


def drawn(n: int, seed: int) -> tuple[list[int], list[int]]:
    rng = random.Random(seed)
    quality, seeds = list(range(n)), list(range(n))
    rng.shuffle(quality)
    rng.shuffle(seeds)
    return quality, seeds


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", ALL)
def test_best_player_wins_alone_in_the_expected_number_of_matches(name: str, n: int) -> None:
    for draw in range(20):
        quality, seeds = drawn(n, draw)
        result = played(name, quality, seeds)
        rewards = rank_rewards(result.levels)
        assert None not in rewards
        best = quality.index(n - 1)
        assert rewards[best] == max(rewards)  # type: ignore[type-var]
        assert rewards.count(rewards[best]) == 1
        assert len(result.matches) == expected_matches(name, n)
        assert (result.ties, result.undecided) == (0, 0)


@pytest.mark.parametrize(
    ("name", "of_eight"),
    [
        ("single_elimination", 7),
        ("seeded_single_elimination", 14),
        ("double_elimination", 14),
        ("swiss", 12),
        ("round_robin", 28),
    ],
)
def test_expected_matches_for_eight_players(name: str, of_eight: int) -> None:
    assert expected_matches(name, 8) == of_eight


@given(st.sampled_from(ALL), st.lists(st.integers(0, 4), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_rewards_have_mean_one_half_and_a_best_player_leads(name: str, quality: list[int], rng: random.Random) -> None:
    """With any ties, rewards lie in [0, 1], their mean is 1/2, and a best player has the highest reward."""
    seeds = list(range(len(quality)))
    rng.shuffle(seeds)
    rewards = rank_rewards(played(name, quality, seeds).levels)
    known = [reward for reward in rewards if reward is not None]
    assert len(known) == len(quality)
    assert all(0 <= reward <= 1 for reward in known)
    assert math.isclose(sum(known) / len(known), 0.5)
    best = max(range(len(quality)), key=lambda player: (known[player], quality[player]))
    assert quality[best] == max(quality)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=10), st.randoms(use_true_random=False))
def test_round_robin_finds_the_full_order(quality: list[int], rng: random.Random) -> None:
    seeds = list(range(len(quality)))
    rng.shuffle(seeds)
    rewards = rank_rewards(played("round_robin", quality, seeds).levels)
    for a in range(len(quality)):
        for b in range(len(quality)):
            assert (rewards[a] > rewards[b]) == (quality[a] > quality[b])  # type: ignore[operator]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    "name", ["single_elimination", "seeded_single_elimination", "double_elimination", "round_robin"]
)
def test_equal_answers_have_equal_rewards(name: str, n: int) -> None:
    assert rank_rewards(played(name, [3] * n, drawn(n, 1)[1]).levels) == [0.5] * n


@pytest.mark.parametrize("name", ALL)
def test_equally_best_players_share_first_place_for_any_seeding(name: str) -> None:
    for draw in range(40):
        _, seeds = drawn(7, draw)
        quality = [9, 1, 2, 9, 3, 4, 5]
        rewards = rank_rewards(played(name, quality, seeds).levels)
        assert max(rewards) in (rewards[0], rewards[3])  # type: ignore[type-var]
        if name != "swiss":  # in swiss the two need not meet
            assert rewards[0] == rewards[3] == pytest.approx(5.5 / 6)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_tournament_completes_without_decided_matches(name: str, n: int) -> None:
    quality, seeds = drawn(n, 5)
    result = played(name, quality, seeds, lambda a, b: None)
    assert result.levels == [None] * n
    assert result.undecided == len(result.matches) == expected_matches(name, n)


@pytest.mark.parametrize("name", ALL)
def test_undecided_player_is_not_ranked_and_the_others_are(name: str) -> None:
    for draw in range(20):
        quality, seeds = drawn(8, draw)
        silent = quality.index(2)

        def score(a: int, b: int, silent: int = silent, quality: list[int] = quality) -> Score:
            return None if silent in (a, b) else float(quality[a] > quality[b])

        result = played(name, quality, seeds, score)
        rewards = rank_rewards(result.levels)
        assert rewards[silent] is None
        others = [player for player in range(8) if player != silent and rewards[player] is not None]
        assert math.isclose(sum(rewards[player] for player in others) / len(others), 0.5)  # type: ignore[misc]
        if name in ("round_robin", "double_elimination", "single_elimination"):
            best = quality.index(7)
            assert rewards[best] is None or rewards[best] == max(rewards[player] for player in others)  # type: ignore[type-var]


def test_unbeaten_loser_of_the_final_gets_a_second_final() -> None:
    finals: list[Pair] = []

    def score(a: int, b: int) -> Score:
        finals.append((a, b))
        return 1.0 if len(finals) == 1 else 0.0  # 0 beats 1, then loses to it twice

    result = played("double_elimination", [0, 0], [0, 1], score)
    assert finals == [(0, 1)] * 3
    assert rank_rewards(result.levels) == [0.0, 1.0]
    assert len(result.matches) == expected_matches("double_elimination", 2) + 1


@given(st.integers(2, 14), st.randoms(use_true_random=False))
def test_random_verdicts_keep_the_expected_number_of_matches(n: int, rng: random.Random) -> None:
    for name in ALL:
        result = played(name, [0] * n, list(range(n)), lambda a, b: rng.choice([0.0, 0.25, 0.5, 0.75, 1.0, None]))
        extra = 1 if name == "double_elimination" else 0
        assert expected_matches(name, n) <= len(result.matches) <= expected_matches(name, n) + extra


@pytest.mark.parametrize("n", [4, 6, 8, 9, 16])
def test_swiss_never_repeats_a_pairing(n: int) -> None:
    for draw in range(30):
        quality, seeds = drawn(n, draw)
        pairs = [frozenset(pair) for pair, _ in played("swiss", quality, seeds).matches]
        assert len(set(pairs)) == len(pairs)


def test_levels_are_ranked_into_rewards() -> None:
    assert rank_rewards([]) == []
    assert rank_rewards([(4.0,)]) == [0.5]
    assert rank_rewards([(1.0,), (3.0,), (2.0,)]) == [0.0, 1.0, 0.5]
    assert rank_rewards([(1.0,), (1.0,), (2.0,)]) == [0.25, 0.25, 1.0]
    assert rank_rewards([None, (1.0, 0.5), (1.0, 1.0), None]) == [None, 0.0, 1.0, None]


def test_top_seeds_skip_the_first_round_and_meet_the_lowest_seeds() -> None:
    quality = [5, 4, 3, 2, 1, 0]
    pairs = [pair for pair, _ in played("single_elimination", quality, list(range(6))).matches]
    assert pairs == [(2, 5), (3, 4), (0, 3), (1, 2), (0, 1)]
