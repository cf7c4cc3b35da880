"""Runs commands as a user does, e.g. `python train.py ...`. A mark in the environment identifies their processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.observability.metrics import read_metrics

ROOT = Path(__file__).parents[2]
TRAIN = (sys.executable, str(ROOT / "train.py"))
MARK = "SLIME_E2E_MARK"
RUN_LIMIT_S = 600.0
ENGINE, TRAINER = "slime.engine.embedded", "slime.train.worker"


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@dataclass
class Running:
    """A running command. All its descendants inherit `mark` in their environment."""

    popen: subprocess.Popen[str]
    mark: str
    lines: list[str] = field(default_factory=list)

    def wait_for(self, text: str) -> None:
        """Reads stdout until a line contains `text`."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(line)
            if text in line:
                return
        raise AssertionError(f"the run ended without {text!r}:\n{''.join(self.lines)}\n{self._err()}")

    def finish(self) -> Done:
        out, err = self.popen.communicate(timeout=RUN_LIMIT_S)
        return Done(self.popen.returncode, "".join(self.lines) + out, err)

    def processes(self, program: str = "") -> list[int]:
        """Returns the pids with the mark that run `program` themselves, without the reapers in front of them."""
        found = marked_processes(self.mark)
        return [pid for pid, command in found if program in command and not (program and "reaper.py" in command)]

    def _err(self) -> str:
        return self.popen.stderr.read() if self.popen.stderr is not None else ""


def marked_processes(mark: str) -> Iterator[tuple[int, str]]:
    """Yields (pid, command line) of live processes with the mark in their environment. Zombies have none."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, ValueError):
            continue


def wait_until(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def started(command: Sequence[str], cwd: Path, **env: str) -> Iterator[Running]:
    """Starts the command with its output in pipes. At exit, its remaining processes are killed by pid."""
    mark = uuid.uuid4().hex
    popen = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", MARK: mark, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    running = Running(popen, mark)
    try:
        yield running
    finally:
        for pid in running.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        popen.wait()
        for pipe in (popen.stdout, popen.stderr):
            if pipe is not None:
                pipe.close()


def run(command: Sequence[str], cwd: Path, **env: str) -> Done:
    with started(command, cwd, **env) as running:
        return running.finish()


def records(run_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run_dir / "metrics.jsonl") if kind in (None, record["kind"])]


TIMES = re.compile("time$|perf/")
CACHE = re.compile("prefix_cache_hit_rate|avg_cached_tokens")
ENGINE_LOG_PROBS = re.compile("rollout_log_probs|train_rollout_logprob_abs_diff")
ENGINE_ROUNDING = 2e-5


def comparable(run_dir: Path) -> list[dict[str, Any]]:
    """Returns all records without values that depend on timing: speeds and prefix cache hits."""
    return [
        {name: value for name, value in record.items() if not TIMES.match(name) and not CACHE.search(name)}
        for record in records(run_dir)
    ]


def seen_samples(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the generated samples that the hook of the plugin file recorded."""
    return [json.loads(line) for line in (run_dir / "seen.jsonl").read_text().splitlines()]


def snapshot(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file of a folder by its relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def assert_same_records(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> None:
    """Asserts that both have the same steps and names, with values equal within the tolerance (relative above 1).

    Log-probs of the engine get the tolerance of float32 rounding, because they depend on how requests are batched.
    Training does not depend on it: the trainer computes its own log-probs.
    """
    assert [(r["kind"], r["step"]) for r in found] == [(r["kind"], r["step"]) for r in expected]
    for ours, theirs in zip(found, expected, strict=True):
        where = f"{theirs['kind']} {theirs['step']}"
        assert set(ours) == set(theirs), where
        numbers = {name: value for name, value in theirs.items() if name != "kind"}
        off = {
            name: (ours[name], value)
            for name, value in numbers.items()
            if abs(ours[name] - value)
            > max(tolerance, ENGINE_ROUNDING if ENGINE_LOG_PROBS.search(name) else 0) * max(1.0, abs(value))
        }
        assert off == {}, where
