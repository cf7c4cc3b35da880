"""Fields of many samples as columns, and scans over all tokens of a batch.

Invariant: columns are as the samples hold them (`slime.data.columns`): a `Packed`, a list or None, not to be written.
The fields of a sample are read once, because access takes most of the time. Scans give the numbers that numpy gives
for each sample alone; they process many samples per call on all cores and skip constant arrays, because a call per
sample would cost more than the tokens of most samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any, Self, TypeVar

import numpy as np

from slime.cluster.devices import cpu_cores
from slime.data.columns import is_constant
from slime.data.sample import Sample, SampleStatus
from slime.storage.json_types import JsonObject

T = TypeVar("T")

Column = Any
"""A column of a sample: a `Packed`, a list or None."""


@dataclass(frozen=True)
class SampleFields:
    """The fields of samples that training needs, as a tuple each, in the order of the samples."""

    tokens: tuple[Column, ...] = ()
    loss_mask: tuple[Column, ...] = ()
    rollout_log_probs: tuple[Column, ...] = ()
    teacher_log_probs: tuple[Column, ...] = ()
    status: tuple[SampleStatus, ...] = ()
    reward: tuple[object, ...] = ()
    response_length: tuple[int, ...] = ()
    remove_sample: tuple[bool, ...] = ()
    index: tuple[int | None, ...] = ()
    group_index: tuple[int | None, ...] = ()
    rollout_id: tuple[int | None, ...] = ()
    train_metadata: tuple[JsonObject | None, ...] = ()

    @classmethod
    def by(cls, samples: Sequence[Sample]) -> Self:
        """Collect the fields of the samples."""
        return cls(*zip(*[_FIELDS(vars(sample)) for sample in samples], strict=True))


_FIELDS = itemgetter(*(field.name for field in fields(SampleFields)))

_AT_ONCE = 1 << 18
"""Numbers per call: few enough to stay in a core's cache."""
_WORTH_THREADS = 1 << 23
_INT8 = np.dtype(np.int8).char


def is_trained_on(mask: np.ndarray) -> bool:
    """True if a mask has a non-zero entry."""
    return bool(mask[0]) if is_constant(mask) else bool(mask.any())


def mask_totals(masks: Sequence[np.ndarray]) -> list[int]:
    """Return the integer part of each mask's sum."""
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
            _concatenate([masks[place] for place in places]), begins, dtype=np.int64
        ).tolist()
        return sums

    for places, sums in _scan_chunks(count, counted, masks):
        for place, total in zip(places, sums, strict=True):
            totals[place] = total
    return totals


def first_not_finite(columns: Sequence[np.ndarray]) -> int | None:
    """Return the place of the first column with a non-finite number."""

    def is_fine(places: Sequence[int]) -> bool:
        with np.errstate(all="ignore"):  # a sum with a non-finite number is not finite
            return math.isfinite(np.add.reduce(_concatenate([columns[place] for place in places])))

    for places, fine in _scan_chunks(is_fine, range(len(columns)), columns):
        if not fine:  # the sum of finite numbers may also have overflowed
            for place in places:
                if not np.isfinite(columns[place]).all():
                    return place
    return None


def _concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _scan_chunks(
    scan: Callable[[Sequence[int]], T], places: Sequence[int], columns: Sequence[np.ndarray]
) -> Iterator[tuple[Sequence[int], T]]:
    """Scan the columns in chunks, in threads if they are large; yield (places, result) in order."""
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
        yield from ((chunk, scan(chunk)) for chunk in chunks)
        return
    with ThreadPoolExecutor(cpu_cores(), thread_name_prefix="scan") as pool:
        yield from zip(chunks, pool.map(scan, chunks), strict=True)
