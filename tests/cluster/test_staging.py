from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slime.cluster.memory.staging import StagingFolder, choose_root, remove_stale

OWNER = """
import os, signal, sys
from pathlib import Path
from slime.cluster.memory.staging import StagingFolder
staging = StagingFolder(Path(sys.argv[1]), sys.argv[3])
(staging.subfolder("v000001") / "bucket").write_bytes(b"x" * 100)
print(staging.path, flush=True)
if sys.argv[2] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


def start_owner(root: Path, then: str, kind: str) -> tuple[subprocess.Popen[str], Path]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(root), then, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


@pytest.mark.parametrize("kind", ["weights", "shares"])
def test_remove_stale_removes_only_folders_of_dead_runs(tmp_path: Path, kind: str) -> None:
    dead, dead_folder = start_owner(tmp_path, "die", kind)
    dead.wait()
    live, live_folder = start_owner(tmp_path, "stay", kind)
    (tmp_path / "slime-weights-foreign").mkdir()
    assert (dead_folder / "v000001" / "bucket").exists()
    with StagingFolder(tmp_path, "weights") as own:
        assert remove_stale(tmp_path) == [dead_folder]
        assert own.path.exists()
    assert not dead_folder.exists()
    assert not own.path.exists()
    assert (live_folder / "v000001" / "bucket").exists()
    live.communicate("")
    assert remove_stale(tmp_path) == [live_folder]
    assert os.listdir(tmp_path) == ["slime-weights-foreign"]


def test_subfolder_starts_empty(tmp_path: Path) -> None:
    with StagingFolder(tmp_path, "weights") as staging:
        (staging.subfolder("v1") / "old").touch()
        assert list(staging.subfolder("v1").iterdir()) == []


def test_shared_memory_is_used_only_with_enough_room(tmp_path: Path) -> None:
    assert choose_root(1, tmp_path) == (tmp_path, f"{tmp_path} has room")
    root, reason = choose_root(2**60, tmp_path)
    assert root == Path(tempfile.gettempdir())
    assert "may be needed" in reason
    assert choose_root(1, tmp_path / "missing")[0] == Path(tempfile.gettempdir())


def test_unknown_kind_of_staging_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown kind of staging folder"):
        StagingFolder(tmp_path, "others")
    assert list(tmp_path.iterdir()) == []
