from __future__ import annotations

import fcntl
import io
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from slime.errors import UserError
from slime.observability import run_dir
from slime.observability.logs import configure_logging, repeated_warnings
from slime.observability.progress import PlainProgress, Progress
from slime.observability.run_dir import RunDir


def test_run_dir_is_created_and_locked(tmp_path: Path) -> None:
    with RunDir(tmp_path / "a" / "run") as run:
        assert run.logs.is_dir()
        assert Path(run) == tmp_path / "a" / "run" == run / "."
        assert run.metrics == tmp_path / "a" / "run" / "metrics.jsonl"
        with pytest.raises(UserError, match=rf"in use by a run .*process {os.getpid()}.*--output-dir"):
            RunDir(run)
    RunDir(run).release()


def test_lock_is_released_when_the_process_is_killed(tmp_path: Path) -> None:
    code = "import os,signal,sys; from slime.observability.run_dir import RunDir; r = RunDir(sys.argv[1]); "
    code += "print('locked', flush=True); sys.stdin.read(); os.kill(os.getpid(), signal.SIGKILL)"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "locked\n"
    with pytest.raises(UserError, match=f"process {other.pid}"):
        RunDir(tmp_path)
    other.communicate("")
    RunDir(tmp_path).release()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A descriptor of a run folder lock that names a run on another machine as its owner."""
    monkeypatch.setattr(run_dir, "SILENCE_S", 0.3)
    monkeypatch.setattr(run_dir, "RELEASE_S", 240.0)
    RunDir(tmp_path).release()
    (tmp_path / ".lock").write_text("12 node-a 0000-1111\n")
    return os.open(tmp_path / ".lock", os.O_RDWR)


@contextmanager
def heartbeat(lock: int) -> Iterator[None]:
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.01):
            os.utime(lock)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("shares_locks", [True, False])
def test_live_run_on_another_machine_is_named_in_the_error(
    elsewhere: int, tmp_path: Path, shares_locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "SILENCE_S", 120.0)
    if shares_locks:
        fcntl.flock(elsewhere, fcntl.LOCK_EX)
    with heartbeat(elsewhere), pytest.raises(UserError, match=r"still alive \(process 12 on node-a\).*--output-dir"):
        RunDir(tmp_path)


def test_folder_of_a_dead_machine_is_taken_over_once_its_lock_is_free(
    elsewhere: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDir(tmp_path):  # the storage does not share locks, or has released this one
        assert (tmp_path / ".lock").read_text().split()[:2] == [str(os.getpid()), socket.gethostname()]
    assert (tmp_path / ".lock").read_text() == ""  # a clean exit clears the owner
    (tmp_path / ".lock").write_text("12 node-a 0000-1111\n")
    fcntl.flock(elsewhere, fcntl.LOCK_EX)
    monkeypatch.setattr(run_dir, "RELEASE_S", 0.1)
    with pytest.raises(UserError, match=r"locked by process 12 on node-a, which has no heartbeat"):
        RunDir(tmp_path)
    monkeypatch.setattr(run_dir, "RELEASE_S", 240.0)
    looked = threading.Event()
    refused = run_dir._locked

    def locked(lock_fd: int) -> bool:
        looked.set()
        return refused(lock_fd)

    monkeypatch.setattr(run_dir, "_locked", locked)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(RunDir, tmp_path)
        assert looked.wait(240)
        fcntl.flock(elsewhere, fcntl.LOCK_UN)  # the file server drops the lock of the machine
        taken.result(240).release()


def test_rebooted_or_renamed_machine_counts_as_the_same(elsewhere: int, tmp_path: Path) -> None:
    here = run_dir.Owner.here()
    assert not run_dir.Owner("1", here.host, "another boot").is_elsewhere
    assert not run_dir.Owner("1", "another-name", here.boot).is_elsewhere
    assert not run_dir.Owner("1").is_elsewhere  # a lock file that has only the pid
    assert run_dir.Owner("1", "another-name", "another boot").is_elsewhere


def test_run_updates_its_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "BEAT_S", 0.01)
    with RunDir(tmp_path):
        first = (tmp_path / ".lock").stat().st_mtime_ns
        deadline = time.monotonic() + 240
        while (tmp_path / ".lock").stat().st_mtime_ns == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_run_dir_that_is_a_file_raises_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="can't be written"):
        RunDir(tmp_path / "file")


@pytest.fixture
def quiet_root() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.mark.usefixtures("quiet_root")
def test_driver_logs_to_its_file_and_warns_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    for _ in range(2):  # a second setup replaces the first
        path = configure_logging(tmp_path, "driver", "info", console=screen)
    logging.getLogger("slime.x").debug("too fine")
    logging.getLogger("slime.x").info("for the file")
    logging.getLogger("slime.x").warning("for all [/eyes")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("a python warning", stacklevel=1)
    assert path == tmp_path / "logs" / "driver.log"
    written = path.read_text()
    assert "too fine" not in written
    assert written.count("INFO slime.x: for the file") == written.count("WARNING slime.x: for all [/eyes") == 1
    assert "a python warning" in written
    assert isinstance(screen.file, io.StringIO)
    assert "for all [/eyes" in screen.file.getvalue()
    assert "for the file" not in screen.file.getvalue()
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("quiet_root")
def test_without_a_terminal_warnings_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(tmp_path, "driver", "debug")
    logging.getLogger("slime.x").debug("fine")
    logging.getLogger("slime.x").error("bad")
    assert capsys.readouterr().err == "ERROR: bad\n"


@pytest.mark.usefixtures("quiet_root")
def test_repeated_warning_is_shown_once_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = configure_logging(tmp_path, "driver", "info")
    for number in (1, 1, 2, 1):
        logging.getLogger("slime.x").warning("dropped %d", number)
    assert capsys.readouterr().err == "WARNING: dropped 1\nWARNING: dropped 2\n"
    assert path is not None
    assert path.read_text().count("dropped 1") == 3
    assert repeated_warnings() == ["2 more times: dropped 1"]
    configure_logging(tmp_path, "driver", "info")
    assert repeated_warnings() == []


class RaisingStr:
    def __str__(self) -> str:
        raise KeyError("no text")


@pytest.mark.usefixtures("quiet_root")
@pytest.mark.parametrize("argument", [3, RaisingStr()])
def test_malformed_warning_does_not_raise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argument: object
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own handlers raise
    configure_logging(tmp_path, "driver", "info")
    logging.getLogger("somebody").warning("a %s b %s" if argument == 3 else "a %s", argument)
    logging.getLogger("somebody").warning("whole")
    said = capsys.readouterr().err
    assert "--- Logging error ---" in said
    assert "WARNING: whole" in said


@pytest.mark.usefixtures("quiet_root")
def test_warning_shown_by_the_display_is_logged_only_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = configure_logging(tmp_path, "driver", "info")
    assert path is not None
    screen = Console(file=io.StringIO(), width=100)
    with PlainProgress(1, start=0, console=screen) as progress:
        progress.warn("all rewards are equal")
    Progress(screen).warn("nobody shows this")
    assert isinstance(screen.file, io.StringIO)
    assert re.fullmatch(r"\[\d+:\d\d\] warning: all rewards are equal\n", screen.file.getvalue())
    assert capsys.readouterr().err == "WARNING: nobody shows this\n"
    assert "WARNING slime.progress: all rewards are equal" in path.read_text()


@pytest.mark.usefixtures("quiet_root")
def test_child_process_logs_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert configure_logging(None, "trainer-0", "info") is None
    logging.getLogger("slime.x").info("hello")
    assert "INFO slime.x: hello" in capsys.readouterr().err
