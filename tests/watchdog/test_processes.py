"""Real child processes: stacks of hanging ones, states of stopped and dead ones, and no deaths by SIGQUIT."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime.cluster.process import ChildProcess
from slime.cluster.watchdog import describe, state_of, waiting
from slime.cluster.watchdog.stacks import process_registry
from tests.e2e.runs import wait_until
from tests.patience import with_more_time

HANGS = """\
import faulthandler, signal, sys, threading
{register}
def stuck_in_here():
    print("ready", flush=True)
    threading.Event().wait()

def main():
    stuck_in_here()

main()
"""
REGISTER = "faulthandler.register(signal.SIGQUIT, all_threads=True, chain=False)"
IGNORANT = "pass"
DEADLY = "signal.signal(signal.SIGQUIT, lambda *_: sys.exit(3))"


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ChildProcess]]:
    monkeypatch.setattr("slime.cluster.watchdog.stacks.ANSWER_S", 60.0)
    started: list[ChildProcess] = []

    def start(name: str, register: str, *, dumps_stacks: bool) -> ChildProcess:
        script = tmp_path / f"{name}.py"
        script.write_text(HANGS.format(register=register))
        process = ChildProcess(
            name,
            [sys.executable, str(script)],
            log_path=tmp_path / f"{name}.log",
            dumps_stacks=dumps_stacks,
            also=("http://127.0.0.1:9",),
        ).start()
        started.append(process)
        assert wait_until(lambda: "ready" in process.tail() and "sleeping" in process.state(), 120)
        return process

    yield start
    for process in started:
        process.stop(grace_s=0.0)


def test_hanging_child_shows_its_stack_and_survives(
    hanging: Callable[..., ChildProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = hanging("worker-0", REGISTER, dumps_stacks=True)

    def check(settled_s: float) -> None:
        monkeypatch.setattr("slime.cluster.watchdog.stacks._SETTLED_S", settled_s)
        with waiting("worker-0", "to do its work", timeout_s=9.0, flag="--patience"):
            text = describe()
        assert "did not show its stacks" not in text
        lines = text.splitlines()
        assert re.fullmatch(r"  driver waits for worker-0 to do its work: \d+\.\d s of 9 s \(--patience\)", lines[1])
        assert lines[2].startswith(f"    worker-0 (pid {process.child_pid()}) is sleeping")
        stack = text.split("worker-0:\n")[1]
        assert "worker-0.py" in stack
        places = [stack.find(f" in {name}") for name in ("stuck_in_here", "main", "<module>")]
        assert places == sorted(places)
        assert places[0] > 0

    with_more_time(check, 0.15, 1.5, 10.0)
    assert process.poll() is None


def test_awaited_child_is_found_by_alias_and_others_are_not_dumped(
    hanging: Callable[..., ChildProcess],
) -> None:
    process = hanging("worker-0", REGISTER, dumps_stacks=True)
    with waiting("engine http://127.0.0.1:9", "to answer", timeout_s=None):
        text = describe()
    assert "in stuck_in_here" in text
    assert "the end of" not in text
    said = process.tail(1000).count("in stuck_in_here")
    with waiting("engine http://127.0.0.1:99", "to answer", timeout_s=None):
        assert "in stuck_in_here" not in describe()
    assert process.tail(1000).count("in stuck_in_here") == said == 1


def test_stopped_child_is_described_as_stopped(hanging: Callable[..., ChildProcess]) -> None:
    process = hanging("worker-0", REGISTER, dumps_stacks=True)
    pid = process.child_pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: "stopped" in process.state(), 120)
    with waiting("worker-0", "to go on", timeout_s=None):
        text = describe()
    assert f"    worker-0 (pid {pid}) is stopped (SIGSTOP)\n" in text
    assert f"worker-0:\n  worker-0 (pid {pid}) is stopped (SIGSTOP)\n  the end of {process.log_path}:\n  ready" in text
    os.kill(pid, signal.SIGCONT)
    assert process.wait(0.3) is None


@pytest.mark.parametrize(("register", "promised"), [(IGNORANT, True), (IGNORANT, False), (DEADLY, False)])
def test_sigquit_is_not_sent_to_a_child_it_would_kill(
    hanging: Callable[..., ChildProcess], register: str, promised: bool
) -> None:
    process = hanging("server-0", register, dumps_stacks=promised)
    with waiting("server-0", "to answer", timeout_s=None):
        text = describe()
    assert re.search(
        rf"server-0:\n  server-0 \(pid {process.child_pid()}\) is sleeping.*\n  the end of .*:\n  ready", text
    )
    assert process.wait(0.3) is None


def test_killed_child_is_described_as_gone_until_stop(hanging: Callable[..., ChildProcess]) -> None:
    process = hanging("worker-0", IGNORANT, dumps_stacks=True)
    os.kill(process.child_pid() or 0, signal.SIGKILL)
    assert process.wait(120.0) == -signal.SIGKILL
    assert state_of("worker-0") == "worker-0 is gone"
    process.stop()
    assert state_of("worker-0") is None
    assert process_registry.named_in("worker-0") == []


def test_child_pid_is_not_the_pid_of_the_guard(hanging: Callable[..., ChildProcess]) -> None:
    process = hanging("worker-0", IGNORANT, dumps_stacks=True)
    assert process.child_pid() != process.pid
    guard, _, child = process.pids()  # the deputy is between guard and child
    assert (guard, child) == (process.pid, process.child_pid())
