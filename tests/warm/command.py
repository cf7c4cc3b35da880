"""Recognizes the commands that a process with slime already imported can run.

These commands import torch or transformers: drivers, examples, engines, trainers and agent servers, alone or behind the
reaper that guards them. All others, above all `python -c`, start normally: tests of imports need an interpreter that
has imported nothing, and memory limits must count what a process really uses.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUARD = str(ROOT / "slime/cluster/reaper.py")
LAUNCHER = str(ROOT / "slime/cluster/child_env.py")
MODULES = {"slime.cli", "slime.engine.embedded", "slime.train.worker", "slime.agent.server", "tests.peers"}
SCRIPTS = {str(ROOT / name) for name in ("train.py", "train_async.py")}
SCRIPTS |= {str(path) for path in (ROOT / "examples").glob("*/run.py")}


@dataclass(frozen=True)
class Program:
    """A module or a script with its arguments. `guard` holds the arguments of the reaper in front of it."""

    name: str
    arguments: tuple[str, ...]
    is_script: bool = False
    here: str = "first"  # or "last": place of the working folder (scripts: own folder) on the search path
    guard: tuple[str, ...] = ()

    @property
    def starts_others(self) -> bool:
        return self.is_script or self.name == "slime.cli"


def warm_program(argv: Sequence[str]) -> Program | None:
    """Returns the program that `argv` runs, or None if a warm process cannot run it."""
    match [str(word) for word in argv]:
        case [sys.executable, "-I", "-S", guard, fd, pid, "--", *guarded] if guard == GUARD:
            inner = warm_program(guarded)
            return None if inner is None else Program(**(vars(inner) | {"guard": (fd, pid)}))
        case [sys.executable, "-m", module, *arguments] if module in MODULES:
            return Program(module, tuple(arguments))
        case [sys.executable, "-P", launcher, "--here-first", module, *arguments] if launcher == LAUNCHER:
            return Program(module, tuple(arguments)) if module in MODULES else None
        case [sys.executable, "-P", launcher, module, *arguments] if launcher == LAUNCHER:
            return Program(module, tuple(arguments), here="last") if module in MODULES else None
        case [sys.executable, script, *arguments] if script in SCRIPTS:
            return Program(script, tuple(arguments), is_script=True)
    return None
