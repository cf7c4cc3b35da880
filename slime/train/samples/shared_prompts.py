"""Prompts that several sequences of a packed row begin with, computed once.

The n samples of a group have one prompt. All that a layer does to a token by itself (norms, projections, MLP, experts)
gives the same for every copy of it, and attention looks at earlier tokens only, so that copies stay equal through all
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    tokens: Sequence[np.ndarray],
    response_lengths: Sequence[int],
    padding: int,
    put: Callable[[np.ndarray], Tensor],
) -> SharedPrompts | None:
    """Those of sequences one behind the other, each with its response at the end; None where it is not worth it."""
    known: dict[bytes, int] = {}  # prompts, and the place of their first token
    places: list[np.ndarray] = []
    computed = 0
    for sequence, response in zip(tokens, response_lengths, strict=True):
        prompt = len(sequence) - response
        begin = known.setdefault(np.asarray(sequence[:prompt], dtype=np.int64).tobytes(), computed)
        own = response if begin < computed else len(sequence)
        places += [np.arange(begin, begin + len(sequence) - own), np.arange(computed, computed + own)]
        computed += own
    place = np.concatenate([*places, np.arange(computed, computed + padding)])
    if len(place) - computed - padding < WORTH_SHARING * len(place):
        return None
    copies = np.argsort(place, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(place))])
    return SharedPrompts(first=put(copies[starts[:-1]]), place=put(place), copies=put(copies), starts=put(starts))
