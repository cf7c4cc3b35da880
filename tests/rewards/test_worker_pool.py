"""Guarded worker processes: a worker that hangs or dies fails one call, and no worker outlives its parent."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.rollout.rewards.worker_pool import GuardedPool, RewardError
from tests.e2e.runs import wait_until

WORKER = """
import json, os, sys, time
if os.path.exists({refuse!r}):
    sys.exit(3)
print(json.dumps({{"ready": True}}), flush=True)
for line in sys.stdin:
    do = json.loads(line)["do"]
    if do == "hang": time.sleep(600)
    if do == "die": os._exit(7)
    if do == "nonsense": print("hello", flush=True); continue
    if do == "fail": print(json.dumps({{"error": "ValueError: no"}}), flush=True); continue
    print(json.dumps({{"did": len(do), "pid": os.getpid()}}), flush=True)
"""


@pytest.fixture
def make_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GuardedPool]:
    (tmp_path / "toy_worker.py").write_text(WORKER.format(refuse=str(tmp_path / "refuse")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(deadline_s: float = 120.0, size: int = 1) -> GuardedPool:
        return GuardedPool("toy_worker", size=size, deadline_s=deadline_s)

    return make


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pid: int) -> None:
    assert wait_until(lambda: not is_running(pid), 120), f"process {pid} still runs"


def test_one_worker_serves_many_calls_from_several_event_loops(make_pool: Callable[..., GuardedPool]) -> None:
    pool = make_pool()

    async def ask_ten() -> list[dict]:
        return await asyncio.gather(*(pool.ask({"do": "x" * number}) for number in range(10)))

    answers = asyncio.run(ask_ten()) + asyncio.run(ask_ten())
    assert [answer["did"] for answer in answers] == [*range(10), *range(10)]
    assert {answer["pid"] for answer in answers} == set(pool.worker_pids())
    pool.close()


def test_large_requests_pass_the_pipe(make_pool: Callable[..., GuardedPool]) -> None:
    pool = make_pool()
    assert asyncio.run(pool.ask({"do": "x" * 1_000_000}))["did"] == 1_000_000
    pool.close()


@pytest.mark.parametrize(
    ("do", "message", "deadline_s"),
    [
        ("hang", "did not answer within its deadline", 0.3),
        ("die", "exited with code 7", 120.0),
        ("nonsense", "not JSON", 120.0),
    ],
)
def test_a_lost_worker_is_replaced(
    make_pool: Callable[..., GuardedPool], do: str, message: str, deadline_s: float
) -> None:
    pool = make_pool()
    first = asyncio.run(pool.ask({"do": "x"}))["pid"]
    patience, pool._deadline_s = pool._deadline_s, deadline_s
    with pytest.raises(RewardError, match=message):
        asyncio.run(pool.ask({"do": do}))
    pool._deadline_s = patience
    wait_until_gone(first)
    assert asyncio.run(pool.ask({"do": "x"}))["pid"] != first
    pool.close()


def test_worker_that_reports_an_error_is_reused(make_pool: Callable[..., GuardedPool]) -> None:
    pool = make_pool()
    first = asyncio.run(pool.ask({"do": "x"}))["pid"]
    with pytest.raises(RewardError, match="the verifier failed: ValueError: no"):
        asyncio.run(pool.ask({"do": "fail"}))
    assert asyncio.run(pool.ask({"do": "x"}))["pid"] == first
    pool.close()


def test_worker_killed_while_idle_is_replaced_without_an_error(make_pool: Callable[..., GuardedPool]) -> None:
    pool = make_pool()
    first = asyncio.run(pool.ask({"do": "x"}))["pid"]
    os.kill(first, signal.SIGKILL)
    wait_until_gone(first)
    assert asyncio.run(pool.ask({"do": "x"}))["pid"] != first
    pool.close()


def test_worker_that_does_not_start_raises(make_pool: Callable[..., GuardedPool], tmp_path: Path) -> None:
    (tmp_path / "refuse").touch()
    pool = make_pool()
    with pytest.raises(RewardError, match="worker does not start: it exited with code 3"):
        asyncio.run(pool.ask({"do": "x"}))
    pool.close()


def test_workers_exit_when_the_pool_is_closed_or_garbage_collected(make_pool: Callable[..., GuardedPool]) -> None:
    closed = make_pool()
    pid = asyncio.run(closed.ask({"do": "x"}))["pid"]
    closed.close()
    wait_until_gone(pid)
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(closed.ask({"do": "x"}))

    forgotten = make_pool()
    pid = asyncio.run(forgotten.ask({"do": "x"}))["pid"]
    del forgotten
    gc.collect()
    wait_until_gone(pid)


PARENT = """
import asyncio, sys, time
from slime.rollout.rewards.worker_pool import RewardError
from slime.rollout.rewards.math import MathVerifier

async def main():
    verifier = MathVerifier(workers=1, deadline_s=300)
    assert await verifier.grade("\\\\boxed{2x}", "x+x") == 1.0
    print(verifier.pool.worker_pids()[0], flush=True)
    if sys.argv[1] == "busy":
        await verifier.grade("\\\\boxed{7^{7^{7^{7}}} + x}", "5x")
    time.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("what", ["idle", "busy"])
def test_workers_die_with_a_killed_parent(what: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, what], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert is_running(worker)
    finally:
        parent.kill()
        parent.wait()
    wait_until_gone(worker)


def test_endless_expression_is_an_error_not_a_zero_reward() -> None:
    from slime.rollout.rewards.math import MathVerifier

    verifier = MathVerifier(workers=1, deadline_s=1.0)
    with pytest.raises(RewardError, match=r"deadline|memory|failed|signal"):
        asyncio.run(verifier.grade(r"\boxed{9^{9^{9^{9}}}+1}", "5x"))
    verifier.pool._deadline_s = 120.0
    assert asyncio.run(verifier.grade(r"\boxed{2x}", "x+x")) == 1.0
    verifier.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_inherit_no_api_keys(make_pool: Callable[..., GuardedPool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "judge")
    pool = make_pool()
    asyncio.run(pool.ask({"do": "x"}))
    [pid] = pool.worker_pids()
    names = {entry.partition(b"=")[0] for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
    assert b"PYTHONPATH" in names
    assert b"OPENAI_API_KEY" not in names
    pool.close()
