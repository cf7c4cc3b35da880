"""Splits a batch into the shares of the data-parallel ranks and transfers them to the ranks.

Invariant: ranks get the same numbers over any transport, and ranks that train on the same samples get the same share.
The driver does not copy the batch. Ranks on its machine get the places of the samples' arrays in shared memory: these
are there since their samples finished, or else are written now and kept until the ranks have answered. Other ranks get
the arrays over their channels.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, count, islice

import numpy as np

from slime.cluster.memory.arena import SharedArena, SharedMemoryFull, read_places
from slime.cluster.rpc.messages import ConcatenatedArrays
from slime.storage.json_types import JsonObject
from slime.train.microbatch_plan import Schedule
from slime.train.samples.batch import BY_TOKEN, TrainBatch

logger = logging.getLogger(__name__)

Share = JsonObject
"""A rank's part of a batch as a message, with numpy arrays or their places."""


def rank_shares(batch: TrainBatch, schedule: Schedule) -> list[Share]:
    """Make each rank's share: its samples, its micro-batches in local positions, and the divisors of the whole step."""
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


def open_share(share: Share) -> TrainBatch:
    """Return the samples of a share on its rank, as views of the message's arrays or of those in shared memory."""
    columns = dict(share["batch"])
    names = [name for name in BY_TOKEN if columns[name] is not None]
    lengths = {}  # of the arrays that are not constant
    for name in names:
        constant = columns[name]["constant"]
        lengths[name] = [length for place, length in enumerate(columns[name]["lengths"]) if place not in constant]
    placed: Iterator[np.ndarray] = iter(())
    if "places" in share:
        sizes = []
        for name in names:
            width, dtypes = math.prod(columns[name]["rows"]), columns[name]["dtypes"]
            if dtypes is None:
                width *= np.dtype(columns[name]["dtype"]).itemsize
                sizes += [length * width for length in lengths[name]]
            else:
                pairs = zip(lengths[name], dtypes, strict=True)
                sizes += [length * width * np.dtype(own).itemsize for length, own in pairs]
        placed = iter(read_places(share["places"], sizes))
    for name in names:
        column, real = columns[name], lengths[name]
        if "places" in share:
            dtype, parts = np.dtype(column["dtype"]), list(islice(placed, len(real)))
            if column["dtypes"] is None:
                parts = [one.view(dtype) for one in parts]
            else:
                parts = [one.view(own).astype(dtype) for one, own in zip(parts, column["dtypes"], strict=True)]
            if column["rows"]:
                parts = [one.reshape(-1, *column["rows"]) for one in parts]
        else:
            values = column["values"]
            whole = values.whole() if isinstance(values, ConcatenatedArrays) else values
            if len(whole) != sum(real):
                raise ValueError(f"a column has {len(whole)} numbers, but its parts have {sum(real)}")
            dtype = whole.dtype
            parts = [whole[end - length : end] for end, length in zip(accumulate(real), real, strict=True)]
        if constant := column["constant"]:  # these take no memory
            longest = (max(column["lengths"]),)
            fills = {value: np.broadcast_to(dtype.type(value), longest) for value in set(constant.values())}
            others = iter(parts)
            parts = [
                fills[constant[place]][:length] if place in constant else next(others)
                for place, length in enumerate(column["lengths"])
            ]
        columns[name] = parts
    return TrainBatch(**columns)


class ShardTransfer:
    """Transfers shares to the ranks, to those on this machine through `arena`."""

    def __init__(self, arena: SharedArena) -> None:
        self._arena = arena
        self._warned_reason: str | None = None

    @contextmanager
    def given(self, shares: Sequence[Share], here: Sequence[bool]) -> Iterator[list[Share]]:
        """Yield what to send to each rank instead of its share; places stay valid until the ranks have answered.

        `here` is true for ranks on this machine. Equal shares are the same object.
        """
        arrays: list[np.ndarray] = []
        drafts, placed = {}, {}
        for key, share in {id(share): share for share, is_here in zip(shares, here, strict=True) if is_here}.items():
            begin, batch = len(arrays), dict(share["batch"])
            for name in BY_TOKEN:
                if batch[name] is None:
                    continue
                values = batch[name]["values"]
                batch[name] = {
                    "lengths": batch[name]["lengths"],
                    "constant": batch[name]["constant"],
                    "dtype": values.dtype.str,  # the common dtype to convert to
                    "dtypes": [part.dtype.str for part in values.parts] if values.is_mixed else None,  # of each array
                    "rows": list(values.rows),  # the shape of a token's entry
                }
                arrays += values.parts
            drafts[key] = {**share, "batch": batch}, begin, len(arrays)
        with ExitStack() as stack:
            try:
                places = stack.enter_context(self._arena.publish_arrays(arrays))
                placed = {key: {**draft, "places": places.part(*bounds)} for key, (draft, *bounds) in drafts.items()}
            except SharedMemoryFull as error:
                reason = str(error)
                if self._warned_reason is None:
                    logger.warning("samples go to the trainers over sockets, not through shared memory: %s", reason)
                self._warned_reason = reason
            yield [
                placed.get(id(share), share) if is_here else share for share, is_here in zip(shares, here, strict=True)
            ]
