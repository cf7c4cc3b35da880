"""Wait registry and wait-for graph: names, folding, chains, cycles, deadlines, timeouts, thread and task stacks."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from slime.cluster.watchdog import (
    Limit,
    WaitTimeout,
    acting_as,
    describe,
    expired,
    log_graph,
    named,
    wait_for,
    waiting,
)
from slime.cluster.watchdog import registry as board_module
from slime.cluster.watchdog.registry import name_of, wait_registry
from slime.cluster.watchdog.timeouts import GraphReports, reports
from slime.errors import RunFailed


def graph_lines(text: str) -> list[str]:
    """The lines of the graph without the stacks below it, with times replaced by N."""
    lines = text.splitlines()
    assert lines[0] == "wait-for graph:"
    inner = []
    for line in lines[1:]:
        if not line.startswith("  "):
            break
        inner.append(re.sub(r": (longest )?\d+\.\d s", r": \1N s", line))
    return inner


@contextmanager
def in_thread(name: str, whom: str, why: str, **deadline: object) -> Iterator[None]:
    """Run a thread that waits until the body ends."""
    entered, leave = threading.Event(), threading.Event()

    def stand() -> None:
        with acting_as(name), waiting(whom, why, timeout_s=deadline.get("timeout_s"), flag=deadline.get("flag")):
            entered.set()
            leave.wait(240)

    thread = threading.Thread(target=stand, name=f"thread-of-{name}")
    thread.start()
    entered.wait(240)
    try:
        yield
    finally:
        leave.set()
        thread.join(240)


def test_graph_without_waits_says_no_waits() -> None:
    assert wait_registry.waits() == []
    assert graph_lines(describe()) == ["  no waits"]


def test_chain_of_waits_is_indented_with_deadlines() -> None:
    with (
        in_thread("rollout 3", "engine-99", "to answer /generate", timeout_s=30.0, flag="--engine-request-timeout"),
        waiting("rollout 3", "to finish", timeout_s=None),
    ):
        text = describe()
    assert graph_lines(text) == [
        "  driver waits for rollout 3 to finish: N s, no deadline of its own",
        "    rollout 3 waits for engine-99 to answer /generate: N s of 30 s (--engine-request-timeout)",
    ]
    assert wait_registry.waits() == []


def test_graph_shows_thread_stacks() -> None:
    with in_thread("somebody", "something", "to happen", timeout_s=1.0):
        text = describe()
    stack = text.split("thread thread-of-somebody:\n")[1]
    assert re.match(r"(  .*\n)*?  tests/watchdog/test_graph\.py:\d+ in stand\n  .*threading\.py:\d+ in wait", stack)
    assert "thread MainThread:" in text
    assert "wait-report" not in text  # nor the thread that makes the report


def test_waits_that_differ_only_in_numbers_are_folded() -> None:
    async def sample(number: int) -> None:
        with acting_as(f"sample {number}"), waiting("engine http://x", "to answer", timeout_s=60.0, flag="--f"):
            await asyncio.sleep(30)

    async def rollout() -> str:
        with acting_as("rollout 7"):
            tasks = [asyncio.create_task(sample(number)) for number in range(64)]
            odd = asyncio.create_task(wait_for(asyncio.sleep(30), "the judge", "to answer", timeout_s=None))
            await asyncio.sleep(0.01)
            with waiting("rollout 7", "to finish", who="driver", timeout_s=5.0):
                text = await asyncio.to_thread(describe)
            for task in [*tasks, odd]:
                task.cancel()
            await asyncio.gather(*tasks, odd, return_exceptions=True)
            return text

    text = asyncio.run(rollout())
    assert graph_lines(text) == [
        "  driver waits for rollout 7 to finish: N s of 5 s",
        "    sample 0 and 63 more like it wait for engine http://x to answer: longest N s of 60 s (--f)",
        "    rollout 7 waits for the judge to answer: N s, no deadline of its own",
    ]
    stack = text.split("task of sample 0, waiting for engine http://x:\n")[1]
    assert re.match(r"  tests/watchdog/test_graph\.py:\d+ in sample\n  .*tasks\.py:\d+ in sleep\n", stack)
    assert wait_registry.waits() == []


def test_cycle_is_printed_once_and_marked() -> None:
    with in_thread("left", "right", "to give way"), in_thread("right", "left", "to give way"):
        lines = graph_lines(describe())
    assert lines == [
        "  left waits for right to give way: N s, no deadline of its own",
        "    right waits for left to give way: N s, no deadline of its own",
        "      left waits for itself: this is a cycle",
    ]


def test_waiter_names_are_inherited_by_tasks_and_threads() -> None:
    async def main() -> list[tuple[str, ...]]:
        def path(who: str | None = None) -> tuple[str, ...]:
            with waiting("x", "y", timeout_s=None, who=who) as wait:
                return wait.path

        async def in_task() -> tuple[str, ...]:
            return path()

        with acting_as("rollout 1"), acting_as("sample 4"):
            return [
                path(),
                path("hook"),
                await asyncio.create_task(in_task()),
                await asyncio.to_thread(path),
                await asyncio.to_thread(path, "tool"),
            ]

    inherited = ("rollout 1", "sample 4")
    assert asyncio.run(main()) == [inherited, (*inherited, "hook"), inherited, inherited, (*inherited, "tool")]

    async def unnamed() -> str:
        with waiting("x", "y", timeout_s=None) as wait:
            return wait.who

    async def two() -> list[str]:
        return [await unnamed(), await asyncio.create_task(unnamed(), name="publisher")]

    assert asyncio.run(two()) == ["driver", "publisher"]
    coro = named(unnamed(), "weight update 3")
    assert name_of(coro) == "weight update 3"
    coro.close()


def test_remaining_reaches_zero_and_expired_includes_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(board_module, "time", SimpleNamespace(monotonic=lambda: now))
    with waiting("engine-0", "to start", timeout_s=None) as endless:
        assert endless.remaining() is None
        assert not endless.is_over()
    with acting_as("publisher"), waiting("engine-0", "to load", timeout_s=Limit(0.05, "--load-timeout")) as wait:
        assert wait.remaining() == pytest.approx(0.05)
        now += 0.04
        assert wait.remaining() == pytest.approx(0.01)
        assert not wait.is_over()
        now += 0.02
        assert wait.is_over()
        assert wait.remaining() == 0.0
        error = expired(wait)
    assert isinstance(error, WaitTimeout)
    assert isinstance(error, RunFailed)
    first, *rest = str(error).splitlines()
    assert re.fullmatch(r"publisher waited 0\.06 s for engine-0 to load \(--load-timeout\)", first)
    assert rest[0] == "wait-for graph:"
    assert re.search(r"publisher waits for engine-0 to load: \d+\.\d s of 0\.05 s \(--load-timeout\)", rest[1])


def test_wait_for_returns_raises_and_cancels() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    async def failing() -> None:
        raise ValueError("its own")

    async def main() -> None:
        assert await wait_for(asyncio.sleep(0, 5), "x", "y", timeout_s=120.0) == 5
        with pytest.raises(ValueError, match="its own"):
            await wait_for(failing(), "x", "y", timeout_s=120.0)
        with pytest.raises(
            WaitTimeout, match=r"^main waited [\d.]+ s for the tool to answer \(--t\)\nwait-for graph"
        ) as caught:
            await wait_for(forever(), "the tool", "to answer", who="main", timeout_s=0.05, flag="--t")
        assert re.search(r"task of main, waiting for the tool:\n  .*test_graph.py:\d+ in forever", str(caught.value))
        assert ended == ["cancelled"]
        outer = asyncio.create_task(wait_for(forever(), "x", "y", timeout_s=60.0))
        await asyncio.sleep(0.01)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert ended == ["cancelled", "cancelled"]

    asyncio.run(main())
    assert wait_registry.waits() == []


def test_task_that_ignores_cancellation_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.cluster.watchdog.timeouts.CANCEL_GRACE_S", 0.05)

    async def stubborn(leave: asyncio.Event) -> None:
        while not leave.is_set():
            try:
                await leave.wait()
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        leave = asyncio.Event()
        with pytest.raises(WaitTimeout, match="for the mule"):
            await wait_for(stubborn(leave), "the mule", "to move", timeout_s=0.05)
        leave.set()
        await asyncio.sleep(0.01)

    asyncio.run(main())


def test_graph_of_many_failed_samples_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh = GraphReports()
    monkeypatch.setattr("slime.cluster.watchdog.timeouts.reports", fresh)

    async def sample(number: int) -> str:
        with acting_as(f"sample {number}"):
            try:
                await wait_for(
                    asyncio.sleep(60), "the judge", "to answer", timeout_s=0.1, failure=lambda wait: ValueError("late")
                )
            except ValueError as error:
                return str(error)
        return "no error"

    async def main() -> list[str]:
        return await asyncio.gather(*(sample(number) for number in range(20)))

    assert asyncio.run(main()) == ["late"] * 20
    logged = [record.getMessage() for record in caplog.records if record.name == "slime.cluster.watchdog.timeouts"]
    assert len(logged) == 1
    assert logged[0].startswith("late\nwait-for graph:\n  sample ")
    assert re.search(r"and 19 more like it wait for the judge to answer: longest \d+\.\d s of 0\.1 s", logged[0])
    assert reports is not fresh


def test_second_graph_within_a_minute_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("slime.cluster.watchdog.timeouts.reports", GraphReports())

    async def main() -> None:
        with waiting("x", "y", timeout_s=0.0) as wait:
            await log_graph(wait, "first")
            await log_graph(wait, "second")

    asyncio.run(main())
    assert [record.getMessage().splitlines()[0] for record in caplog.records] == ["first"]
