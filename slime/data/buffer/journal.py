"""The journal of a run: records every sample from the hand-out of its prompt until it has been trained on.

    pending ──► partial ──► finished ──► assigned (rollout r) ──► consumed (by r) ──► pruned after checkpoints
                   └────────────┴──► dropped

It also keeps completions of evaluations, which restarts do not need (`slime.data.buffer.retention`).

Invariants: each call below is atomic, also if the process dies. A group is in exactly one state, so no trajectory is
lost or trained on twice. The data position is written in the same transaction as its hand-out. Only `recover` decides
which batches a restart trains on again.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from slime.data.buffer.database import OPEN, Database, JournalContents, classify_contents
from slime.data.buffer.recovery import (
    Recovered,
    can_resume_at,
    drop_untrainable_batches,
    has_progress,
    is_journal_empty,
    mark_for_replay,
    name_of,
    read_groups,
    read_leaves,
    read_samples,
)
from slime.data.buffer.retention import (
    forget_evaluations_after,
    keep_evaluation,
    prune_consumed,
    release,
)
from slime.data.buffer.rows import GroupLeaf, RowCodec, flatten_group, is_unusable, state_of
from slime.data.buffer.writer import RowLocation, Writer
from slime.data.json_samples import from_json, to_json
from slime.data.sample import Sample
from slime.data.source import Group
from slime.errors import UserError
from slime.storage.json_types import JsonMapping, JsonObject
from slime.storage.sqlite_store import Change

logger = logging.getLogger(__name__)


class Journal:
    """The only writer of a journal file; thread-safe."""

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, str],
        *,
        keep: bool,
        keep_bytes: int = 0,
        reward_key: str | None = None,
        eval_reward_key: str | None = None,
    ) -> None:
        """Create or open the journal `path`; `keep` retains all consumed samples, `keep_bytes` only the last ones.

        A file that is not a journal, has a newer format, or belongs to a run with another `identity` raises a
        `UserError` that names the difference, and stays unchanged. `reward_key` selects the number of dict rewards that
        is shown.
        """
        self.path = Path(path)
        self._database = Database(self.path, identity)
        self._keep = keep
        self._keep_bytes = keep_bytes
        self._rows = RowCodec(reward_key)
        self._eval_rows = RowCodec(eval_reward_key or reward_key)
        self._writer = self._new_writer()

    def recover(self, start: int) -> Recovered:
        """Bring the journal to the state in which rollouts before `start` are consumed and later ones are not.

        If that is impossible (data of `start` was removed, or `start` was never reached), a new journal starts; the old
        file is renamed if it has any content.
        """
        moved = None
        with self._database.reading() as connection:
            usable, has_samples = can_resume_at(connection, start), has_progress(connection)
            had_work = not usable and classify_contents(connection) is JournalContents.WORK
        if not usable:
            moved = self._database.start_new_file(keep_old=has_samples)
            self._writer = self._new_writer()
        with self._database.transaction() as connection:
            forget_evaluations_after(connection, start)
            if is_journal_empty(connection):
                _set_meta(connection, "horizon", str(start))
                return Recovered(position=None, groups=[], batches=[], fresh=True, moved=moved, moved_work=had_work)
            assigned = mark_for_replay(connection, start)
            waiting = f"state IN {OPEN} OR state = 'assigned'"
            found = read_leaves(connection, self._rows, waiting, check=True)
            failed = [leaf for leaf in found if is_unusable(leaf.sample)]
            for leaf in failed:
                self._writer.update(connection, leaf.row_id, self._rows.columns(leaf.sample))
            unusable = [f"sample {leaf.sample.index} ({leaf.sample.failure})" for leaf in failed]
            batches = drop_untrainable_batches(connection, assigned) if unusable else assigned
            groups = read_groups(connection, self._rows, f"state IN {OPEN}", ())
            row = connection.execute("SELECT value FROM meta WHERE key = 'position'").fetchone()
            position = None if row is None else json.loads(row[0])
            return Recovered(position, groups, batches, fresh=False, unusable=unusable)

    def begin(self, rollout_id: int, groups: Sequence[Group], position: JsonObject | None) -> None:
        """Record the state of a data source before the first hand-out: its position after `rollout_id`, its buffer."""
        leaves = self._looked_at(groups)
        with self._database.transaction() as connection:
            self._writer.write_groups(connection, leaves)
            _note_position(connection, rollout_id, position)
            _set_position(connection, position)
        _mark(leaves)

    def hand_out(self, groups: Sequence[Group], position: JsonObject | None) -> None:
        """Record that groups leave the data source, with its `position` after that; new groups get rows and ids."""
        handed_out = [leaves for group in groups if (leaves := flatten_group(group))]
        for leaves in handed_out:
            if any(leaf.sample.journal_id is None for leaf in leaves):
                for leaf in leaves:
                    leaf.columns = self._rows.columns(leaf.sample)
        with self._database.transaction() as connection:
            changed = [leaves for leaves in handed_out if not self._handed_out_again(connection, leaves)]
            self._look_at(changed)
            self._writer.write_groups(connection, changed, "pending")
            _set_position(connection, position)
        _mark(changed)

    def put_back(self, groups: Sequence[Group]) -> None:
        """Record groups that return to the data source, with their progress."""
        self._database.drain()
        leaves = self._looked_at(groups)
        with self._database.transaction() as connection:
            self._writer.write_groups(connection, leaves)
        _mark(leaves)

    def produced(self, dispatched: Sample, produced: Sample | list[Sample]) -> None:
        """Record that a member of a group finished, failed or was aborted; samples without a hand-out are ignored."""
        change = self._producing(dispatched, produced)
        if change is None:
            return
        self._database.drain()
        with self._database.transaction() as connection:
            after = change(connection)
        if after is not None:
            after()

    async def record(self, dispatched: Sample, produced: Sample | list[Sample]) -> None:
        """Do `produced` without blocking the event loop; returns after a group commit."""
        if dispatched.journal_id is not None:
            await self._database.write(lambda: self._producing(dispatched, produced))

    async def record_progress(self, sample: Sample) -> None:
        """Record the progress of a sample that is still generating."""

        def progressing() -> Change:
            columns = self._rows.columns(sample)

            def change(connection: sqlite3.Connection) -> None:
                home = self._open_home(connection, sample)
                if home is None:
                    return
                self._writer.update(connection, home.row_id, columns)
                if home.state == "pending" and sample.response_length:
                    connection.execute("UPDATE groups SET state = 'partial' WHERE id = ?", (home.group_id,))

            return change

        if sample.journal_id is not None:
            await self._database.write(progressing)

    def _producing(self, dispatched: Sample, produced: Sample | list[Sample]) -> Change | None:
        leaves = [GroupLeaf(leaf.sample, None, leaf.leaf) for leaf in flatten_group([produced])]
        if dispatched.journal_id is None or not leaves:
            return None
        for leaf in leaves:
            leaf.content = self._rows.content(leaf.sample)  # first, so that later modifications count as changes
            leaf.columns = self._rows.columns(leaf.sample)

        def change(connection: sqlite3.Connection) -> Callable[[], None] | None:
            home = self._open_home(connection, dispatched)
            if home is None:
                return None
            self._writer.write_member(connection, home, leaves)
            progress = connection.execute(
                "SELECT status, response_length FROM samples WHERE group_id = ?", (home.group_id,)
            )
            state = state_of(progress.fetchall())
            if state != home.state:
                connection.execute("UPDATE groups SET state = ? WHERE id = ?", (state, home.group_id))
            return lambda: _mark([leaves])

        return change

    def assign(
        self,
        rollout_id: int,
        groups: Sequence[Group],
        metrics: JsonMapping,
        *,
        dropped: Sequence[Group] = (),
        position: JsonObject | None = None,
    ) -> None:
        """Record groups in their current state as the batch of `rollout_id`, with the metrics of that rollout.

        Samples unchanged since they were recorded are not written again. The same transaction records `dropped` groups
        and, for an observing data source, its new `position`.
        """
        self._database.drain()
        leaves = self._looked_at(groups)
        text = json.dumps(to_json(dict(metrics), f"metrics of rollout {rollout_id}"))
        with self._database.transaction() as connection:
            row = connection.execute("SELECT state FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
            if row is not None and row[0] == "consumed":
                raise ValueError(f"rollout {rollout_id} has been trained on: its batch cannot be assigned again")
            connection.execute(
                "UPDATE groups SET state = 'dropped', rollout_id = NULL, position = NULL WHERE rollout_id = ?",
                (rollout_id,),
            )
            group_ids = self._writer.write_groups(connection, leaves, "assigned")
            connection.executemany(
                "UPDATE groups SET rollout_id = ?, position = ? WHERE id = ?",
                [(rollout_id, place, group_id) for place, group_id in enumerate(group_ids)],
            )
            connection.execute("INSERT OR REPLACE INTO rollouts VALUES (?, 'assigned', ?)", (rollout_id, text))
            self._drop(connection, dropped)
            _set_position(connection, position)
        _mark(leaves)
        self._writer.forget(leaf.row_id for group in leaves for leaf in group)

    def drop(self, groups: Sequence[Group]) -> None:
        """Record groups that will not be trained on, because a filter dropped them or they are stale."""
        with self._database.transaction() as connection:
            self._drop(connection, groups)

    def _drop(self, connection: sqlite3.Connection, groups: Sequence[Group]) -> None:
        for leaves in map(flatten_group, groups):
            homes = [self._writer.home(connection, leaf.sample) for leaf in leaves]
            self._writer.forget(home.row_id for home in homes if home is not None)
            connection.executemany(
                "UPDATE groups SET state = 'dropped', rollout_id = NULL, position = NULL "
                "WHERE id = ? AND state != 'consumed'",
                [(group_id,) for group_id in {home.group_id for home in homes if home is not None}],
            )

    def batch(self, rollout_id: int) -> tuple[list[Group], JsonObject] | None:
        """Read the groups and metrics that were assigned to a rollout but not consumed, to train on them again."""
        with self._database.reading() as connection:
            row = connection.execute(
                "SELECT metrics FROM rollouts WHERE rollout_id = ? AND state = 'assigned'", (rollout_id,)
            ).fetchone()
            if row is None:
                return None
            groups = read_groups(connection, self._rows, "rollout_id = ?", (rollout_id,))
        return groups, from_json(json.loads(row[0]))

    def consumed(self, rollout_id: int) -> None:
        """Record that the trainers completed their step on the batch of `rollout_id`."""
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE groups SET state = 'consumed', consumed_by = ?1 WHERE rollout_id = ?1 AND state = 'assigned'",
                (rollout_id,),
            )
            changed = connection.execute("UPDATE rollouts SET state = 'consumed' WHERE rollout_id = ?", (rollout_id,))
            if not changed.rowcount:
                raise ValueError(f"rollout {rollout_id} was consumed, but no batch was ever assigned to it")

    def note_position(self, rollout_id: int, position: JsonObject) -> None:
        """Record the position of the data source at the time its state after `rollout_id` was saved."""
        with self._database.transaction() as connection:
            _note_position(connection, rollout_id, position)

    def position_at(self, rollout_id: int) -> JsonObject | None:
        """Return the position that `note_position` recorded for a rollout."""
        with self._database.reading() as connection:
            row = connection.execute("SELECT position FROM positions WHERE rollout_id = ?", (rollout_id,)).fetchone()
        return None if row is None else json.loads(row[0])

    def refer(self, rollout_id: int, row_ids: Iterable[int]) -> None:
        """Retain samples that the saved state of `rollout_id` refers to, as long as that checkpoint exists."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM referred WHERE checkpoint = ?", (rollout_id,))
            connection.executemany(
                "INSERT OR IGNORE INTO referred SELECT ?, group_id FROM samples WHERE id = ?",
                [(rollout_id, row_id) for row_id in row_ids],
            )

    def name(self) -> str:
        """Return the unique name of this journal; it is created on the first call."""
        with self._database.transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO meta VALUES ('name', ?)", (uuid.uuid4().hex,))
            return name_of(connection) or ""

    def samples(self, row_ids: Sequence[int]) -> dict[int, Sample]:
        """Read samples by row id, without missing rows."""
        with self._database.reading() as connection:
            return read_samples(connection, self._rows, row_ids)

    def checkpointed(self, rollout_id: int, *, kept: Collection[int] = ()) -> None:
        """Prune data that a durable checkpoint of `rollout_id` makes obsolete, and flush the rest.

        Buffered groups of the checkpoints of the rollouts `kept` are retained, so that a run can resume from them.
        """
        with self._database.transaction() as connection:
            mark_for_replay(connection, rollout_id + 1, forget_later=False)
            if not self._keep:
                release(connection, kept)
                prune_consumed(connection, rollout_id, self._keep_bytes)
                connection.execute("DELETE FROM positions WHERE rollout_id < ?", (rollout_id,))
                _set_meta(connection, "horizon", str(rollout_id + 1))
        self.sync()

    def sync(self) -> None:
        """Flush all records to disk; required before a checkpoint that relies on them."""
        self._database.sync()

    def keep_evaluation(self, step: int, datasets: Mapping[str, Sequence[Sample]]) -> None:
        """Keep the completions of the weights after `step` rollouts; samples that cannot be stored are left out."""
        if not self._keep and not self._keep_bytes:
            return
        rows: dict[str, list[tuple[object, ...]]] = {}
        for dataset, samples in datasets.items():
            rows[dataset] = []
            for sample in samples:
                try:
                    rows[dataset].append(self._eval_rows.columns(sample))
                except UserError as error:
                    logger.warning("evaluation on %s: sample not kept for inspection: %s", dataset, error)
        with self._database.transaction() as connection:
            keep_evaluation(connection, step, rows, None if self._keep else self._keep_bytes)

    def close(self) -> None:
        """Close the file; safe to call again."""
        self._database.close()

    def _new_writer(self) -> Writer:
        with self._database.reading() as connection:
            return Writer(connection, self._rows)

    def _looked_at(self, groups: Sequence[Group]) -> list[list[GroupLeaf]]:
        found = [leaves for group in groups if (leaves := flatten_group(group))]
        self._look_at(found)
        return found

    def _look_at(self, groups: list[list[GroupLeaf]]) -> None:
        """Compute the content keys of leaves whose rows may be unchanged."""
        for leaves in groups:
            for leaf in leaves:
                if self._writer.knows(leaf.sample):
                    leaf.content = self._rows.content(leaf.sample)

    def _handed_out_again(self, connection: sqlite3.Connection, leaves: list[GroupLeaf]) -> bool:
        """Mark a recorded group as handed out; False if the journal does not have it as one group."""
        homes = [self._writer.home(connection, leaf.sample) for leaf in leaves]
        group_ids = {home.group_id if home is not None and home.is_free else None for home in homes}
        if len(group_ids) != 1 or None in group_ids:
            return False
        connection.execute("UPDATE groups SET state = 'pending' WHERE id = ?", tuple(group_ids))
        return True

    def _open_home(self, connection: sqlite3.Connection, sample: Sample) -> RowLocation | None:
        home = self._writer.home(connection, sample)
        return home if home is not None and home.state in OPEN else None


def _mark(groups: list[list[GroupLeaf]]) -> None:
    """Set the samples' row ids and mark content keys as written; call it only after the commit."""
    for leaves in groups:
        for leaf in leaves:
            leaf.sample.journal_id = leaf.row_id
            if leaf.content is not None:
                leaf.content.is_in_file = True


def _set_meta(connection: sqlite3.Connection, key: str, value: str) -> None:
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


def _set_position(connection: sqlite3.Connection, position: JsonObject | None) -> None:
    if position is not None:
        _set_meta(connection, "position", json.dumps(position))


def _note_position(connection: sqlite3.Connection, rollout_id: int, position: JsonObject | None) -> None:
    if position is not None:
        connection.execute("INSERT OR REPLACE INTO positions VALUES (?, ?)", (rollout_id, json.dumps(position)))
