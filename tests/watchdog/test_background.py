"""Background failures are raised to waiters, and hanging thread calls do not occupy slots."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from typing import Any

import pytest

from slime.cluster.watchdog import BackgroundDied, background, raise_failures, waiting
from slime.cluster.watchdog.background import Repeated
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.event_loop import _LIMIT, DaemonThreads, LoopThread, LoopTimeout
from slime.rollout.inflight import cancel_and_wait


def fall() -> None:
    raise KeyError("left shoe")


def test_dead_thread_is_raised_with_its_traceback_until_closed() -> None:
    dying = background("shoemaker", fall)
    assert dying.join(120.0)
    assert not dying.is_alive()
    for ask in (dying.check, raise_failures):
        with pytest.raises(BackgroundDied, match=r"shoemaker died of KeyError: 'left shoe'\n(.|\n)*in fall") as caught:
            ask()
        assert isinstance(caught.value.__cause__, KeyError)
    dying.close()
    raise_failures()


def test_user_error_is_raised_to_waiters_and_not_logged_as_a_death(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def refuse() -> None:
        raise UserError("no such thing: correct it")

    refusing = background("rollouts ahead", refuse)
    assert refusing.join(120.0)
    with pytest.raises(UserError, match=r"^no such thing: correct it$"):
        raise_failures()
    refusing.close()
    assert [(record.levelname, record.message) for record in caplog.records] == [("INFO", "rollouts ahead ended")]


def test_cancelled_retrieves_exceptions_of_failed_tasks() -> None:
    unseen: list[dict[str, Any]] = []

    async def fail() -> list[Sample]:
        raise UserError("wrong")

    async def end_all() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
        tasks = [asyncio.create_task(fail()), asyncio.create_task(asyncio.sleep(60, []))]
        await asyncio.wait(tasks[:1])
        await cancel_and_wait(tasks)
        assert [task.done() for task in tasks] == [True, True]

    asyncio.run(end_all())
    gc.collect()
    assert unseen == []


def test_death_after_close_is_not_raised() -> None:
    may_fall = threading.Event()

    def fall_late() -> None:
        may_fall.wait(120.0)
        fall()

    late = background("latecomer", fall_late)
    late.close()
    may_fall.set()
    assert late.join(120.0)
    raise_failures()


def test_blocked_event_loop_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.rollout.event_loop.STALL_S", 1.0)
    released = threading.Event()

    async def blocking() -> None:
        released.wait(240.0)  # without await, so no task deadline can fire

    loop = LoopThread("stalled")
    try:
        with pytest.raises(LoopTimeout, match=r"stalled: something has blocked the event loop(.|\n)*in blocking"):
            loop.run(blocking(), whom="a reward")
    finally:
        released.set()
        loop.close()


def test_user_error_in_the_background_keeps_its_message() -> None:
    def mistaken() -> None:
        raise UserError("no such flag")

    dying = background("reader", mistaken)
    dying.join(120.0)
    with pytest.raises(UserError, match=r"^no such flag$"):
        raise_failures()
    dying.close()


def test_successful_thread_raises_nothing_and_waits_under_its_name() -> None:
    names: list[str] = []

    def work() -> None:
        with waiting("x", "y", timeout_s=None) as wait:
            names.append(wait.who)

    well = background("worker", work)
    assert well.join(120.0)
    well.check()
    raise_failures()
    assert names == ["worker"]


def test_background_tasks_raise_and_are_cancelled_by_aclose() -> None:
    async def falls() -> None:
        fall()

    async def main() -> None:
        endless = background("endless", asyncio.Event().wait())  # type: ignore[arg-type]
        dying = background("cobbler", falls())
        await asyncio.sleep(0.01)
        assert endless.is_alive()
        with pytest.raises(BackgroundDied, match="cobbler died of KeyError"):
            raise_failures()
        await dying.aclose()
        await endless.aclose()
        assert not endless.is_alive()
        raise_failures()

    asyncio.run(main())


def test_background_death_ends_another_wait() -> None:
    loop = LoopThread("test")
    dying = background("shoemaker", fall)
    try:
        with pytest.raises(BackgroundDied, match="shoemaker died"):
            loop.run(asyncio.sleep(60), whom="rollout 3")
    finally:
        dying.close()
        loop.close()


def test_loop_timeout_names_the_awaited_work_and_the_blocking_task() -> None:
    loop = LoopThread("test")
    with pytest.raises(LoopTimeout, match=r"test: rollout 3 did not finish within 0\.05 s\nwait-for graph:"):
        loop.run(asyncio.sleep(60), 0.05, whom="rollout 3")
    begun, release = threading.Event(), threading.Event()

    async def blocks() -> None:
        begun.set()
        release.wait(240)

    asyncio.run_coroutine_threadsafe(blocks(), loop.loop)
    begun.wait(120)
    with pytest.raises(LoopTimeout, match=r"task blocks the event loop(.|\n)*in blocks\n"):
        _close_soon(loop)
    release.set()
    loop._thread.join(120)


def _close_soon(loop: LoopThread) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slime.rollout.event_loop.CLOSE_TIMEOUT_S", 0.2)
        loop.close()


def test_cancelled_hanging_call_frees_its_slot() -> None:
    threads, release = DaemonThreads("test", limit=2), threading.Event()
    hung = [threads.submit(lambda: release.wait(240)) for _ in range(2)]
    queued = threads.submit(lambda: "served")
    with pytest.raises(TimeoutError):
        queued.result(0.1)
    hung[0].cancel()
    assert queued.result(120) == "served"
    dropped, last = threads.submit(lambda: "never"), threads.submit(lambda: "again")
    dropped.cancel()
    assert last.result(120) == "again"
    release.set()
    assert hung[1].result(120) is True
    threads.close()
    with pytest.raises(RuntimeError, match="closed"):
        threads.submit(fall)


def test_slow_call_frees_its_slot_and_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.rollout.event_loop.SLOW_S", 3600.0)
    threads, release = DaemonThreads("test", limit=1), threading.Event()
    slow = threads.submit(lambda: release.wait(240))
    queued = threads.submit(fall)
    with pytest.raises(TimeoutError):
        queued.result(0.2)
    monkeypatch.setattr("slime.rollout.event_loop.SLOW_S", 0.1)
    with pytest.raises(KeyError, match="left shoe"):
        queued.result(120)
    release.set()
    assert slow.result(120) is True
    threads.close()


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_to_thread_serves_calls_behind_hanging_calls(monkeypatch: pytest.MonkeyPatch, is_cancelled: bool) -> None:
    """Queued calls run without a later submission. Cancelled calls occupy no slot, whatever the thread limit."""
    monkeypatch.setattr("slime.rollout.event_loop.SLOW_S", 0.1)
    monkeypatch.setattr("slime.rollout.event_loop.MOST_THREADS", _LIMIT + 1)
    release = threading.Event()

    async def behind_hung_calls() -> str:
        begun = asyncio.Semaphore(0)
        loop = asyncio.get_running_loop()

        def hang() -> None:
            loop.call_soon_threadsafe(begun.release)
            release.wait(240)

        for _ in range(3 if is_cancelled else 1):
            hung = [asyncio.create_task(asyncio.to_thread(hang)) for _ in range(_LIMIT)]
            for _ in hung:
                await begun.acquire()
            for task in hung if is_cancelled else ():
                task.cancel()
        return await asyncio.to_thread(lambda: "served")

    loop = LoopThread("test")
    assert loop.run(behind_hung_calls(), 120) == "served"
    release.set()
    loop.close()


HANGS_AT_EXIT = """\
import asyncio, threading
from slime.rollout.event_loop import LoopThread

async def hang():
    await asyncio.wait_for(asyncio.to_thread(threading.Event().wait), 0.1)

loop = LoopThread("test")
try:
    loop.run(hang())
except TimeoutError:
    print("left behind")
loop.close()
"""


def test_hanging_thread_does_not_block_process_exit() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS_AT_EXIT], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "left behind\n")


def test_repeated_call_chooses_its_pauses_and_ends_with_stop() -> None:
    called, many = [], threading.Event()

    def act() -> float | None:
        called.append(threading.current_thread().name)
        if len(called) == 5:
            many.set()
        return 3600.0 if len(called) == 5 else 0.0 if len(called) % 2 else None

    repeated = Repeated("again", act, 0.01)
    assert many.wait(120)
    assert not repeated.is_stopped
    repeated.stop()
    repeated.stop()
    assert repeated.is_stopped
    assert called == ["again"] * 5
    assert "again" not in {thread.name for thread in threading.enumerate()}
