"""The wait-for graph as text: chains of who waits for whom, then where everybody in them stands.

The invariant: every wait on the board is in the text, alone or counted among those like it; a circle of waits is
written once and called a circle.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slime.cluster.watchdog.registry import Wait, board, in_brackets
from slime.cluster.watchdog.stacks import KnownProcess, registry, stacks_of, task_stack, thread_stacks

_INDENT = "  "
NOBODY = "nobody waits for anything"


@dataclass
class Fold:
    """Waits that differ only in numbers: 64 samples that wait for one engine."""

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

    def is_part_of(self, other: Fold) -> bool:
        """Whether `other` waits for one of those on whose behalf this one waits."""
        return any(name in self.names for name in other.whom)

    def line(self, now: float) -> str:
        first = self.longest
        more = len(self.waits) - 1
        who = f"{first.who} waits" if not more else f"{first.who} and {more} more like it wait"
        took = f"{'longest ' if more else ''}{now - first.began:.1f} s"
        limit = ", no deadline of its own" if first.timeout_s is None else f" of {first.timeout_s:g} s"
        if first.renewed is not None:
            limit = f", without progress for {now - first.renewed:.1f} s{limit}"
        return f"{who} for {first.whom} {first.why}: {took}{limit}{in_brackets(first)}"


def describe(waits: Sequence[Wait] | None = None) -> str:
    """The wait-for graph of this moment, or of these waits, with the stacks of all in it; takes up to two seconds."""
    now, folds = time.monotonic(), _folded(board.waits() if waits is None else waits)
    processes = _processes_in(folds)
    lines = ["who waits for whom:", *(_graph(folds, now) or [_INDENT + NOBODY])]
    stacks = _tasks_of(folds) | thread_stacks() | stacks_of(processes)
    for name, stack in stacks.items():
        lines += [f"{name}:", textwrap.indent(stack, _INDENT)]
    return "\n".join(lines)


def _folded(waits: Sequence[Wait]) -> list[Fold]:
    folds: dict[tuple[object, ...], Fold] = {}
    for wait in waits:
        path = tuple(re.sub(r"\d+", "#", name) for name in wait.path)
        folds.setdefault((path, wait.whom, wait.why, wait.flag, wait.timeout_s), Fold()).add(wait)
    return list(folds.values())


def _graph(folds: list[Fold], now: float) -> list[str]:
    """Chains from those nobody waits for; what is left after them can only be circles."""
    below = {id(fold): [other for other in folds if other is not fold and other.is_part_of(fold)] for fold in folds}
    inner = {id(other) for others in below.values() for other in others}
    lines: list[str] = []
    written: set[int] = set()

    def write(fold: Fold, depth: int, above: tuple[int, ...]) -> None:
        if id(fold) in above:
            lines.append(_INDENT * depth + f"{fold.longest.who} waits for its own end: this is a circle")
            return
        if id(fold) in written:
            return
        written.add(id(fold))
        lines.append(_INDENT * depth + fold.line(now))
        lines.extend(_INDENT * (depth + 1) + one.state() for one in registry.named_in(fold.waits[0].whom))
        for other in below[id(fold)]:
            write(other, depth + 1, (*above, id(fold)))

    for fold in [fold for fold in folds if id(fold) not in inner] + folds:
        if id(fold) not in written:
            write(fold, 1, ())
    return lines


def _processes_in(folds: Sequence[Fold]) -> list[KnownProcess]:
    found = {id(one): one for fold in folds for one in registry.named_in(fold.waits[0].whom)}
    return list(found.values())


def _tasks_of(folds: Sequence[Fold]) -> dict[str, str]:
    """The stack of the longest wait of each kind, as far as tasks wait."""
    stacks: dict[str, str] = {}
    for fold in folds:
        wait = fold.longest
        if wait.task is not None and (stack := task_stack(wait.task)):
            stacks[f"task of {wait.who}, waiting for {wait.whom}"] = stack
    return stacks
