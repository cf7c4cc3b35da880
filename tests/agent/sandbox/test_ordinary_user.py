"""Local sandboxes of non-root users: a user namespace replaces the temporary user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from slime.agent.sandbox.local import unavailable_reason
from tests.agent.sandbox.boxes import box

ROOT = Path(__file__).parents[3]
USER = "54321"
RUN = (
    'mount --bind "$PREFIX" /mnt && mount --bind "$REPOSITORY" /media && cd / && '
    "exec setpriv --reuid $USER_ID --regid $USER_ID --clear-groups env -i PATH=/usr/bin:/bin PYTHONPATH=/media "
    'PYTHONDONTWRITEBYTECODE=1 SNAPSHOT="$SNAPSHOT" "/mnt/bin/$PYTHON" -m tests.agent.sandbox.ordinary_user'
)
"""Binds the interpreter and the checkout elsewhere: they may be in a folder that only root may enter."""
WEAK_ROOT = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
"""Drops CAP_SYS_ADMIN, as in a container that may create namespaces only inside a user namespace."""


@pytest.fixture(scope="module", params=["a user", *(["root without capabilities"] if os.geteuid() == 0 else [])])
def said(request: pytest.FixtureRequest) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # other users cannot read pytest's folders
        os.chmod(folder, 0o755)
        return run_ordinary_user(Path(folder), is_weak_root=request.param != "a user")


def run_ordinary_user(task: Path, *, is_weak_root: bool) -> dict[str, Any] | None:
    if unavailable_reason("unshare") is not None:
        assert box("unshare") is None
        return None
    (task / "old").mkdir()
    (task / "old/gone").write_text("x\n")
    (task / "task.txt").write_text("begin\n")
    for path in (task, *task.rglob("*")):
        os.chown(path, int(USER), int(USER)) if os.geteuid() == 0 and not is_weak_root else None
    environment = {
        **os.environ, "PREFIX": sys.base_prefix, "REPOSITORY": str(ROOT), "USER_ID": USER, "SNAPSHOT": str(task),
        "PYTHON": Path(os.path.realpath(sys.executable)).name, "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", RUN]
    if os.geteuid() != 0 or is_weak_root:
        words = [*(WEAK_ROOT if is_weak_root else []), sys.executable, "-m", "tests.agent.sandbox.ordinary_user"]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert (task / "task.txt").read_text() == "begin\n"
    answer = json.loads(done.stdout)
    if "refusal" in answer:
        assert answer["refusal"]
        return None
    return answer


def test_ordinary_user_gets_an_isolated_sandbox(said: dict[str, Any] | None) -> None:
    if said is None:
        return
    assert said["uid"] == "1000"
    assert said["ids"] in ([USER, "1"], [str(os.getuid()), "1"])
    assert said["capabilities"] == "0" * 16
    assert said["nested"] != 0
    assert said["network"] == ["lo"]
    assert "farm" not in said["home"]
    assert "work\n" not in said["home"]


def test_limits_hold_and_only_known_ones_are_unenforced(said: dict[str, Any] | None) -> None:
    if said is None:
        return
    assert (said["file"], said["memory"], said["time"]) == ("file size", "memory", "timeout")
    assert set(said["unenforced"]) <= {"memory", "processes"}


def test_sandbox_starts_from_a_snapshot_and_leaves_it_unchanged(said: dict[str, Any] | None) -> None:
    if said is None:
        return
    assert said["wrote"] == [0, "begin\nmore\n", ""]
    assert said["diff"] == [["deleted", "old/gone"], ["modified", "task.txt"]]
