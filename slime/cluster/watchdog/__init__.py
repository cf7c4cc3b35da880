"""Diagnoses stalls: records each wait with its waiter, its target, the reason and the deadline.

Invariant: a wait that is recorded here is in the wait-for graph while it lasts. When its deadline passes, or on a
signal, the graph is printed with the stacks of all threads, tasks and processes in it.
"""

from slime.cluster.watchdog.background import Background, BackgroundDied, background, raise_failures
from slime.cluster.watchdog.graph import describe
from slime.cluster.watchdog.registry import Limit, Wait, acting_as, name_of, named, waiting
from slime.cluster.watchdog.stacks import state_of
from slime.cluster.watchdog.timeouts import (
    WaitsShown,
    WaitTimeout,
    ending_signals,
    expired,
    log_graph,
    wait_for,
    watch_signals,
)

__all__ = [
    "Background",
    "BackgroundDied",
    "Limit",
    "Wait",
    "WaitTimeout",
    "WaitsShown",
    "acting_as",
    "background",
    "describe",
    "ending_signals",
    "expired",
    "log_graph",
    "name_of",
    "named",
    "raise_failures",
    "state_of",
    "wait_for",
    "waiting",
    "watch_signals",
]
