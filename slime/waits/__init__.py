"""Waits that explain themselves: one primitive that knows who waits for whom, why and until when.

The invariant: a wait that goes through here is seen in the wait-for graph while it lasts; when its deadline passes, or
somebody asks with a signal, the graph is shown with the stacks of everybody in it.
"""

from slime.waits.background import Background, BackgroundDied, background, raise_failures
from slime.waits.board import Limit, Wait, acting_as, name_of, named, waiting
from slime.waits.graph import describe
from slime.waits.processes import KnownProcess, ProcessRegistry, forget_process, know_process, state_of
from slime.waits.signals import WaitsShown, ending_signals, watch_signals
from slime.waits.timeouts import WaitTimeout, expired, log_graph, wait_for

__all__ = [
    "Background",
    "BackgroundDied",
    "KnownProcess",
    "Limit",
    "ProcessRegistry",
    "Wait",
    "WaitTimeout",
    "WaitsShown",
    "acting_as",
    "background",
    "describe",
    "ending_signals",
    "expired",
    "forget_process",
    "know_process",
    "log_graph",
    "name_of",
    "named",
    "raise_failures",
    "state_of",
    "wait_for",
    "waiting",
    "watch_signals",
]
