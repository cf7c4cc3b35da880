"""Each data-parallel rank's part of a batch, and its way to the ranks that need it.

Invariant: whichever way a share takes, ranks get the same numbers, and ranks that train on the same samples get one and
the same share. Nothing of the batch is copied in the driver: ranks on its machine map a file in shared memory, into
which the samples' own arrays were written, and the others get those arrays over their channels. Files are gone when the
ranks have answered; those of a killed run when the next one starts.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.cluster.devices import cpu_cores
from slime.cluster.memory.shared_message import SharedMessage, read_message
from slime.cluster.memory.staging import SHARED_MEMORY, StagingFolder, remove_stale
from slime.train.samples.batch import TrainBatch
from slime.train.samples.scans import mask_totals
from slime.train.schedule import Schedule

logger = logging.getLogger(__name__)

Share = dict[str, Any]


def rank_shares(batch: TrainBatch, schedule: Schedule) -> list[Share]:
    """Each rank's samples, with the micro-batches in local positions and the divisors of the whole step."""
    if not schedule.steps:
        return []
    scheduled = [step.positions for step in schedule.steps]
    trained = [sum(mask_totals([batch.loss_masks[p] for p in positions])) for positions in scheduled]
    num_tokens = sum(len(batch.tokens[p]) for positions in scheduled for p in positions)
    shares = []
    for rank in range(len(schedule.steps[0].ranks)):
        positions = schedule.positions_of_rank(rank)
        local = {position: i for i, position in enumerate(positions)}
        steps = [
            {
                "num_rollouts": step.num_rollouts,
                "num_tokens": count,
                "micro_batches": [[local[p] for p in members] for members in step.ranks[rank]],
            }
            for step, count in zip(schedule.steps, trained, strict=True)
        ]
        shares.append({"batch": batch.select(positions).to_message(), "steps": steps, "num_tokens": num_tokens})
    return shares


def open_share(data: Share) -> Share:
    """The share that a rank was sent, or the one in the file that it was told of."""
    opened: Share = read_message(data["file"]) if "file" in data else data
    return opened


class HandOver:
    """Gives ranks their shares. Files are made under `root`."""

    def __init__(self, root: Path = SHARED_MEMORY) -> None:
        self._root = root
        self._told: str | None = None

    def clean(self) -> None:
        """Remove what killed runs left behind."""
        remove_stale(self._root)

    @contextmanager
    def given(self, shares: Sequence[Share], here: Sequence[bool]) -> Iterator[list[Share]]:
        """What to send to each rank in the place of its share, until the ranks have answered; `here` says which of them
        are on this machine. Equal shares are the same object."""
        wanted = {id(share): share for share, is_here in zip(shares, here, strict=True) if is_here}
        try:
            staging = StagingFolder(self._root, "shares") if wanted else None
        except OSError as error:
            staging = None
            self._over_channels(f"{self._root} cannot be written ({error})")
        if staging is None:
            yield list(shares)
            return
        with staging:
            files = self._written(wanted, staging.path)
            yield [
                {"file": files[id(share)]} if is_here and files else share
                for share, is_here in zip(shares, here, strict=True)
            ]

    def _written(self, shares: dict[int, Share], folder: Path) -> dict[int, str]:
        """The files of shares by their keys; none at all where there is no room for all."""
        messages = {key: SharedMessage(share) for key, share in shares.items()}
        needed, free = sum(message.size for message in messages.values()), shutil.disk_usage(folder).free
        if needed > free:
            self._over_channels(f"{self._root} has {_gib(free)} free and {_gib(needed)} are needed")
            return {}
        paths = {key: folder / f"{number}" for number, key in enumerate(messages)}
        with ThreadPoolExecutor(min(cpu_cores(), len(paths)), thread_name_prefix="share") as pool:
            writing = [pool.submit(message.write, paths[key]) for key, message in messages.items()]
            try:
                for one in writing:
                    one.result()
            except OSError as error:  # somebody else took the room
                pool.shutdown(cancel_futures=True)
                for path in paths.values():
                    path.unlink(missing_ok=True)
                self._over_channels(f"{self._root} has no room for {_gib(needed)} ({error})")
                return {}
        return {key: str(path) for key, path in paths.items()}

    def _over_channels(self, why: str) -> None:
        """Say so, once: it takes longer, and nothing else is different."""
        if self._told is None:
            logger.warning("samples go to the trainers over sockets, not through shared memory: %s", why)
        self._told = why


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
