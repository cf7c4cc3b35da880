"""Each data-parallel rank's part of a batch, and its way to the ranks that need it.

Invariant: whichever way a share takes, ranks get the same numbers, and ranks that train on the same samples get one and
the same share. Nothing of the batch is copied in the driver. Ranks on its machine are told where in shared memory the
samples' arrays are: there since their samples finished, or else written now, for as long as the ranks have not
answered. The others get the arrays over their channels.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np

from slime.cluster.memory.arena import NoRoom, SharedArena, read_places
from slime.cluster.rpc.messages import Joined
from slime.train.microbatch_plan import Schedule
from slime.train.samples.batch import BY_TOKEN, TrainBatch, with_constants

logger = logging.getLogger(__name__)

Share = dict[str, Any]


def rank_shares(batch: TrainBatch, schedule: Schedule) -> list[Share]:
    """Each rank's samples, with the micro-batches in local positions and the divisors of the whole step."""
    if not schedule.steps:
        return []
    scheduled = [step.positions for step in schedule.steps]
    counts, lengths = batch.trained_tokens, batch.total_lengths
    trained = [sum([counts[p] for p in positions]) for positions in scheduled]
    num_tokens = sum([lengths[p] for positions in scheduled for p in positions])
    shares = []
    for rank in range(len(schedule.steps[0].ranks)):
        positions = schedule.positions_of_rank(rank)
        local = count()  # positions are in the order of the micro-batches
        steps = [
            {
                "num_rollouts": step.num_rollouts,
                "num_tokens": of_step,
                "micro_batches": [list(islice(local, len(members))) for members in step.ranks[rank]],
            }
            for step, of_step in zip(schedule.steps, trained, strict=True)
        ]
        shares.append({"batch": batch.select(positions).to_message(), "steps": steps, "num_tokens": num_tokens})
    return shares


def open_share(data: Share) -> Share:
    """The share that a rank was sent; where it was told places in shared memory, columns are lists of what is there."""
    if "places" not in data:
        return data
    share = dict(data)
    batch = share["batch"] = dict(share["batch"])
    columns = {name: _PlacedColumn(**batch[name]) for name in BY_TOKEN if batch[name] is not None}
    arrays = iter(read_places(share.pop("places"), [size for column in columns.values() for size in column.sizes()]))
    for name, column in columns.items():
        batch[name] = column.parts(arrays)
    return share


@dataclass(frozen=True)
class _PlacedColumn:
    """A column of a share whose arrays are elsewhere: the types that they have there, and the one that they get."""

    lengths: list[int]
    constant: dict[int, Any]
    dtype: str
    dtypes: list[str] | None
    """Of each array that is no constant, where they differ."""
    rows: list[int]
    """The shape of what there is for each token."""

    @classmethod
    def message(cls, lengths: list[int], constant: dict[int, Any], values: Joined) -> dict[str, Any]:
        dtypes = [part.dtype.str for part in values.parts] if values.is_mixed else None
        return vars(cls(lengths, constant, values.dtype.str, dtypes, list(values.rows)))

    def sizes(self) -> list[int]:
        """Bytes of each array."""
        real = [length for place, length in enumerate(self.lengths) if place not in self.constant]
        row = math.prod(self.rows)
        if self.dtypes is None:
            row *= np.dtype(self.dtype).itemsize
            return [length * row for length in real]
        return [length * row * np.dtype(own).itemsize for length, own in zip(real, self.dtypes, strict=True)]

    def parts(self, arrays: Iterator[np.ndarray]) -> list[np.ndarray]:
        """Of the bytes of all arrays those of this column, as what they are."""
        dtype, rows = np.dtype(self.dtype), tuple(self.rows)
        real = list(islice(arrays, len(self.lengths) - len(self.constant)))
        if self.dtypes is None:
            found = [one.view(dtype) for one in real]
        else:
            found = [one.view(own).astype(dtype) for one, own in zip(real, self.dtypes, strict=True)]
        shaped = [one.reshape(-1, *rows) for one in found] if rows else found
        return with_constants(shaped, self.lengths, self.constant, dtype)


class HandOver:
    """Gives ranks their shares, those on this machine through `arena`."""

    def __init__(self, arena: SharedArena) -> None:
        self._arena = arena
        self._told: str | None = None

    @contextmanager
    def given(self, shares: Sequence[Share], here: Sequence[bool]) -> Iterator[list[Share]]:
        """What to send to each rank in the place of its share, until the ranks have answered; `here` says which of them
        are on this machine. Equal shares are the same object."""
        wanted = {id(share): share for share, is_here in zip(shares, here, strict=True) if is_here}
        with ExitStack() as stack:
            try:
                placed = stack.enter_context(self._placed(wanted))
            except NoRoom as error:
                placed = {}
                self._over_channels(str(error))
            yield [
                placed.get(id(share), share) if is_here else share for share, is_here in zip(shares, here, strict=True)
            ]

    @contextmanager
    def _placed(self, shares: dict[int, Share]) -> Iterator[dict[int, Share]]:
        """Shares by their keys, with places in the place of arrays."""
        arrays: list[np.ndarray] = []
        drafts = {}
        for key, share in shares.items():
            begin, batch = len(arrays), dict(share["batch"])
            for name in BY_TOKEN:
                if (column := batch[name]) is not None:
                    batch[name] = _PlacedColumn.message(**column)
                    arrays += column["values"].parts
            drafts[key] = {**share, "batch": batch}, begin, len(arrays)
        with self._arena.lent(arrays) as places:
            yield {key: {**draft, "places": places.part(begin, end)} for key, (draft, begin, end) in drafts.items()}

    def _over_channels(self, why: str) -> None:
        """Say so, once: it takes longer, and nothing else is different."""
        if self._told is None:
            logger.warning("samples go to the trainers over sockets, not through shared memory: %s", why)
        self._told = why
