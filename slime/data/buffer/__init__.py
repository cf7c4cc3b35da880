"""The buffer's journal: records samples in an SQLite file of the run, exactly once across crashes."""

from slime.data.buffer.journal import Journal
from slime.data.buffer.recovery import Recovered, RunIdentity, run_identity
from slime.data.buffer.source import JournaledSource, open_journal

__all__ = ["Journal", "JournaledSource", "Recovered", "RunIdentity", "open_journal", "run_identity"]
