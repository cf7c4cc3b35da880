"""A data source whose groups are recorded: the buffer's durable shadow.

Invariant: a group is in the journal before anybody can work on it, together with the position after it. After a crash
`resume` puts source and buffer where the journal says they were; what was handed out and not trained on is served
first, in the order in which it was handed out. A source with `observe_samples` sees every finished group once: those of
a batch and those that a filter dropped on the way to it, in the transaction in which the batch is recorded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from slime.data.buffer.database import open_read_only
from slime.data.buffer.journal import Journal
from slime.data.buffer.recovery import name_of, read_samples, run_identity
from slime.data.buffer.rows import RowCodec, flattened
from slime.data.custom_source import UserSource
from slime.data.sample import Sample
from slime.data.source import Group, RolloutDataSource, RolloutDataSourceWithBuffer, observes
from slime.errors import UserError

# The buffered groups that a saved data position refers to, found in the journal that it names.
#
# Invariant: a journal is known by its name, wherever its file lies by now: in its place, set aside beside it, or in
# the folder of the checkpoint that is loaded. Files there that are no journals, or other ones, are passed over.


class JournaledGroups:
    """What a data source with a buffer asks its journal for (`slime.data.source_state.Records`)."""

    def __init__(self, journal: Journal, load: str | None) -> None:
        """`load` is the folder of the checkpoint that a run goes on from."""
        self.wanted = True
        self._journal = journal
        self._load = load

    @contextmanager
    def not_wanted(self) -> Iterator[None]:
        """The journal knows which groups there are: those of a saved position are not looked for."""
        self.wanted = False
        try:
            yield
        finally:
            self.wanted = True

    def name(self) -> str:
        return self._journal.name()

    def find(self, name: str, row_ids: list[int]) -> dict[int, Sample]:
        found = self._journal.samples(row_ids) if name == self.name() else self._found_elsewhere(name, row_ids)
        for sample in found.values():
            if sample.response_length and sample.status is Sample.Status.PENDING:
                sample.status = Sample.Status.ABORTED  # it was under way when its run ended
        return found

    def _found_elsewhere(self, name: str, row_ids: list[int]) -> dict[int, Sample]:
        path = self._journal.path
        folders = [path.parent] if self._load is None else [path.parent, Path(self._load)]
        for folder in folders:
            for file in sorted(folder.glob(f"{path.stem}*{path.suffix}")):
                try:
                    with open_read_only(file) as connection:
                        if name_of(connection) == name:
                            return read_samples(connection, RowCodec(), row_ids)
                except UserError:
                    continue  # no journal that anybody could read
        return {}


logger = logging.getLogger(__name__)


def open_journal(config: Any, path: Path, prompt_files: Sequence[str] | None = None) -> Journal:
    """The journal of a run at `path`, as the flags want it."""
    return Journal.open(
        path,
        run_identity(config, prompt_files),
        keep=config.keep_samples,
        keep_bytes=int(config.keep_samples_mb * 1e6),
        reward_key=config.reward_key,
        eval_reward_key=config.eval_reward_key,
    )


class JournaledSource:
    """Any data source; what is not said here is asked of (and set in) the source itself."""

    _OWN = frozenset({"source", "journal", "_lock", "_drops", "_returned", "_groups", "_dropped"})

    def __init__(self, source: Any, journal: Journal) -> None:
        self.source = source
        self.journal = journal
        self._lock = threading.RLock()
        """Held while the source works, which may take long."""
        self._drops = threading.Lock()
        self._returned: list[Group] = []
        """Groups of an earlier life, for a source that takes none back."""
        self._dropped: list[Group] = []
        """Groups that the source has yet to observe; until then the journal has them as finished."""
        self._groups: JournaledGroups | None = None
        if isinstance(source, RolloutDataSourceWithBuffer):
            self._groups = source.records = JournaledGroups(journal, source.args.load)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["source"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.source, name, value)

    def __len__(self) -> int:
        return len(self.source)

    def get_samples(self, num_samples: int) -> list[Group]:
        """The next groups of the source, recorded as handed out."""
        with self._lock:
            groups = self._returned[:num_samples]
            if len(groups) < num_samples:
                groups += self._new(num_samples - len(groups))
            self.journal.hand_out(groups, self._position())
            del self._returned[:num_samples]
            return groups

    def _new(self, num_samples: int) -> list[Group]:
        groups: list[Group] = self.source.get_samples(num_samples)
        return self.source.numbered(groups) if isinstance(self.source, RolloutDataSource) else groups

    def add_samples(self, samples: list[Group]) -> None:
        """Put groups back, recorded as far as they have come."""
        with self._lock:
            if _takes_groups(self.source):
                self.journal.put_back(samples)
            self.source.add_samples(samples)

    def drop(self, groups: list[Group]) -> None:
        """A filter left groups out; a source that observes is told with the next batch.

        Event loops call this: it does not wait for a source that is busy.
        """
        if not observes(self.source):
            self.journal.drop(groups)
            return
        with self._drops:
            self._dropped += groups

    def assign(self, rollout_id: int, groups: Sequence[Group], metrics: Mapping[str, Any]) -> None:
        """Groups become the batch of a rollout; a source that observes has seen them and those dropped since."""
        with self._lock:
            if not observes(self.source):
                self.journal.assign(rollout_id, groups, metrics)
                return
            with self._drops:
                dropped, self._dropped = self._dropped, []
            self.source.observe_samples(rollout_id, [*_as_groups(groups), *dropped])
            self.journal.assign(rollout_id, groups, metrics, dropped=dropped, position=self._position())

    def batch(self, rollout_id: int) -> tuple[list[Group], dict[str, Any]] | None:
        """The batch that the journal has of a rollout; a source that stands before it observes it once more."""
        with self._lock:
            found = self.journal.batch(rollout_id)
            if found is not None and isinstance(self.source, UserSource) and self.source.stands_before(rollout_id):
                self.source.observe_samples(rollout_id, found[0])
            return found

    def save(self, rollout_id: int) -> None:
        """Save the source's position, and remember where that was.

        The samples in its buffer are not written again: what is saved refers to their rows.
        """
        with self._lock:
            if self._groups is not None:
                self.journal.refer(rollout_id, _row_ids(_buffered(self.source)))
            self.source.save(rollout_id)
            position = self._position()
            if position is not None:
                self.journal.note_position(rollout_id, position)

    def load(self, rollout_id: int | None = None) -> None:
        """Go on from a position that the source itself has saved; a run calls `resume`."""
        with self._lock:
            self.source.load(rollout_id)

    def resume(self, start: int) -> list[int]:
        """Go on where the run stopped, with rollout `start`; the rollouts whose batches the journal has."""
        with self._lock:
            recovered = self.journal.recover(start)
            if recovered.moved is not None:
                logger.log(
                    logging.WARNING if recovered.moved_work else logging.INFO,
                    "the samples of an earlier run do not fit to rollout %d: they are now in %s",
                    start,
                    recovered.moved,
                )
            if recovered.fresh:
                self.source.load(start - 1)
                self.journal.begin(start - 1, _buffered(self.source), self._position())
                return []
            if recovered.unusable:
                logger.warning(
                    "%s: %d samples cannot be used and count as failed: %s",
                    self.journal.path,
                    len(recovered.unusable),
                    "; ".join(recovered.unusable[:3]),
                )
            self._go_to(recovered.position, start)
            for sample in _samples(recovered.groups):
                if sample.response_length and sample.status is Sample.Status.PENDING:
                    sample.status = Sample.Status.ABORTED  # it was under way when the run ended
            if _takes_groups(self.source):
                self.source.add_samples(recovered.groups)
            else:
                self._returned = recovered.groups
            return recovered.batches

    def _go_to(self, position: dict[str, Any] | None, start: int) -> None:
        if position is not None and isinstance(self.source, UserSource):
            self.source.go_on(position, start - 1, self.journal.position_at(start - 1))
            return
        with nullcontext() if self._groups is None else self._groups.not_wanted():
            self.source.load(start - 1)  # for what a subclass saves besides
        if position is not None:
            self.source.load_state_dict(position, origin=str(self.journal.path))

    def _position(self) -> dict[str, Any] | None:
        return self.source.position() if isinstance(self.source, RolloutDataSource | UserSource) else None


def _takes_groups(source: Any) -> bool:
    return not isinstance(source, RolloutDataSource) or type(source).add_samples is not RolloutDataSource.add_samples


def _as_groups(groups: Sequence[Any]) -> list[Group]:
    """What rollout functions return may be bare samples."""
    return [group if isinstance(group, list) else [group] for group in groups]


def _buffered(source: Any) -> list[Group]:
    if isinstance(source, RolloutDataSourceWithBuffer):
        return source.buffer
    return source.buffered() if isinstance(source, UserSource) else []


def _samples(groups: list[Group]) -> Iterator[Sample]:
    for group in groups:
        for leaf in flattened(group):
            yield leaf.sample


def _row_ids(groups: list[Group]) -> list[int]:
    return [sample.journal_id for sample in _samples(groups) if sample.journal_id is not None]
