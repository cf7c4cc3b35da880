"""Formats the wait-for graph: chains of waits, then the stacks of all waiters and processes in them.

Invariant: every registered wait is in the text, alone or counted with similar ones. A cycle of waits is written once
and marked as a cycle.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slime.cluster.watchdog.registry import Wait, format_flag, wait_registry
from slime.cluster.watchdog.stacks import process_registry, stacks_of, task_stack, thread_stacks

_INDENT = "  "
NO_WAITS = "no waits"


@dataclass
class SimilarWaits:
    """Waits that differ only in numbers, such as 64 samples that wait for one engine."""

    waits: list[Wait] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def add(self, wait: Wait) -> None:
        self.waits.append(wait)
        self.names.update(wait.path)

    @property
    def longest(self) -> Wait:
        return min(self.waits, key=lambda wait: wait.began)

    @property
    def whom(self) -> list[str]:
        return [name.strip() for name in self.waits[0].whom.split(",")]

    def line(self, now: float) -> str:
        first = self.longest
        more = len(self.waits) - 1
        who = f"{first.who} waits" if not more else f"{first.who} and {more} more like it wait"
        took = f"{'longest ' if more else ''}{now - first.began:.1f} s"
        limit = ", no deadline of its own" if first.timeout_s is None else f" of {first.timeout_s:g} s"
        if first.renewed is not None:
            limit = f", without progress for {now - first.renewed:.1f} s{limit}"
        return f"{who} for {first.whom} {first.why}: {took}{limit}{format_flag(first)}"


def describe(waits: Sequence[Wait] | None = None) -> str:
    """Format the wait-for graph of `waits` (None: now) with the stacks of all in it; takes up to two seconds."""
    now, similar = time.monotonic(), dict[tuple[object, ...], SimilarWaits]()
    for wait in wait_registry.waits() if waits is None else waits:
        path = tuple(re.sub(r"\d+", "#", name) for name in wait.path)
        similar.setdefault((path, wait.whom, wait.why, wait.flag, wait.timeout_s), SimilarWaits()).add(wait)
    folds = list(similar.values())
    processes = list({id(one): one for fold in folds for one in process_registry.named_in(fold.waits[0].whom)}.values())
    lines = ["wait-for graph:", *(_graph(folds, now) or [_INDENT + NO_WAITS])]
    tasks: dict[str, str] = {}
    for wait in (fold.longest for fold in folds):
        if wait.task is not None and (stack := task_stack(wait.task)):
            tasks[f"task of {wait.who}, waiting for {wait.whom}"] = stack
    for name, stack in (tasks | thread_stacks() | stacks_of(processes)).items():
        lines += [f"{name}:", textwrap.indent(stack, _INDENT)]
    return "\n".join(lines)


def _graph(folds: list[SimilarWaits], now: float) -> list[str]:
    """Write chains from waiters that no other waits for; the rest can only be cycles."""
    below = {  # waits on behalf of a name that the wait is for
        id(fold): [other for other in folds if other is not fold and not other.names.isdisjoint(fold.whom)]
        for fold in folds
    }
    inner = {id(other) for others in below.values() for other in others}
    lines: list[str] = []
    written: set[int] = set()

    def write(fold: SimilarWaits, depth: int, above: tuple[int, ...]) -> None:
        if id(fold) in above:
            lines.append(_INDENT * depth + f"{fold.longest.who} waits for itself: this is a cycle")
            return
        if id(fold) in written:
            return
        written.add(id(fold))
        lines.append(_INDENT * depth + fold.line(now))
        lines.extend(_INDENT * (depth + 1) + one.state() for one in process_registry.named_in(fold.waits[0].whom))
        for other in below[id(fold)]:
            write(other, depth + 1, (*above, id(fold)))

    for fold in [fold for fold in folds if id(fold) not in inner] + folds:
        if id(fold) not in written:
            write(fold, 1, ())
    return lines
