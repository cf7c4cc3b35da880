"""The journal of the buffer: samples in an SQLite file beside the run, exactly once over any crash."""

from slime.data.buffer.journal import Journal
from slime.data.buffer.recovery import Recovered, RunIdentity, run_identity
from slime.data.buffer.source import JournaledSource, open_journal

__all__ = ["Journal", "JournaledSource", "Recovered", "RunIdentity", "open_journal", "run_identity"]
