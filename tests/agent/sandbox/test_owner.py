"""The death of the process that owns a sandbox leaves no process, control group or folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slime.agent.sandbox.local import unavailable_reason
from tests.agent.sandbox.boxes import ALL, alive, box, wait_until

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("way", ALL)
def test_killed_owner_leaves_no_process_or_folder(way: str, how: signal.Signals) -> None:
    kill_owner_and_check_cleanup(way, how)


@pytest.mark.parametrize("way", ["unshare", "subprocess"])
def test_forked_copy_does_not_keep_the_sandbox_of_a_dead_owner(way: str) -> None:
    kill_owner_and_check_cleanup(way, signal.SIGKILL, "fork")


def kill_owner_and_check_cleanup(way: str, how: signal.Signals, *more: str) -> None:
    if way != "subprocess" and unavailable_reason(way) is not None:
        assert box(way) is None
        return
    mark = f"sandbox-owner-{os.urandom(8).hex()}"
    words = [sys.executable, "-m", "tests.agent.sandbox.owner", way, mark, *more]
    owner = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert owner.stdout is not None
    with owner.stdout:
        copy, *folders = owner.stdout.readline().split()
    assert len(folders) >= 1
    apart = {int(copy)} if more else set()
    assert len(set(alive(mark)) - {owner.pid} - apart) >= 4
    owner.send_signal(how)
    owner.wait()
    try:
        wait_until(lambda: set(alive(mark)) == apart)
    finally:
        for pid in apart:
            os.kill(pid, signal.SIGKILL)
    own = folders if way == "subprocess" else folders[1:]  # /workspace exists only inside the sandbox
    wait_until(lambda: not [folder for folder in own if os.path.exists(folder)])
