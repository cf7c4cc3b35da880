"""The buffered groups that a saved data position refers to, found in the journal that it names.

Invariant: a journal is known by its name, wherever its file lies by now: in its place, set aside beside it, or in the
folder of the checkpoint that is loaded. Files there that are no journals, or other ones, are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.data.journal.database import open_read_only
from slime.data.journal.journal import Journal
from slime.data.journal.recovery import name_of, read_samples
from slime.data.journal.rows import RowCodec
from slime.data.sample import Sample
from slime.errors import UserError


class JournaledGroups:
    """What a data source with a buffer asks its journal for (`slime.data.buffer_state.Records`)."""

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
