"""Signals to a waiting process: SIGUSR1 prints the graph, SIGQUIT prints it and ends the run, also on a hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slime.cluster.watchdog import ending_signals, watch_signals
from slime.driver.inputs import redirect_closed_terminal, signals_as_interrupts

WAITER = """\
import logging, signal, sys, threading, time
from slime.cli import main
from slime.errors import RunFailed
from slime.cluster.watchdog import waiting, watch_signals
import slime.cli
logging.basicConfig(filename=sys.argv[1], level=logging.INFO, format="%(message)s")

def stand_around():
    with waiting("the tide", "to turn", timeout_s=99.0, flag="--tide-timeout"):
        print("waiting", flush=True)
        sys.stdin.readline()

def command(words):
    before = signal.getsignal(signal.SIGQUIT), signal.getsignal(signal.SIGUSR1)
    try:
        with watch_signals():
            stand_around()
            print("done", flush=True)
    finally:
        assert (signal.getsignal(signal.SIGQUIT), signal.getsignal(signal.SIGUSR1)) == before
        assert signal.set_wakeup_fd(-1) == -1
        print("cleaned up", flush=True)
    return 0

slime.cli._command = lambda words: command
sys.exit(main(["x"]))
"""
GRAPH = "wait-for graph:\n  driver waits for the tide to turn: "


@contextmanager
def waiter(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path / "waiter.py"
    script.write_text(WAITER)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(script), str(tmp_path / "log")], text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            yield process
        finally:
            process.kill()


def test_sigusr1_prints_the_graph_and_the_run_continues(tmp_path: Path) -> None:
    with waiter(tmp_path) as process:
        process.send_signal(signal.SIGUSR1)
        assert process.stderr is not None
        shown = [process.stderr.readline(), process.stderr.readline()]
        assert "".join(shown).startswith(GRAPH)
        assert shown[1].endswith(" of 99 s (--tide-timeout)\n")
        while "in stand_around" not in shown[-1]:
            shown.append(process.stderr.readline())
            assert shown[-1]
        assert "waiter.py:" in shown[-1]
        out, _ = process.communicate("\n", timeout=240)
    assert out == "done\ncleaned up\n"
    assert process.returncode == 0
    assert GRAPH in (tmp_path / "log").read_text()


def test_sigquit_prints_the_graph_and_ends_the_run(tmp_path: Path) -> None:
    with waiter(tmp_path) as process:
        process.send_signal(signal.SIGQUIT)
        out, err = process.communicate(timeout=240)
    assert err.startswith(GRAPH)
    assert "in stand_around" in err
    assert err.splitlines()[-1] == (
        "error: the run was ended by SIGQUIT; what it waited for is above and in the driver's log"
    )
    assert out == "cleaned up\n"
    assert process.returncode == 1
    assert "SIGQUIT\n" + GRAPH in (tmp_path / "log").read_text()


def test_watch_signals_does_nothing_outside_the_main_thread() -> None:
    before, seen = signal.getsignal(signal.SIGQUIT), []

    def body() -> None:
        with watch_signals():
            seen.append(signal.getsignal(signal.SIGQUIT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]


STUCK = """\
import ctypes, threading
from slime.cluster.watchdog import waiting, watch_signals
c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
main, where = threading.get_native_id(), hex(ctypes.addressof(mutex))

def tell():
    while where not in open(f"/proc/self/task/{main}/syscall").read().split():
        pass
    print("stuck", flush=True)

with watch_signals(), waiting("a mutex", "to be free", timeout_s=None):
    threading.Thread(target=tell).start()
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)  # never comes back to where signal handlers run
"""


@contextmanager
def stuck(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(script)], text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "stuck\n"  # printed when the main thread blocks on the mutex
            yield process
        finally:
            process.kill()


def assert_shown(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    assert process.stderr.readline() == "wait-for graph:\n"
    assert process.stderr.readline().startswith("  driver waits for a mutex to be free: ")


def test_graph_is_printed_when_the_main_thread_hangs(tmp_path: Path) -> None:
    with stuck(tmp_path) as process:
        process.send_signal(signal.SIGUSR1)
        assert_shown(process)


def test_second_sigquit_ends_a_hanging_process(tmp_path: Path) -> None:
    with stuck(tmp_path) as process:
        process.send_signal(signal.SIGQUIT)
        assert_shown(process)
        process.send_signal(signal.SIGQUIT)
        assert process.wait(240) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_interrupt_the_run(number: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), signals_as_interrupts():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
    assert ["SIGHUP (the terminal was closed)" in text for text in caplog.messages] == [True] * (
        number == signal.SIGHUP
    )


def test_sighup_is_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_as_interrupts():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.SIGHUP not in ending_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_output_to_a_closed_terminal_is_discarded() -> None:
    ours, terminal = os.openpty()
    read, pipe = os.pipe()
    os.close(ours)
    try:
        with pytest.raises(OSError, match="Input/output error"):
            os.write(terminal, b"x")
        redirect_closed_terminal((terminal, pipe))
        assert os.write(terminal, b"x") == 1
        os.write(pipe, b"kept")
        assert os.read(read, 4) == b"kept"
    finally:
        for descriptor in (terminal, read, pipe):
            os.close(descriptor)
