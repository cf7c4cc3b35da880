"""A warm process equals a normally started one: parent, command line, environment, folder and descriptors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import wait_until
from tests.warm.command import GUARD, LAUNCHER, ROOT, Program, warm_program
from tests.warm.popen import COLD

TRAIN = str(ROOT / "train.py")
WORKER = [sys.executable, "-m", "slime.train.worker", "--fd"]


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_warm_process_looks_like_a_normally_started_one(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    ours, theirs = os.pipe()
    os.close(ours)
    command = [*WORKER, str(read_fd)]  # it waits for a message from its driver
    environment = {**os.environ, "SLIME_WARM_TEST": "here"}
    with subprocess.Popen(
        command, pass_fds=[read_fd], env=environment, cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE
    ) as process:
        os.close(read_fd)
        proc = Path(f"/proc/{process.pid}")
        assert proc.joinpath("cmdline").read_bytes().rstrip(b"\0").decode().split("\0") == command
        assert b"SLIME_WARM_TEST=here" in proc.joinpath("environ").read_bytes().split(b"\0")
        assert f"PPid:\t{os.getpid()}\n" in proc.joinpath("status").read_text()
        assert Path(os.readlink(proc / "cwd")) == tmp_path
        assert os.getsid(process.pid) == process.pid
        assert {int(fd.name) for fd in proc.joinpath("fd").iterdir()} >= {0, 1, 2, read_fd}
        assert theirs not in {int(fd.name) for fd in proc.joinpath("fd").iterdir()}
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == -signal.SIGTERM
    os.close(write_fd)
    os.close(theirs)


def test_output_and_exit_codes_are_passed_through(tmp_path: Path) -> None:
    told = subprocess.run([sys.executable, TRAIN, "--seed", "x"], capture_output=True, text=True, cwd=tmp_path)
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.endswith("error: --seed must be a whole number, not 'x'\n")
    helped = subprocess.run([sys.executable, TRAIN, "--help"], capture_output=True, text=True)
    assert (helped.returncode, helped.stderr) == (0, "")
    assert helped.stdout.startswith("usage: slime train")


@pytest.mark.parametrize("warm", [True, False])
def test_cold_process_has_not_imported_torch(warm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COLD, "" if warm else "1")
    fifo = tmp_path / "config.yaml"
    os.mkfifo(fifo)  # the program waits for its configuration before it imports anything
    with subprocess.Popen([sys.executable, TRAIN, "--config", str(fifo)], stderr=subprocess.PIPE) as process:
        assert wait_until(lambda: b"train.py" in Path(f"/proc/{process.pid}/cmdline").read_bytes(), within_s=240)
        assert has_torch(process.pid) is warm
        process.kill()


def test_warm_program_accepts_only_known_commands() -> None:
    python = sys.executable
    assert warm_program([python, "-c", "import slime"]) is None
    assert warm_program([python, "-m", "pytest"]) is None
    assert warm_program(["/usr/bin/python3", TRAIN]) is None
    assert warm_program([python, "-m", "slime.rollout.rewards.math_worker"]) is None  # it has a memory limit
    engine = ["slime.engine.embedded", "--port", "0"]
    assert warm_program([python, "-m", *engine]) == Program(engine[0], ("--port", "0"))
    assert warm_program([python, "-P", LAUNCHER, *engine]) == Program(engine[0], ("--port", "0"), here="last")
    guarded = [python, "-I", "-S", GUARD, "5", "77", "--", python, "-P", LAUNCHER, "--here-first", *engine]
    assert warm_program(guarded) == Program(engine[0], ("--port", "0"), guard=("5", "77"))
    assert warm_program([*guarded[:7], python, "-c", ""]) is None
