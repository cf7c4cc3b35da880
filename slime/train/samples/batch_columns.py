"""What samples hold, field by field: each of them is looked at once, since most of the time goes into getting there.

Invariant: columns are as the samples hold them (`slime.data.columns`): a `Packed`, a list or None, not to be written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any, Self

import numpy as np

from slime.cluster.devices import cpu_cores
from slime.data.columns import is_constant
from slime.data.sample import Sample


@dataclass(frozen=True)
class Held:
    """Of each field that training asks for a tuple, in the order of the samples."""

    tokens: tuple[Any, ...] = ()
    loss_mask: tuple[Any, ...] = ()
    rollout_log_probs: tuple[Any, ...] = ()
    teacher_log_probs: tuple[Any, ...] = ()
    status: tuple[Any, ...] = ()
    reward: tuple[Any, ...] = ()
    response_length: tuple[int, ...] = ()
    remove_sample: tuple[bool, ...] = ()
    index: tuple[int | None, ...] = ()
    group_index: tuple[int | None, ...] = ()
    rollout_id: tuple[int | None, ...] = ()
    train_metadata: tuple[dict[str, Any] | None, ...] = ()

    @classmethod
    def by(cls, samples: Sequence[Sample]) -> Self:
        return cls(*zip(*[_FIELDS(vars(sample)) for sample in samples], strict=True))


_FIELDS = itemgetter(*(field.name for field in fields(Held)))


# What is known of a batch only after a look at each of its tokens.
#
# Invariant: every number is what numpy gives for the sample alone. Samples are looked at many at a time and on all
# cores, and what is all one number is not looked at: a call for each sample would cost more than the tokens of most.

_AT_ONCE = 1 << 18
"""Numbers that are put together for one call: few enough to stay in a core's cache."""
_WORTH_THREADS = 1 << 23
_INT8 = np.dtype(np.int8).char


def is_trained_on(mask: np.ndarray) -> bool:
    """Whether a mask has an entry that is not zero."""
    return bool(mask[0]) if is_constant(mask) else bool(mask.any())


def mask_totals(masks: Sequence[np.ndarray]) -> list[int]:
    """The whole part of each mask's sum."""
    totals = [0] * len(masks)
    counted = []
    for place, mask in enumerate(masks):
        if mask.dtype.char != _INT8:
            totals[place] = int(mask.sum())
        elif is_constant(mask):
            totals[place] = int(mask[0]) * len(mask)
        elif len(mask):
            counted.append(place)

    def count(places: Sequence[int]) -> list[int]:
        lengths = [len(masks[place]) for place in places]
        begins = np.cumsum([0, *lengths[:-1]])
        sums: list[int] = np.add.reduceat(
            _together([masks[place] for place in places]), begins, dtype=np.int64
        ).tolist()
        return sums

    for places, sums in _by_chunk(count, counted, masks):
        for place, total in zip(places, sums, strict=True):
            totals[place] = total
    return totals


def first_not_finite(columns: Sequence[np.ndarray]) -> int | None:
    """The place of the first column that has a number which is none."""

    def is_fine(places: Sequence[int]) -> bool:
        with np.errstate(all="ignore"):  # of what is no number the sum is none either
            return math.isfinite(np.add.reduce(_together([columns[place] for place in places])))

    for places, fine in _by_chunk(is_fine, range(len(columns)), columns):
        if not fine:  # or the sum of finite numbers was too large
            for place in places:
                if not np.isfinite(columns[place]).all():
                    return place
    return None


def _together(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _by_chunk(
    look: Callable[[Sequence[int]], Any], places: Sequence[int], columns: Sequence[np.ndarray]
) -> Iterator[tuple[Sequence[int], Any]]:
    """(places, what a look at them gave) in order."""
    chunks, total = [], 0
    begin, held = 0, 0
    for number, place in enumerate(places):
        length = len(columns[place])
        if held and held + length > _AT_ONCE:
            chunks.append(places[begin:number])
            begin, held = number, 0
        held += length
        total += length
    if begin < len(places):
        chunks.append(places[begin:])
    if total < _WORTH_THREADS:
        yield from ((chunk, look(chunk)) for chunk in chunks)
        return
    with ThreadPoolExecutor(cpu_cores(), thread_name_prefix="scan") as pool:
        yield from zip(chunks, pool.map(look, chunks), strict=True)
