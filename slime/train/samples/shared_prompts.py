"""What several sequences of a packed row begin with, computed once.

The n samples of a group have one prompt, the samples of a conversation that forked its turns until then, agents often
their instructions. All that a layer does to a token by itself (norms, projections, MLP, experts) gives the same for
every copy of it, and attention looks at earlier tokens only, so that copies stay equal through all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

WORTH_SHARING = 1 / 8
"""The share of a row's tokens that must be copies: attention takes them all, and spreading them costs time too."""


@dataclass(frozen=True)
class SharedPrompts:
    """Which tokens of a row are computed, and which are copies of them.

    The copies of computed token i are `copies[starts[i]:starts[i + 1]]`, in the order of the row; the first is itself.
    """

    first: Tensor  # [t] where the computed tokens stand in the row, ascending
    place: Tensor  # [T] of which of them each token of the row is a copy
    copies: Tensor  # [T]
    starts: Tensor  # [t + 1]


def find_shared_prompts(
    tokens: Sequence[np.ndarray], padding: int, put: Callable[[np.ndarray], Tensor]
) -> SharedPrompts | None:
    """Those of sequences one behind the other; None where it is not worth it."""
    places: list[np.ndarray] = []
    computed = 0
    for sequence, (lender, length) in zip(tokens, common_beginnings(tokens), strict=True):
        own = len(sequence) - length
        new = np.arange(computed, computed + own)
        places.append(np.concatenate([places[lender][:length], new]) if length else new)
        computed += own
    place = np.concatenate([*places, np.arange(computed, computed + padding)])
    if len(place) - computed - padding < WORTH_SHARING * len(place):
        return None
    copies = np.argsort(place, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(place))])
    return SharedPrompts(first=put(copies[starts[:-1]]), place=put(place), copies=put(copies), starts=put(starts))


def common_beginnings(sequences: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Of each sequence: one before it that begins with as many of its tokens as any, and how many; (0, 0) if with none.

    In alphabetical order what two have in common is the least that neighbours between them have, so the best earlier
    one is the next earlier one on either side.
    """
    letters = [np.asarray(sequence, dtype=">i8").tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=letters.__getitem__)
    common = [_common(sequences[one], sequences[next_one]) for one, next_one in pairwise(order)]
    found = [(0, 0)] * len(sequences)
    for rank, index in enumerate(order):
        for step in (-1, 1):
            least, at = len(sequences[index]), rank
            while 0 <= at + step < len(order) and least > found[index][1]:
                least = min(least, common[min(at, at + step)])
                at += step
                if order[at] < index:
                    found[index] = max(found[index], (order[at], least), key=lambda one: one[1])
                    break
    return found


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    most = min(len(one), len(other))
    differs = np.flatnonzero(np.asarray(one[:most]) != np.asarray(other[:most]))
    return int(differs[0]) if len(differs) else most
