"""A whole run in which engines join and leave: no sample is lost or trained on twice, and the weights are correct."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import slime
from slime.cluster.rpc.connect import TOKEN_VARIABLE
from slime.config import Config, derive
from slime.data.sample import Sample
from slime.engine.elastic.handshake import Disconnected, joined_engine_key
from slime.engine.elastic.join_client import Joiner, JoinSession
from slime.engine.fleet.processes import EngineFleet
from slime.engine.fleet.status import request_load
from tests.e2e.runs import started, wait_until
from tests.rows import long
from tests.tiny_models import make_model_folder

ROLLOUTS, PROMPTS, SAMPLES = 6, 16, 4
TOKEN = "token-of-this-test"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("elastic") / "model")


@pytest.fixture
def visitors(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """URLs of two engines that require the key of joined engines."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    config = derive(
        Config(hf_checkpoint=str(folder), rollout_batch_size=1, num_rollout=1, rollout_num_gpus=2,
               rollout_backend="embedded", use_fault_tolerance=True)
    )  # fmt: skip
    run_dir, key = tmp_path / "visitors", joined_engine_key(TOKEN)
    with EngineFleet(config, device="cpu", run_dir=run_dir, model_path=folder, key=key) as fleet:
        yield fleet.urls


class Churn:
    """Joins engines to a run and removes them again: drained, with their connection cut, or killed."""

    def __init__(self, run_dir: Path, folder: Path, visitors: list[str], visits: int) -> None:
        self.run_dir, self.folder, self.visitors, self.visits = run_dir, folder, visitors, visits
        self.drained = self.cut = self.killed = 0
        self.at_work = 0
        self.ends_soon = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Churn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            told = self.run_dir / "fleet.json"
            assert wait_until(lambda: told.is_file() and told.read_text().endswith("\n"), 240)
            address = json.loads(told.read_text())["address"]
            asyncio.run(self._visit_all(address))
        except BaseException as error:  # noqa: BLE001 (checked by the test)
            self.failure = error

    async def _visit_all(self, address: str) -> None:
        halves = [self._visits(address, url, self.visits // 2) for url in self.visitors]
        await asyncio.gather(*halves, asyncio.to_thread(self._killed, address))

    async def _visits(self, address: str, url: str, count: int) -> None:
        for number in range(count):
            joiner = Joiner(
                address, TOKEN, Config(hf_checkpoint=str(self.folder)), str(self.folder), self.run_dir, patience_s=240.0
            )
            await joiner.fetch_terms()
            session = JoinSession(joiner, url, None)
            working = asyncio.ensure_future(session.run_until_left(joiner.stop))
            while not session.was_in or not await self._is_at_work(url):
                await asyncio.sleep(0.02)
                assert not working.done(), working.exception()
            if number % 3 == 2:
                self.cut += 1
                working.cancel()
                with suppress(asyncio.CancelledError, Disconnected):
                    await working
            else:
                self.drained += 1
                joiner.stop.set()
                assert await working

    async def _is_at_work(self, url: str) -> bool:
        if self.ends_soon.is_set():
            return True
        load = await asyncio.to_thread(request_load, url, joined_engine_key(TOKEN))
        is_busy = load is not None and load.running > 0
        self.at_work += is_busy
        return is_busy

    def _killed(self, address: str) -> None:
        """Joins two more engines with `slime serve`. One gets SIGTERM, one is killed with all its processes."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            words = (sys.executable, "-m", "slime.cli", "serve", "--join", address, "--model-path", str(self.folder))
            with started([*words, "--device", "cpu"], self.run_dir, **{TOKEN_VARIABLE: TOKEN}) as engine:
                engine.wait_for("joined the run")
                if how == signal.SIGTERM:
                    engine.popen.send_signal(how)
                    assert engine.finish().code == 0
                else:
                    for pid in engine.processes():
                        with suppress(ProcessLookupError):
                            os.kill(pid, how)
                self.killed += 1


@pytest.mark.parametrize("visits", [6, long(18)])
def test_engines_join_and_leave_during_one_run(visits: int, folder: Path, visitors: list[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"what is {i}+{i}?"}) + "\n" for i in range(64)))
    count, seen, run_dir = ROLLOUTS * PROMPTS * SAMPLES, [], tmp_path / "run"
    with Churn(run_dir, folder, visitors, visits) as churn:

        def reward(args: Any, sample: Sample) -> float:
            assert sample.index is not None
            seen.append(sample.index)
            if sample.index == count - 1:  # keeps the run alive until all engines have left
                churn.ends_soon.set()
                assert wait_until(lambda: churn.is_over, 280)
            return float(sample.index % 2)

        settings: dict[str, Any] = {
            "hf_checkpoint": str(folder), "prompt_data": str(prompts), "num_rollout": ROLLOUTS,
            "rollout_batch_size": PROMPTS, "n_samples_per_prompt": SAMPLES, "rollout_max_response_len": 160,
            "use_dynamic_batch_size": True, "max_tokens_per_gpu": 8192, "lr": 1e-3, "rollout_num_gpus": 1,
            "fleet_address": "0", "rollout_health_check_interval": 0.5, "rollout_health_check_timeout": 30.0,
            "progress": "none", "output_dir": str(run_dir), "keep_samples": True,
            "update_weight_mode": "delta",
        }  # fmt: skip
        result = slime.run(reward=reward, **settings)
    assert churn.failure is None
    assert (churn.drained, churn.cut, churn.killed) == (visits * 2 // 3, visits // 3, 2)
    assert churn.at_work > 0
    assert sorted(seen) == list(range(count))
    assert [metrics["rollout/failed/count"] for metrics in result.metrics] == [0.0] * ROLLOUTS
    assert max(metrics["train/train_rollout_logprob_abs_diff_max"] for metrics in result.metrics) < 1e-3
    with closing(sqlite3.connect(f"file:{run_dir / 'journal.sqlite'}?mode=ro", uri=True)) as journal:
        groups = journal.execute("SELECT state, consumed_by FROM groups").fetchall()
        assert sorted(rollout for _, rollout in groups) == sorted(list(range(ROLLOUTS)) * PROMPTS)
    log = (run_dir / "logs/driver.log").read_text()
    assert log.count(" joins") == visits + 2
    assert not (run_dir / "fleet.json").exists()
