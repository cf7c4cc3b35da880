"""The journal of the buffer: samples in an SQLite file beside the run, exactly once over any crash."""

from slime.data.journal.database import JournalFailed
from slime.data.journal.identity import RunIdentity, run_identity
from slime.data.journal.journal import Journal
from slime.data.journal.recovery import Recovered
from slime.data.journal.source import JournaledSource, open_journal

__all__ = ["Journal", "JournalFailed", "JournaledSource", "Recovered", "RunIdentity", "open_journal", "run_identity"]
