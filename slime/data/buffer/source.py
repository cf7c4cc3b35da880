"""`JournaledSource`: wraps a data source and records its groups in the journal.

Invariant: a group is in the journal, together with the position after it, before it is handed out. After a crash
`resume` restores source and buffer from the journal; groups that were handed out and not trained on are served first,
in the order in which they were handed out. A source with `observe_samples` observes every finished group once, groups
of a batch and groups dropped by a filter alike, in the transaction that records the batch.

Buffered groups of a saved data position are looked up in the journal that the position names: in its place, renamed
next to it, or in the folder of the loaded checkpoint. Other files there are ignored.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.data.buffer.database import open_read_only
from slime.data.buffer.journal import Journal
from slime.data.buffer.recovery import name_of, read_samples, run_identity
from slime.data.buffer.rows import RowCodec, flatten_group
from slime.data.custom_source import UserSource
from slime.data.sample import Sample
from slime.data.source import Group, RolloutDataSource, RolloutDataSourceWithBuffer, observes
from slime.errors import UserError
from slime.storage.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from slime.config import Config

logger = logging.getLogger(__name__)


class JournalSampleLookup:
    """Looks up the buffered samples of a data source in its journal (`slime.data.source_state.SampleRecords`)."""

    def __init__(self, journal: Journal, load: str | None) -> None:
        """`load` is the folder of the checkpoint that the run resumes from."""
        self.wanted = True
        self._journal = journal
        self._load = load

    @contextmanager
    def not_wanted(self) -> Iterator[None]:
        """Skip the lookup of groups in saved positions while the journal itself restores them."""
        self.wanted = False
        try:
            yield
        finally:
            self.wanted = True

    def name(self) -> str:
        return self._journal.name()

    def find(self, name: str, row_ids: list[int]) -> dict[int, Sample]:
        found = self._journal.samples(row_ids) if name == self.name() else self._found_elsewhere(name, row_ids)
        _abort_started(found.values())
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
                    continue  # not a readable journal
        return {}


def open_journal(config: Config, path: Path, prompt_files: Sequence[str] | None = None) -> Journal:
    """Open the journal of a run at `path` with the settings of its flags."""
    return Journal(
        path,
        run_identity(config, prompt_files),
        keep=config.keep_samples,
        keep_bytes=int(config.keep_samples_mb * 1e6),
        reward_key=config.reward_key,
        eval_reward_key=config.eval_reward_key,
    )


class JournaledSource:
    """Wraps any data source; other attributes are read from and written to the source itself."""

    _OWN = frozenset({"source", "journal", "_lock", "_drops", "_returned", "_groups", "_dropped"})

    def __init__(self, source: Any, journal: Journal) -> None:
        self.source = source
        self.journal = journal
        self._lock = threading.RLock()
        """Held during calls of the source, which may take long."""
        self._drops = threading.Lock()
        self._returned: list[Group] = []
        """Groups of an earlier process, kept here because the source does not take groups back."""
        self._dropped: list[Group] = []
        """Dropped groups that the source has not observed yet; until then the journal lists them as finished."""
        self._groups: JournalSampleLookup | None = None
        if isinstance(source, RolloutDataSourceWithBuffer):
            self._groups = source.records = JournalSampleLookup(journal, source.args.load)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["source"], name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.source, name, value)

    def __len__(self) -> int:
        return len(self.source)

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return the next groups of the source after recording them as handed out."""
        with self._lock:
            groups = self._returned[:num_samples]
            if len(groups) < num_samples:
                new = self.source.get_samples(num_samples - len(groups))
                groups += self.source.numbered(new) if isinstance(self.source, RolloutDataSource) else new
            self.journal.hand_out(groups, self._position())
            del self._returned[:num_samples]
            return groups

    def add_samples(self, samples: list[Group]) -> None:
        """Put groups back and record their progress."""
        with self._lock:
            if _takes_groups(self.source):
                self.journal.put_back(samples)
            self.source.add_samples(samples)

    def drop(self, groups: list[Group]) -> None:
        """Record groups that a filter dropped; an observing source observes them with the next batch.

        Event loops call this: it does not wait for a busy source.
        """
        if not observes(self.source):
            self.journal.drop(groups)
            return
        with self._drops:
            self._dropped += groups

    def assign(self, rollout_id: int, groups: Sequence[Group], metrics: JsonMapping) -> None:
        """Record groups as the batch of a rollout; an observing source first observes them and the dropped groups."""
        with self._lock:
            if not observes(self.source):
                self.journal.assign(rollout_id, groups, metrics)
                return
            with self._drops:
                dropped, self._dropped = self._dropped, []
            finished = [group if isinstance(group, list) else [group] for group in groups]  # may be bare samples
            self.source.observe_samples(rollout_id, [*finished, *dropped])
            self.journal.assign(rollout_id, groups, metrics, dropped=dropped, position=self._position())

    def batch(self, rollout_id: int) -> tuple[list[Group], JsonObject] | None:
        """Return the recorded batch of a rollout; a source restored to an earlier position observes it again."""
        with self._lock:
            found = self.journal.batch(rollout_id)
            if found is not None and isinstance(self.source, UserSource) and self.source.has_not_observed(rollout_id):
                self.source.observe_samples(rollout_id, found[0])
            return found

    def save(self, rollout_id: int) -> None:
        """Save the source's position, and record it in the journal.

        Samples in the buffer are not written again: the saved state refers to their rows.
        """
        with self._lock:
            if self._groups is not None:
                buffered = _samples(_buffered(self.source))
                row_ids = [sample.journal_id for sample in buffered if sample.journal_id is not None]
                self.journal.refer(rollout_id, row_ids)
            self.source.save(rollout_id)
            position = self._position()
            if position is not None:
                self.journal.note_position(rollout_id, position)

    def load(self, rollout_id: int | None = None) -> None:
        """Resume from a position that the source itself saved; a run calls `resume` instead."""
        with self._lock:
            self.source.load(rollout_id)

    def resume(self, start: int) -> list[int]:
        """Resume the run at rollout `start`; returns the rollouts with recorded batches."""
        with self._lock:
            recovered = self.journal.recover(start)
            if recovered.moved is not None:
                logger.log(
                    logging.WARNING if recovered.moved_work else logging.INFO,
                    "the samples of an earlier run do not match rollout %d: they are now in %s",
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
            position = recovered.position
            if position is not None and isinstance(self.source, UserSource):
                self.source.go_on(position, start - 1, self.journal.position_at(start - 1))
            else:
                with nullcontext() if self._groups is None else self._groups.not_wanted():
                    self.source.load(start - 1)  # for other state that a subclass saves
                if position is not None:
                    self.source.load_state_dict(position, origin=str(self.journal.path))
            _abort_started(_samples(recovered.groups))
            if _takes_groups(self.source):
                self.source.add_samples(recovered.groups)
            else:
                self._returned = recovered.groups
            return recovered.batches

    def _position(self) -> JsonObject | None:
        return self.source.position() if isinstance(self.source, RolloutDataSource | UserSource) else None


def _takes_groups(source: object) -> bool:
    return not isinstance(source, RolloutDataSource) or type(source).add_samples is not RolloutDataSource.add_samples


def _buffered(source: object) -> list[Group]:
    if isinstance(source, RolloutDataSourceWithBuffer):
        return source.buffer
    return source.buffered() if isinstance(source, UserSource) else []


def _abort_started(samples: Iterable[Sample]) -> None:
    """Mark samples as aborted that were in progress when their run ended."""
    for sample in samples:
        if sample.response_length and sample.status is Sample.Status.PENDING:
            sample.status = Sample.Status.ABORTED


def _samples(groups: list[Group]) -> Iterator[Sample]:
    for group in groups:
        for leaf in flatten_group(group):
            yield leaf.sample
