"""Which commands can be run by a process that has slime imported already, and what Python would do with them.

Those are the ones that import torch or transformers: drivers, examples, engines, trainers and the endpoints of agents,
alone or behind the guard that watches over them. Everything else, above all `python -c`, is started as ever, so that tests of what is imported when still see an
interpreter that has imported nothing, and limits of memory count what a process really has.
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
    """A module or a script with its arguments; `guard` holds the words for the guard in front of it."""

    name: str
    arguments: tuple[str, ...]
    is_script: bool = False
    here: str = "first"  # where the working folder (of a script: its own) is on the search path, or "last"
    guard: tuple[str, ...] = ()

    @property
    def starts_others(self) -> bool:
        return self.is_script or self.name == "slime.cli"


def warm_program(argv: Sequence[str]) -> Program | None:
    """What `argv` runs if a warm process can run it."""
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
