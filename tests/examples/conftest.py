"""Runs examples as a user does: a command, its exit code, its output, and its metrics."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@contextmanager
def modules_of(folder: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Import modules of an example by name; loaded modules with the same names are restored on exit."""
    names = {file.stem for place in (folder, EXAMPLES) for file in place.glob("*.py")}
    path, aside = list(sys.path), {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path[:0] = [str(folder), str(EXAMPLES)]
    try:
        yield importlib.import_module
    finally:
        sys.path[:] = path
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(aside)


class Ran(NamedTuple):
    """A finished run of an example."""

    code: int
    output: str
    folder: Path

    def metrics(self, folder: str = ".") -> list[dict[str, Any]]:
        """The rows of the run's `metrics.jsonl`, or of a run in a folder below."""
        return [json.loads(line) for line in (self.folder / folder / "metrics.jsonl").read_text().splitlines()]

    def series(self, name: str, folder: str = ".") -> list[float]:
        """A metric's values in the order of the steps."""
        return [row[name] for row in self.metrics(folder) if name in row]


@pytest.fixture
def run_example(tmp_path: Path) -> Callable[..., Ran]:
    """`run_example("april/run.py", "--seed", "2")`: requires exit code 0, or 1 if the score target is missed."""

    def run(program: str, *words: str) -> Ran:
        command = [sys.executable, str(EXAMPLES / program), "--output-dir", str(tmp_path), *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
        return Ran(done.returncode, done.stdout, tmp_path)

    return run
