"""Control groups v1 and v2: files written, in folders that imitate the kernel's."""

from __future__ import annotations

import os
import time
from pathlib import Path

from slime.agent.sandbox.inside import cgroups

LIMITS = {"memory": 1 << 30, "processes": 100, "cpus": 1.5}
NAME = f"slime-sandbox-{os.getpid()}"


def own_groups(tmp_path: Path, text: str) -> str:
    path = tmp_path / "self-cgroup"
    path.write_text(text)
    return str(path)


def test_v1_creates_one_group_per_controller_below_its_own_group(tmp_path: Path) -> None:
    for place in ("memory/jobs/7", "pids", "cpu"):
        (tmp_path / place).mkdir(parents=True)
    own = own_groups(tmp_path, "9:name=systemd:/\n8:pids:/\n4:memory:/jobs/7\n1:cpu,cpuacct:/\n0::/\n")
    groups = cgroups.create_control_groups(LIMITS, str(tmp_path), own)
    memory = tmp_path / "memory/jobs/7" / NAME
    assert groups.holds == {"memory", "processes", "cpus"}
    assert groups.folders == [str(memory), str(tmp_path / "pids" / NAME), str(tmp_path / "cpu" / NAME)]
    assert (memory / "memory.limit_in_bytes").read_text() == str(1 << 30)
    assert (tmp_path / "pids" / NAME / "pids.max").read_text() == "100"
    assert (tmp_path / "cpu" / NAME / "cpu.cfs_quota_us").read_text() == "150000"
    groups.join()
    assert (memory / "cgroup.procs").read_text() == str(os.getpid())


def make_v2_group(folder: Path, controllers: str, handed_down: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.controllers").write_text(controllers)
    (folder / "cgroup.subtree_control").write_text(handed_down)
    return folder


def test_v2_uses_the_nearest_group_that_delegates_its_controllers(tmp_path: Path, monkeypatch) -> None:
    make_v2_group(tmp_path, "cpu memory pids", "cpu memory pids")
    make_v2_group(tmp_path / "user.slice", "cpu memory pids", "")
    (tmp_path / "user.slice/cgroup.subtree_control").chmod(0o400)
    written: list[str] = []
    real = cgroups._write

    def write(path: str, text: str) -> None:
        written.append(os.path.relpath(path, tmp_path))
        if path.endswith("user.slice/cgroup.subtree_control"):
            raise OSError(16, "Device or resource busy")  # the group has processes
        real(path, text)

    monkeypatch.setattr(cgroups, "_write", write)
    made = tmp_path / NAME
    made.mkdir()
    for file in ("memory.max", "pids.max", "cpu.max"):
        (made / file).write_text("max")
    groups = cgroups.create_control_groups(LIMITS, str(tmp_path), own_groups(tmp_path, "0::/user.slice\n"))
    assert groups.folders == [str(made)]
    assert groups.holds == {"memory", "processes", "cpus"}
    assert (made / "memory.max").read_text() == str(1 << 30)
    assert (made / "memory.swap.max").read_text() == "0"
    assert (made / "pids.max").read_text() == "100"
    assert (made / "cpu.max").read_text() == "150000 100000"
    assert written[0] == "user.slice/cgroup.subtree_control"


def test_no_limit_is_enforced_without_control_groups(tmp_path: Path) -> None:
    groups = cgroups.create_control_groups(LIMITS, str(tmp_path), own_groups(tmp_path, "0::/\n"))
    assert (groups.folders, groups.holds) == ([], set())
    assert cgroups.create_control_groups(LIMITS, str(tmp_path), str(tmp_path / "none")).holds == set()


def test_kernel_event_counts_are_read_in_v1_and_v2(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (one / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    (one / "pids.events").write_text("max 5\n")
    (two / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\noom_group_kill 0\n")
    assert cgroups.count_limit_events([str(one)]) == {"memory": 2, "processes": 5}
    assert cgroups.count_limit_events([str(two)]) == {"memory": 1, "processes": 0}


def test_removes_only_old_groups_of_dead_processes(tmp_path: Path, monkeypatch) -> None:
    gone, other = tmp_path / "slime-sandbox-4194999", tmp_path / "slime-sandbox-x"
    for folder in (gone, other, tmp_path / NAME):
        folder.mkdir()
    cgroups.remove_stale(str(tmp_path))
    assert gone.exists()  # a process may be about to join it
    later = time.time() + 3600
    monkeypatch.setattr(cgroups.time, "time", lambda: later)
    cgroups.remove_stale(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([NAME, other.name])
