"""The journal of a run: journals of other models, a full disk, and signals that print the wait-for graph."""

from __future__ import annotations

import itertools
import json
import logging
import os
import resource
import signal
import sqlite3
from pathlib import Path

import pytest

import slime
from slime.cli import main
from slime.errors import RunFailed
from tests.e2e.conftest import grpo_flags
from tests.e2e.runs import TRAIN, run, started, wait_until
from tests.tiny_models import make_model_folder

ENDLESS = [*TRAIN, *grpo_flags(), "--num-rollout", "100000"]


def test_rejects_the_journal_of_another_model_without_changing_it(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*TRAIN, *grpo_flags(), "--num-rollout", "1", "--output-dir", "mine", "--keep-samples"]
    assert run(command, place).code == 0
    before = (place / "mine" / "journal.sqlite").read_bytes()
    done = run([*command, "--hf-checkpoint", "wider"], place)
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert "mine/journal.sqlite: is the journal of another run, it differs in model" in done.err
    assert (place / "mine" / "journal.sqlite").read_bytes() == before
    assert main(["samples", str(place / "mine"), "--limit", "3"]) == 0
    assert "16 consumed" in capsys.readouterr().out.replace("consumed 16", "16 consumed")
    exported = place / "mine.jsonl"
    assert main(["samples", str(place / "mine"), "--export", str(exported)]) == 0
    rows = [json.loads(line) for line in exported.read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(16))
    assert all(len(row["rollout_log_probs"]) == row["response_length"] for row in rows)


NAPPING = """\
import asyncio, pathlib

async def nap(args, sample):
    rollout = sample.index // 16
    with open("naps", "a") as file:
        file.write(f"{rollout}\\n")
    while rollout and not pathlib.Path(f"wake-{rollout}").exists():
        await asyncio.sleep(0.02)
    return sample.index % 2
"""


def test_sigusr1_prints_the_wait_for_graph_and_sigquit_ends_the_run(place: Path) -> None:
    (place / "napping.py").write_text(NAPPING)
    log = place / "asked/logs/driver.log"

    def all_nap(rollout: int) -> bool:
        return (place / "naps").read_text().split().count(str(rollout)) == 16

    with started([*ENDLESS, "--output-dir", "asked", "--custom-rm-path", "napping.py:nap"], place) as running:
        running.wait_for("step 1/")
        assert wait_until(lambda: all_nap(1), within_s=240)
        running.popen.send_signal(signal.SIGUSR1)
        assert wait_until(lambda: "SIGUSR1" in log.read_text(), within_s=240)
        (place / "wake-1").touch()
        running.wait_for("] step ")  # the run continues
        assert wait_until(lambda: all_nap(2), within_s=240)
        running.popen.send_signal(signal.SIGQUIT)
        done = running.finish()
        assert done.code == 1
        assert done.err.count("wait-for graph:") == 2
        assert done.err.count("  driver waits for rollout ") == 2
        assert done.err.count("more like it wait for the reward function napping.py:nap") == 2, done.err
        assert "error: the run was ended by SIGQUIT" in done.err
        assert wait_until(lambda: not running.processes(), within_s=120)


def test_full_disk_ends_the_run_and_keeps_the_journal_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model_folder(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"what is {i}+{i}?"}) + "\n" for i in range(64)))
    run_dir = tmp_path / "run"
    calls = itertools.count(1)

    def reward(args: object, sample: object) -> float:
        call = next(calls)
        if call == 40:  # from here on no file can grow, as on a full disk
            size = (run_dir / "journal.sqlite-wal").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        return float(call % 2)

    level = logging.getLogger().level
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(RunFailed, match=r"the journal cannot be written .* everything recorded so far is intact"):
            slime.run(
                hf_checkpoint=str(folder),
                prompt_data=str(prompts),
                reward=reward,
                num_rollout=50,
                rollout_batch_size=4,
                n_samples_per_prompt=4,
                rollout_max_response_len=16,
                progress="none",
                log_level="error",
                keep_samples=True,
                use_tensorboard=False,
                output_dir=str(run_dir),
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
        logging.getLogger().setLevel(level)
    with sqlite3.connect(run_dir / "journal.sqlite") as journal:
        assert journal.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        finished = journal.execute("SELECT COUNT(*) FROM samples WHERE reward IS NOT NULL").fetchone()[0]
        consumed = journal.execute("SELECT COUNT(*) FROM groups WHERE state = 'consumed'").fetchone()[0]
    assert finished >= 4 * consumed
    assert consumed in range(8, 4 * 50, 4)  # whole batches; SQLite may still overwrite parts of its log
    assert os.path.getsize(run_dir / "journal.sqlite") > 0
