"""A run whose processes are killed repeatedly at random times: checks of its journal and of its training data.

The same command starts the run again, unless it restarts by itself.

`make test-crash` kills twenty times (SLIME_CRASH_KILLS). The suite kills three times, once per kind of process.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.runs import ENGINE, TRAIN, TRAINER, Done, Running, records, started, wait_until
from tests.rows import some
from tests.tiny_models import make_model_folder

KILLS = int(os.environ.get("SLIME_CRASH_KILLS", "3"))
PROMPTS, SAMPLES = 4, 4
WITHIN_STEPS, WITHIN_S = 3, 0.6
"""The next kill comes after at most this many further steps, plus at most this many seconds."""
EARLY_SHARE = 0.2
"""Fraction of kills that are timed from the start of the processes instead of from training steps."""
PLUGIN = """\
import asyncio

async def slowly(args, sample):
    await asyncio.sleep(0.02 * (sample.index % 13))
    return float(sum(sample.tokens) % 7)
"""
MODES = {
    "sync": ["--over-sampling-batch-size", "8", "--partial-rollout"],
    "one-step": ["--async-mode", "one-step", "--rollout-num-gpus", "1", "--async-save", "--max-restarts", "100"],
    "full": ["--async-mode", "full", "--rollout-num-gpus", "2"],
}


@dataclass
class Storm:
    """One run over all its restarts. `finished` holds the trajectories that were seen complete, by index."""

    folder: Path
    mode: str
    rollouts: int
    chance: random.Random
    kills: list[str] = field(default_factory=list)
    finished: dict[int, bytes] = field(default_factory=dict)
    began: float = 0.0

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def command(self) -> list[str]:
        return [
            *TRAIN, "--hf-checkpoint", "model", "--prompt-data", "prompts.jsonl", "--rollout-shuffle",
            "--custom-rm-path", "plugin.py:slowly", "--num-rollout", str(self.rollouts),
            "--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(SAMPLES),
            "--rollout-max-response-len", "48", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048",
            "--lr", "1e-4", "--device", "cpu", "--save", "run", "--load", "run", "--save-interval", "3",
            "--ckpt-keep", "2", "--use-fault-tolerance", "--rollout-health-check-interval", "0.3",
            "--engine-max-restarts", "100", "--keep-samples",
            "--save-debug-train-data", "trained/{rollout_id}.jsonl", *MODES[self.mode],
        ]  # fmt: skip

    def rage(self, kills: int) -> None:
        """Starts the run and kills its processes, repeatedly, until all kills are done and the run succeeds."""
        done: Done | None = None
        while done is None or done.code:
            self.began, done = time.time(), None
            with started(self.command(), self.folder) as life:
                while len(self.kills) < kills and life.popen.poll() is None:
                    self._strike(life)
                if life.popen.poll() is None:
                    done = life.finish()
                    assert done.code == 0 or self._engine_died_early(done.err), done.err
                assert wait_until(lambda alive=life: not alive.processes(), within_s=120), "processes outlived the run"
            self.check()

    def _strike(self, life: Running) -> None:
        early = self.chance.random() < EARLY_SHARE
        assert wait_until(lambda: life.popen.poll() is not None or self._works(life, early), within_s=280)
        goal = 0 if early else self._steps() + self.chance.randint(0, WITHIN_STEPS)
        assert wait_until(lambda: life.popen.poll() is not None or self._steps() >= goal, within_s=280)
        time.sleep(self.chance.uniform(0, WITHIN_S))
        if life.popen.poll() is not None:
            self._explain_end(life)
            return
        kind = self.chance.choice(["driver", "engine", "trainer"]) if len(self.kills) > 2 else self._first_kinds()
        victims = {"driver": [life.popen.pid], "engine": life.processes(ENGINE), "trainer": life.processes(TRAINER)}
        if not victims[kind]:
            return  # it is being restarted
        with suppress(ProcessLookupError):
            os.kill(self.chance.choice(victims[kind]), signal.SIGKILL)
            self.kills.append(kind)
        if kind == "driver":
            life.popen.wait(240)
        if kind == "trainer" and not self._starts_again(life, victims[kind]):
            assert life.popen.wait(240) == 1
            err = life.popen.communicate()[1]
            ends_already = self.kills[-2:-1] == ["engine"] and "was killed by signal 9" in err
            assert "trainer-0 ended during" in err or ends_already, err

    def _starts_again(self, life: Running, before: list[int]) -> bool:
        """Returns whether the run starts new trainers by itself, as it may after its first successful start."""
        if "--max-restarts" not in self.command():
            return False
        assert wait_until(lambda: life.popen.poll() is not None or self._others(life, before), within_s=280)
        return life.popen.poll() is None

    def _others(self, life: Running, before: list[int]) -> bool:
        return bool(set(life.processes(TRAINER)) - set(before))

    def _explain_end(self, life: Running) -> None:
        _, err = life.popen.communicate()
        assert life.popen.returncode != 0, f"the run ended after {len(self.kills)} kills: it needs more rollouts"
        assert self._engine_died_early(err), err

    def _engine_died_early(self, err: str) -> bool:
        """Returns whether an engine killed before its first answer ended the run. No other error may end it."""
        return self.kills[-1:] == ["engine"] and "error: engine-" in err and "was killed by signal 9" in err

    def _first_kinds(self) -> str:
        return ["driver", "engine", "trainer"][len(self.kills)]

    def _works(self, life: Running, early: bool) -> bool:
        """Returns whether there is something to kill: starting processes (`early`) or a run that writes its journal."""
        if early:
            return bool(life.processes(ENGINE)) and bool(life.processes(TRAINER))
        log = self.run_dir / "journal.sqlite-wal"
        return log.exists() and log.stat().st_mtime > self.began

    def _steps(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        return len(records(self.run_dir, "train")) if metrics.exists() else 0

    # invariants while no process runs

    def check(self) -> None:
        with self._journal() as journal:
            assert journal.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            rows = journal.execute(
                "SELECT s.sample_index, s.status, s.reward, g.state, g.rollout_id, g.consumed_by, s.payload, s.response "
                "FROM samples s JOIN groups g ON s.group_id = g.id"
            ).fetchall()
        indices = [row[0] for row in rows]
        assert sorted(indices) == list(range(len(indices))), "a sample is missing, or there twice"
        now: dict[int, bytes] = {}
        for index, status, reward, state, rollout_id, consumed_by, _payload, response in rows:
            assert (state == "consumed") == (consumed_by is not None)
            assert (state in ("assigned", "consumed")) == (rollout_id is not None)
            if status in ("completed", "truncated") and reward is not None:
                now[index] = response.encode()
        lost = {index for index, response in self.finished.items() if now.get(index) != response}
        assert not lost, "finished trajectories are gone or were sampled again"
        self.finished = now

    def check_end(self) -> None:
        self.check()
        with self._journal() as journal:
            groups = journal.execute("SELECT state, consumed_by, group_index FROM groups").fetchall()
            trained = journal.execute(
                "SELECT g.consumed_by, s.sample_index FROM samples s JOIN groups g ON s.group_id = g.id "
                "WHERE g.state = 'consumed'"
            ).fetchall()
        by_rollout = Counter(consumed_by for state, consumed_by, _ in groups if state == "consumed")
        assert by_rollout == dict.fromkeys(range(self.rollouts), PROMPTS)
        assert len({group for _, _, group in groups}) == len(groups)
        assert [r["step"] for r in records(self.run_dir, "rollout")] == list(range(self.rollouts))
        assert [r["train/step"] for r in records(self.run_dir, "train")] == [float(i) for i in range(self.rollouts)]
        for rollout_id in range(self.rollouts):
            _header, *lines = (self.folder / "trained" / f"{rollout_id}.jsonl").read_text().splitlines()
            seen = sorted(json.loads(line)["sample_indices"] for line in lines)
            assert seen == sorted(index for rollout, index in trained if rollout == rollout_id)

    @contextmanager
    def _journal(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(f"file:{self.run_dir / 'journal.sqlite'}?mode=ro", uri=True)) as connection:
            yield connection


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make_model_folder(tmp_path / "model")
    (tmp_path / "plugin.py").write_text(PLUGIN)
    prompts = [{"input": f"what is {i}+{i}?"} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return tmp_path


@pytest.mark.parametrize("mode", some(["sync"], of=MODES))
def test_kills_lose_no_sample_and_train_none_twice(mode: str, place: Path) -> None:
    seed = int(os.environ.get("SLIME_CRASH_SEED", "1"))
    storm = Storm(place, mode, rollouts=8 + 6 * KILLS, chance=random.Random(f"{mode} {seed}"))
    storm.rage(KILLS)
    assert len(storm.kills) == KILLS
    assert set(storm.kills) == {"driver", "engine", "trainer"}
    storm.check_end()
