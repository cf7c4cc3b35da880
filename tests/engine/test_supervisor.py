"""Engines that die or hang while they generate: every request completes and the engines are restarted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, derive
from slime.engine.fleet.processes import EngineFleet
from slime.engine.fleet.status import request_load
from slime.engine.fleet.supervisor import EnginesGivenUp, HealthCheckSettings, Supervisor
from slime.engine.http.client import Growing
from slime.engine.http.errors import EngineUnreachable
from slime.engine.http.pool import EnginePool
from slime.rollout.event_loop import LoopThread
from tests.e2e.runs import wait_until
from tests.engine.pids import pids_of
from tests.rows import long
from tests.tiny_models import make_model_folder

TOKENS = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("ft") / "model")


@contextmanager
def two_engines(
    folder: Path, run_dir: Path, **watch: Any
) -> Iterator[tuple[EngineFleet, EnginePool, LoopThread, Supervisor]]:
    config = derive(
        Config(
            hf_checkpoint=str(folder), rollout_batch_size=1, num_rollout=1, rollout_num_gpus=2, use_fault_tolerance=True,
            rollout_backend="embedded", engine_max_total_tokens=40_000,
        )
    )  # fmt: skip
    settings = {"interval_s": 0.2, "timeout_s": 60.0, "first_wait_s": 0.0, "max_restarts": 3} | watch
    loop = LoopThread("test")
    with EngineFleet(config, device="cpu", run_dir=run_dir, model_path=folder) as fleet:

        async def make() -> EnginePool:
            return EnginePool(fleet.urls, patience_s=240.0, api_key=fleet.key)

        pool = loop.run(make())
        supervisor = Supervisor(fleet, pool, loop.run, HealthCheckSettings(**settings), refresh=None)
        try:
            yield fleet, pool, loop, supervisor
        finally:
            supervisor.close()
            loop.run(pool.aclose())
            loop.close()


def payload(seed: int, ids: list[int], tokens: int) -> dict[str, Any]:
    params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "sampling_seed": seed}
    return {"input_ids": ids, "sampling_params": params, "return_logprob": True}


async def complete(pool: EnginePool, number: int) -> tuple[list[int], int]:
    """Generate all tokens of one request, resuming after engine failures; return them and the failure count."""
    prompt, tokens, breaks = [5 + number % 50, 7, 9], [], 0
    while len(tokens) < TOKENS:
        request = payload(number, prompt + tokens, TOKENS - len(tokens))
        is_broken = True
        with contextlib.suppress(EngineUnreachable):
            result = await pool.generate_resumable(request, number)
            assert len(result.token_ids) == len(result.log_probs)
            tokens += result.token_ids
            is_broken = result.finish_type == "abort"
        breaks += is_broken
        await asyncio.sleep(0.05 if is_broken else 0)
    return tokens, breaks


def run_requests_and_strike(
    loop: LoopThread, pool: EnginePool, supervisor: Supervisor, url: str, strike: Any, count: int = 64
) -> list[tuple[list[int], int]]:
    """Run `count` requests, call `strike` once the engine at `url` works on some, and return the results."""

    async def everything() -> list[tuple[list[int], int]]:
        return await asyncio.gather(*(complete(pool, i) for i in range(count)))

    def strike_when_it_works() -> None:
        assert wait_until(lambda: running_requests_at(url) > 0, 240)
        strike()

    with supervisor.watching(), ThreadPoolExecutor(1) as other:
        striking = other.submit(strike_when_it_works)
        results = loop.run(everything(), 280)
        striking.result(240)
    return results


def running_requests_at(url: str) -> int:
    load = request_load(url)
    return 0 if load is None else load.running


@pytest.mark.parametrize("how", [signal.SIGKILL, long(signal.SIGSTOP)])
def test_requests_complete_after_an_engine_dies_or_hangs(how: int, folder: Path, tmp_path: Path) -> None:
    patience = {} if how == signal.SIGKILL else {"timeout_s": 12.0, "max_restarts": 9}
    with two_engines(folder, tmp_path, **patience) as (fleet, pool, loop, supervisor):

        def strike() -> None:
            for pid in list(fleet._processes)[1].pids():
                with contextlib.suppress(ProcessLookupError):  # a process ends those below it when it is killed
                    os.kill(pid, how)

        for strikes in range(1, 4):  # retry if the engine had finished all its requests before the strike
            results = run_requests_and_strike(loop, pool, supervisor, fleet.urls[1], strike)
            assert len(results) == 64
            assert all(len(tokens) == TOKENS for tokens, _ in results)
            deadline = time.monotonic() + 240
            while len(pool.up) < 2 and time.monotonic() < deadline:
                with supervisor.watching():
                    time.sleep(0.3)
            assert len(pool.up) == 2
            assert supervisor.restarts >= strikes
            if any(breaks for _, breaks in results):
                break
        assert 0 < sum(breaks > 0 for _, breaks in results) <= 64
        assert supervisor.restarts == strikes or how == signal.SIGSTOP  # a false timeout also restarts an engine
        assert fleet.why_ended(1) is None
        again = loop.run(pool.clients[1].generate(payload(1, [5, 6], 4)))
        assert len(again["output_ids"]) == 4


def test_engine_that_dies_during_restart_is_restarted_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_engines(folder, tmp_path) as (fleet, pool, _, supervisor):
        restart, killed = fleet.restart, []

        def restart_and_kill_the_first(index: int) -> None:
            def kill_soon() -> None:
                before = set(pids_of(fleet))
                while not (born := [pid for pid in pids_of(fleet) if pid not in before and is_engine_process(pid)]):
                    time.sleep(0.01)
                os.kill(born[0], signal.SIGKILL)
                killed.append(born[0])

            if not killed:
                thread = threading.Thread(target=kill_soon)
                thread.start()
                try:
                    restart(index)
                finally:
                    thread.join(240)
            else:
                restart(index)

        monkeypatch.setattr(fleet, "restart", restart_and_kill_the_first)
        victim = next(pid for pid in pids_of(fleet) if is_engine_process(pid))
        os.kill(victim, signal.SIGKILL)
        supervisor.heal()
        assert len(killed) == 1
        assert supervisor.restarts == 2
        assert len(pool.up) == 2


def is_engine_process(pid: int) -> bool:
    """True if a process is an engine and not its guard process."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except FileNotFoundError:
        return False
    return b"slime.engine.embedded" in words and b"-I" not in words


def test_keeps_tokens_sampled_before_the_engine_is_set_down(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_engines(folder, tmp_path) as (fleet, pool, loop, _):
        url, came = fleet.urls[0], asyncio.Event()

        class Noticed(Growing):
            def take(self, event: bytes) -> None:
                super().take(event)
                came.set()

        monkeypatch.setattr("slime.engine.http.pool.Growing", Noticed)

        async def broken_off() -> Any:
            pool.set_down(fleet.urls[1])
            asking = asyncio.ensure_future(pool.generate_resumable(payload(3, [5, 6, 7], 480)))
            await came.wait()
            pool.set_down(url)
            return await asking

        for _ in range(5):  # retry if the response was complete before the engine was set down
            came.clear()
            result = loop.run(broken_off(), 240)
            if result.finish_type == "abort":
                break
        assert result.finish_type == "abort"
        assert 0 < len(result.token_ids) < 480
        assert len(result.token_ids) >= 32  # --stream-interval: minimum tokens per chunk

        async def whole() -> Any:
            pool.set_up(url)
            return await pool.generate_resumable(payload(3, [5, 6, 7], 480))

        same = loop.run(whole(), 240)
        assert same.token_ids[: len(result.token_ids)] == result.token_ids


def test_exceeding_max_restarts_raises_engines_given_up(folder: Path, tmp_path: Path) -> None:
    with two_engines(folder, tmp_path, max_restarts=1) as (fleet, _, _, supervisor):
        for _ in range(2):
            victim = next(process for process in fleet._processes if process.name == "engine-0")
            os.kill(victim.pids()[-1], signal.SIGKILL)
            assert victim.wait(240) is not None
            if supervisor.restarts == 0:
                supervisor.heal()
        with pytest.raises(EnginesGivenUp, match=r"failed after 1 restarts \(--engine-max-restarts\)"):
            supervisor.heal()
