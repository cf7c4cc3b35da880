"""Interrupts and crashes: no process of the run survives, and one line on the terminal states the cause."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import grpo_flags
from tests.e2e.runs import ENGINE, TRAIN, TRAINER, started, wait_until

ENDLESS = [*TRAIN, *grpo_flags(), "--num-rollout", "100000"]


def test_ctrl_c_ends_all_processes(place: Path) -> None:
    with started([*ENDLESS, "--save", "stopped", "--load", "stopped"], place) as running:
        running.wait_for("step 1/")
        running.popen.send_signal(signal.SIGINT)
        done = running.finish()
        assert (done.code, done.err) == (130, "interrupted\n")
        assert "interrupted before the first checkpoint: the same command trains from the start" in done.out
        assert (place / "stopped" / "reward.png").is_file()
        assert wait_until(lambda: not running.processes(), within_s=120)


def test_sigterm_during_startup_ends_all_processes(place: Path) -> None:
    with started([*ENDLESS, "--output-dir", "terminated"], place) as running:
        assert wait_until(lambda: bool(running.processes(ENGINE) and running.processes(TRAINER)), within_s=240)
        running.popen.send_signal(signal.SIGTERM)
        done = running.finish()
        assert (done.code, done.err) == (130, "interrupted\n")
        assert wait_until(lambda: not running.processes(), within_s=120)


@pytest.mark.parametrize(("program", "name"), [(ENGINE, "engine-0"), (TRAINER, "trainer-0")])
def test_dead_engine_or_trainer_ends_the_run_and_is_named(program: str, name: str, place: Path) -> None:
    with started([*ENDLESS, "--output-dir", f"without-{name}"], place) as running:
        running.wait_for("step 1/")
        (pid,) = running.processes(program)
        os.kill(pid, signal.SIGKILL)
        done = running.finish()
        assert done.code == 1
        errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, done.err
        assert errors[0].startswith(f"error: {name} ")
        assert f"without-{name}/logs/{name}.log" in errors[0]
        assert "Traceback" not in done.err
        assert (place / f"without-{name}" / "reward.png").is_file()
        note = "note: no --save: the trained model is not kept"
        assert note in done.out
        assert note in (place / f"without-{name}" / "logs" / "driver.log").read_text()
        assert wait_until(lambda: not running.processes(), within_s=120)
