"""The journal of a run: every sample from the moment its prompt is handed out until it has been trained on.

    pending ──► partial ──► finished ──► assigned (rollout r) ──► consumed (by r) ──► pruned after checkpoints
                   └────────────┴──► dropped

Beside them stand the completions of evaluations, which no restart needs (`slime.data.buffer.retention`).

Invariants: whatever ends the process, each call below has happened as a whole or not at all. A group is in one state,
so no trajectory is lost or trained on twice. The data position is written in the same transaction as the hand-out it
belongs to. Which batches a restart trains on again is decided by `recover` alone.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.data.buffer.database import Database
from slime.data.buffer.recovery import (
    Recovered,
    give_up_useless,
    has_content,
    is_empty,
    name_of,
    read_groups,
    read_samples,
    replay_from,
    unusable_rows,
    usable_from,
)
from slime.data.buffer.retention import (
    Content,
    content_of,
    forget_evaluations_after,
    keep_evaluation,
    refer,
    release,
    retire,
)
from slime.data.buffer.rows import Leaf, RowCodec, flattened, state_of, status_of
from slime.data.buffer.schema import OPEN
from slime.data.buffer.writer import Home, Writer
from slime.data.json_samples import from_json, to_json
from slime.data.sample import Sample
from slime.data.source import Group
from slime.errors import UserError
from slime.storage.group_commit import Change, Commits

logger = logging.getLogger(__name__)


class Journal:
    """The one writer of a journal file; usable from several threads."""

    def __init__(
        self,
        database: Database,
        *,
        keep: bool,
        keep_bytes: int = 0,
        reward_key: str | None = None,
        eval_reward_key: str | None = None,
    ) -> None:
        self._database = database
        self._keep = keep
        self._keep_bytes = keep_bytes
        self._rows = RowCodec(reward_key)
        self._eval_rows = RowCodec(eval_reward_key or reward_key)
        self._writer = self._new_writer()
        self._commits = Commits(database)

    @classmethod
    def open(
        cls,
        path: Path,
        identity: Mapping[str, str],
        *,
        keep: bool,
        keep_bytes: int = 0,
        reward_key: str | None = None,
        eval_reward_key: str | None = None,
    ) -> Journal:
        """Make or open the journal `path`; `keep` leaves consumed samples in it, `keep_bytes` only the last of them.

        A file that is no journal, of a newer format, or of a run with another `identity` is a `UserError` that names
        what differs; the file stays as it is. `reward_key` is the number shown of rewards that are dicts.
        """
        database = Database(Path(path), identity)
        return cls(database, keep=keep, keep_bytes=keep_bytes, reward_key=reward_key, eval_reward_key=eval_reward_key)

    @property
    def path(self) -> Path:
        """The SQLite file."""
        return self._database.path

    def recover(self, start: int) -> Recovered:
        """Bring the journal to the state in which rollouts before `start` are consumed, and the others are not.

        A journal that cannot be brought there (it has forgotten `start`, or never came as far) begins anew; the old
        file is moved aside when there is anything in it.
        """
        moved = None
        with self._database.reading() as connection:
            usable, has_samples = usable_from(connection, start), has_content(connection)
            had_work = not usable and content_of(connection) is Content.WORK
        if not usable:
            moved = self._database.begin_anew(keep_old=has_samples)
            self._writer = self._new_writer()
        with self._database.transaction() as connection:
            forget_evaluations_after(connection, start)
            if is_empty(connection):
                _set_meta(connection, "horizon", str(start))
                return Recovered(position=None, groups=[], batches=[], fresh=True, moved=moved, moved_work=had_work)
            assigned = replay_from(connection, start)
            unusable = self._fail_unusable(connection)
            batches = give_up_useless(connection, assigned) if unusable else assigned
            groups = read_groups(connection, self._rows, f"state IN {OPEN}", ())
            position = _read_position(connection)
            return Recovered(position, groups, batches, fresh=False, unusable=unusable)

    def begin(self, rollout_id: int, groups: Sequence[Group], position: dict[str, Any] | None) -> None:
        """Record what a data source has before the first hand-out: its position after `rollout_id`, and its buffer."""
        leaves = self._looked_at(groups)
        with self._database.transaction() as connection:
            written = self._write(connection, leaves)
            _note_position(connection, rollout_id, position)
            _set_position(connection, position)
        _mark(leaves, written)

    def hand_out(self, groups: Sequence[Group], position: dict[str, Any] | None) -> None:
        """Groups leave the data source, which then stands at `position`; new ones get their rows and ids."""
        handed_out = [leaves for group in groups if (leaves := flattened(group))]
        for leaves in handed_out:
            if any(leaf.sample.journal_id is None for leaf in leaves):
                self._rows.encoded(leaves)
        changed, written = [], []
        with self._database.transaction() as connection:
            for leaves in handed_out:
                if all(leaf.sample.journal_id is None for leaf in leaves):
                    changed.append(leaves)
                    written.append(self._writer.new_group(connection, leaves, "pending"))
                elif not self._handed_out_again(connection, leaves):
                    changed.append(self._look_at(leaves))
                    written += self._writer.write_groups(connection, [leaves], lambda _: "pending", _is_free)
            _set_position(connection, position)
        _mark(changed, written)

    def put_back(self, groups: Sequence[Group]) -> None:
        """Groups return to the data source, as far as they have come."""
        self._commits.drain()
        leaves = self._looked_at(groups)
        with self._database.transaction() as connection:
            written = self._write(connection, leaves)
        _mark(leaves, written)

    def produced(self, dispatched: Sample, produced: Sample | list[Sample]) -> None:
        """One member of a group has ended: finished, failed, or aborted. Samples of no hand-out are not recorded."""
        self._now(self._producing(dispatched, produced))

    async def record(self, dispatched: Sample, produced: Sample | list[Sample]) -> None:
        """`produced`, without keeping the event loop: returns when it is in the file, together with others."""
        if dispatched.journal_id is not None:
            await self._commits.write(lambda: self._producing(dispatched, produced))

    def progressed(self, sample: Sample) -> None:
        """A sample under way has more tokens."""
        self._now(self._progressing(sample))

    async def record_progress(self, sample: Sample) -> None:
        """`progressed`, without keeping the event loop."""
        if sample.journal_id is not None:
            await self._commits.write(lambda: self._progressing(sample))

    def _producing(self, dispatched: Sample, produced: Sample | list[Sample]) -> Change | None:
        leaves = [Leaf(leaf.sample, None, leaf.leaf) for leaf in flattened([produced])]
        if dispatched.journal_id is None or not leaves:
            return None
        for leaf in leaves:
            leaf.content = self._rows.content(leaf.sample)  # first: whatever changes from now on is a change
        self._rows.encoded(leaves)

        def change(connection: sqlite3.Connection) -> Callable[[], None] | None:
            home = self._open_home(connection, dispatched)
            if home is None:
                return None
            ids = self._writer.write_member(connection, home, leaves)
            progress = connection.execute(
                "SELECT status, response_length FROM samples WHERE group_id = ?", (home.group_id,)
            )
            state = state_of(progress.fetchall())
            if state != home.state:
                connection.execute("UPDATE groups SET state = ? WHERE id = ?", (state, home.group_id))
            return lambda: _mark([leaves], [(home.group_id, ids)])

        return change

    def _progressing(self, sample: Sample) -> Change | None:
        if sample.journal_id is None:
            return None
        (leaf,) = self._rows.encoded([Leaf(sample, None)])

        def change(connection: sqlite3.Connection) -> None:
            home = self._open_home(connection, sample)
            if home is None:
                return
            self._writer.update(connection, home.row_id, leaf)
            if home.state == "pending" and sample.response_length:
                connection.execute("UPDATE groups SET state = 'partial' WHERE id = ?", (home.group_id,))

        return change

    def _now(self, change: Change | None) -> None:
        if change is None:
            return
        self._commits.drain()
        with self._database.transaction() as connection:
            after = change(connection)
        if after is not None:
            after()

    def assign(
        self,
        rollout_id: int,
        groups: Sequence[Group],
        metrics: Mapping[str, Any],
        *,
        dropped: Sequence[Group] = (),
        position: dict[str, Any] | None = None,
    ) -> None:
        """Groups, as they now are, become the batch of `rollout_id`, with the metrics of that rollout.

        Samples that have not changed since they were recorded are not written again. In the same transaction other
        groups are `dropped`, and the data source stands at `position`, if it is one that has learned from them.
        """
        self._commits.drain()
        leaves = self._looked_at(groups)
        text = json.dumps(to_json(dict(metrics), f"metrics of rollout {rollout_id}"))
        with self._database.transaction() as connection:
            _refuse_consumed(connection, rollout_id)
            connection.execute(
                "UPDATE groups SET state = 'dropped', rollout_id = NULL, position = NULL WHERE rollout_id = ?",
                (rollout_id,),
            )
            written = self._writer.write_groups(connection, leaves, lambda _: "assigned", _is_free)
            connection.executemany(
                "UPDATE groups SET rollout_id = ?, position = ? WHERE id = ?",
                [(rollout_id, place, group_id) for place, (group_id, _) in enumerate(written)],
            )
            connection.execute("INSERT OR REPLACE INTO rollouts VALUES (?, 'assigned', ?)", (rollout_id, text))
            self._drop(connection, dropped)
            _set_position(connection, position)
        _mark(leaves, written)
        self._writer.forget(row_id for _, ids in written for row_id in ids)

    def drop(self, groups: Sequence[Group]) -> None:
        """Groups will not be trained on: a filter left them out, or they are too old."""
        with self._database.transaction() as connection:
            self._drop(connection, groups)

    def _drop(self, connection: sqlite3.Connection, groups: Sequence[Group]) -> None:
        for leaves in map(flattened, groups):
            homes = [self._writer.home(connection, leaf.sample) for leaf in leaves]
            self._writer.forget(home.row_id for home in homes if home is not None)
            connection.executemany(
                "UPDATE groups SET state = 'dropped', rollout_id = NULL, position = NULL "
                "WHERE id = ? AND state != 'consumed'",
                [(group_id,) for group_id in {home.group_id for home in homes if home is not None}],
            )

    def batch(self, rollout_id: int) -> tuple[list[Group], dict[str, Any]] | None:
        """The groups and metrics that were assigned to a rollout and not consumed, to be trained on again."""
        with self._database.reading() as connection:
            row = connection.execute(
                "SELECT metrics FROM rollouts WHERE rollout_id = ? AND state = 'assigned'", (rollout_id,)
            ).fetchone()
            if row is None:
                return None
            groups = read_groups(connection, self._rows, "rollout_id = ?", (rollout_id,))
        return groups, from_json(json.loads(row[0]))

    def consumed(self, rollout_id: int) -> None:
        """The trainers have made their step on the batch of `rollout_id`."""
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE groups SET state = 'consumed', consumed_by = ?1 WHERE rollout_id = ?1 AND state = 'assigned'",
                (rollout_id,),
            )
            changed = connection.execute("UPDATE rollouts SET state = 'consumed' WHERE rollout_id = ?", (rollout_id,))
            if not changed.rowcount:
                raise ValueError(f"rollout {rollout_id} was consumed, but no batch was ever assigned to it")

    def note_position(self, rollout_id: int, position: dict[str, Any]) -> None:
        """Remember where the data source stood when its state after `rollout_id` was saved."""
        with self._database.transaction() as connection:
            _note_position(connection, rollout_id, position)

    def position_at(self, rollout_id: int) -> dict[str, Any] | None:
        """What `note_position` was told for a rollout."""
        with self._database.reading() as connection:
            row = connection.execute("SELECT position FROM positions WHERE rollout_id = ?", (rollout_id,)).fetchone()
        return None if row is None else json.loads(row[0])

    def refer(self, rollout_id: int, row_ids: Iterable[int]) -> None:
        """The state saved with `rollout_id` refers to these samples: they stay while that checkpoint is kept."""
        with self._database.transaction() as connection:
            refer(connection, rollout_id, row_ids)

    def name(self) -> str:
        """A name that no other journal has."""
        with self._database.transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO meta VALUES ('name', ?)", (uuid.uuid4().hex,))
            return name_of(connection) or ""

    def samples(self, row_ids: Sequence[int]) -> dict[int, Sample]:
        """The samples of rows, by row id; those that are not there are left out."""
        with self._database.reading() as connection:
            return read_samples(connection, self._rows, row_ids)

    def checkpointed(self, rollout_id: int, *, kept: Collection[int] = ()) -> None:
        """A checkpoint of `rollout_id` is durable: prune what can be needed no more, and make the rest durable too.

        What was in the buffer of a checkpoint of the rollouts `kept` stays, to go on from that one.
        """
        with self._database.transaction() as connection:
            replay_from(connection, rollout_id + 1, forget_later=False)
            if not self._keep:
                release(connection, kept)
                retire(connection, rollout_id, self._keep_bytes)
                connection.execute("DELETE FROM positions WHERE rollout_id < ?", (rollout_id,))
                _set_meta(connection, "horizon", str(rollout_id + 1))
        self.sync()

    def sync(self) -> None:
        """Make everything recorded so far survive a power cut. Comes before the checkpoint that relies on it."""
        self._commits.drain()
        self._database.sync()

    def keep_evaluation(self, step: int, datasets: Mapping[str, Sequence[Sample]]) -> None:
        """Keep the completions of the weights after `step` rollouts; a sample that cannot be kept is left out."""
        if not self._keep and not self._keep_bytes:
            return
        rows: dict[str, list[tuple[Any, ...]]] = {}
        for dataset, samples in datasets.items():
            rows[dataset] = []
            for sample in samples:
                try:
                    rows[dataset].append(self._eval_rows.columns(sample))
                except UserError as error:
                    logger.warning("evaluation on %s: not kept to be looked at: %s", dataset, error)
        with self._database.transaction() as connection:
            keep_evaluation(connection, step, rows, None if self._keep else self._keep_bytes)

    def close(self) -> None:
        """Close the file; safe to call again."""
        self._commits.close()
        self._database.close()

    def _fail_unusable(self, connection: sqlite3.Connection) -> list[str]:
        """Samples whose rows cannot be used have failed, with the cause; one sentence for each."""
        found = unusable_rows(connection, self._rows)
        for row_id, sample in found:
            (leaf,) = self._rows.encoded([Leaf(sample, None)])
            self._writer.update(connection, row_id, leaf)
        return [f"sample {sample.index} ({sample.failure})" for _, sample in found]

    def _new_writer(self) -> Writer:
        with self._database.reading() as connection:
            return Writer(connection, self._rows)

    def _looked_at(self, groups: Sequence[Group]) -> list[list[Leaf]]:
        return [self._look_at(leaves) for group in groups if (leaves := flattened(group))]

    def _look_at(self, leaves: list[Leaf]) -> list[Leaf]:
        """The same leaves, with their contents where the rows may have the same already."""
        for leaf in leaves:
            if self._writer.knows(leaf.sample):
                leaf.content = self._rows.content(leaf.sample)
        return leaves

    def _write(self, connection: sqlite3.Connection, groups: list[list[Leaf]]) -> list[tuple[int, list[int]]]:
        """Groups that are in no batch, in the state their samples are in."""
        return self._writer.write_groups(connection, groups, _state, _is_free)

    def _handed_out_again(self, connection: sqlite3.Connection, leaves: list[Leaf]) -> bool:
        """Mark a group that the journal has as handed out; False when it does not have it as one group."""
        homes = [self._writer.home(connection, leaf.sample) for leaf in leaves]
        group_ids = {home.group_id if home is not None and _is_free(home) else None for home in homes}
        if len(group_ids) != 1 or None in group_ids:
            return False
        connection.execute("UPDATE groups SET state = 'pending' WHERE id = ?", tuple(group_ids))
        return True

    def _open_home(self, connection: sqlite3.Connection, sample: Sample) -> Home | None:
        home = self._writer.home(connection, sample)
        return home if home is not None and home.state in OPEN else None


def _is_free(home: Home) -> bool:
    return home.state in OPEN or home.state == "dropped"


def _state(leaves: list[Leaf]) -> str:
    return state_of((status_of(leaf.sample), leaf.sample.response_length) for leaf in leaves)


def _mark(groups: list[list[Leaf]], written: list[tuple[int, list[int]]]) -> None:
    """Samples learn their row ids, and rows what they hold, only now, when they are recorded for good."""
    for leaves, (_, ids) in zip(groups, written, strict=True):
        for leaf, row_id in zip(leaves, ids, strict=True):
            leaf.sample.journal_id = row_id
            if leaf.content is not None:
                leaf.content.is_in_file = True


def _refuse_consumed(connection: sqlite3.Connection, rollout_id: int) -> None:
    row = connection.execute("SELECT state FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if row is not None and row[0] == "consumed":
        raise ValueError(f"rollout {rollout_id} has been trained on: its batch cannot be assigned again")


def _set_meta(connection: sqlite3.Connection, key: str, value: str) -> None:
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


def _set_position(connection: sqlite3.Connection, position: dict[str, Any] | None) -> None:
    if position is not None:
        _set_meta(connection, "position", json.dumps(position))


def _note_position(connection: sqlite3.Connection, rollout_id: int, position: dict[str, Any] | None) -> None:
    if position is not None:
        connection.execute("INSERT OR REPLACE INTO positions VALUES (?, ?)", (rollout_id, json.dumps(position)))


def _read_position(connection: sqlite3.Connection) -> dict[str, Any] | None:
    row = connection.execute("SELECT value FROM meta WHERE key = 'position'").fetchone()
    return None if row is None else json.loads(row[0])
