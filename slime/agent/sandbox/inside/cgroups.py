"""Limits for all processes of a sandbox together, by control groups of version 1 or 2, whichever the machine has.

A group is created below this process's own group where permitted, so that the limits of parent groups still apply; in
version 2 below the nearest group, from our own upwards, that delegates its controllers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping

MEMORY, PROCESSES, CPUS = "memory", "processes", "cpus"
_CONTROLLERS = {MEMORY: "memory", PROCESSES: "pids", CPUS: "cpu"}
_PERIOD_US = 100_000
_REMOVAL_S = 2.0
_PREFIX = "slime-sandbox-"
_STALE_S = 60.0


class ControlGroups:
    """The control groups of one sandbox, and the limits that they enforce."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.holds: set[str] = set()

    def join(self) -> None:
        """Move this process into the groups; its children are then in them too."""
        for folder in self.folders:
            _write(os.path.join(folder, "cgroup.procs"), str(os.getpid()))

    def remove(self) -> None:
        """Remove the groups after their processes have ended."""
        remove(self.folders)
        self.folders = []


def remove(folders: list[str]) -> None:
    """Remove groups, waiting up to `_REMOVAL_S` for a group whose last process is still exiting."""
    for folder in folders:
        deadline = time.monotonic() + _REMOVAL_S
        while os.path.isdir(folder):
            try:
                os.rmdir(folder)
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)


def remove_stale(parent: str) -> None:
    """Remove the groups of sandboxes whose monitor and driver were both killed; a group in use is not removed."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            pid = name.removeprefix(_PREFIX)
            folder = os.path.join(parent, name)
            if pid != name and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                with contextlib.suppress(OSError):
                    if time.time() - os.stat(folder).st_ctime > _STALE_S:
                        os.rmdir(folder)


def create_control_groups(
    limits: Mapping[str, float], root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup"
) -> ControlGroups:
    """Create groups of this process for the limits that it is permitted to set.

    `own` lists this process's group for each controller; that of version 2 has an empty controller name.
    """
    name = f"{_PREFIX}{os.getpid()}"
    groups = ControlGroups()
    places: dict[str, str] = {}
    with contextlib.suppress(OSError), open(own) as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            places.update(dict.fromkeys(controllers.split(","), path))
    for limit, value in limits.items():
        controller = _CONTROLLERS[limit]
        if controller in places and os.path.isdir(os.path.join(root, controller)):
            parent = os.path.join(root, controller, places[controller].lstrip("/"))
            remove_stale(parent)
            _create_v1_group(groups, os.path.join(parent, name), limit, value)
    missing = {limit: value for limit, value in limits.items() if limit not in groups.holds}
    if missing and "" in places:
        unified = root if os.path.exists(os.path.join(root, "cgroup.controllers")) else os.path.join(root, "unified")
        _create_v2_group(groups, unified, places[""], name, missing)
    return groups


def _create_v1_group(groups: ControlGroups, folder: str, limit: str, value: float) -> None:
    """Create the group of one limit in version 1."""
    files = {
        MEMORY: {"memory.limit_in_bytes": int(value)},
        PROCESSES: {"pids.max": int(value)},
        CPUS: {"cpu.cfs_period_us": _PERIOD_US, "cpu.cfs_quota_us": int(value * _PERIOD_US)},
    }[limit]
    try:
        os.makedirs(folder, exist_ok=True)
        for file, number in files.items():
            _write(os.path.join(folder, file), str(number))
    except OSError:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        return
    if limit == MEMORY:
        with contextlib.suppress(OSError):  # the kernel may lack swap accounting
            _write(os.path.join(folder, "memory.memsw.limit_in_bytes"), str(int(value)))
    groups.folders.append(folder)
    groups.holds.add(limit)


def _create_v2_group(groups: ControlGroups, root: str, own: str, name: str, limits: Mapping[str, float]) -> None:
    """Create one group for all the limits in version 2."""
    files = {
        MEMORY: lambda value: {"memory.max": str(int(value))},
        PROCESSES: lambda value: {"pids.max": str(int(value))},
        CPUS: lambda value: {"cpu.max": f"{int(value * _PERIOD_US)} {_PERIOD_US}"},
    }
    folder = _create_delegated_group(root, own, name, [_CONTROLLERS[limit] for limit in limits])
    if folder is None:
        return
    held = set()
    for limit, value in limits.items():
        with contextlib.suppress(OSError):
            for file, text in files[limit](value).items():
                if os.path.exists(os.path.join(folder, file)):
                    _write(os.path.join(folder, file), text)
                    held.add(limit)
    if MEMORY in held:
        with contextlib.suppress(OSError):
            _write(os.path.join(folder, "memory.swap.max"), "0")
    if not held:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        return
    groups.folders.append(folder)
    groups.holds |= held


def _create_delegated_group(root: str, own: str, name: str, controllers: list[str]) -> str | None:
    """Create a group below the nearest one, from our own upwards, that delegates the controllers; None if none does."""
    place = own.strip("/")
    while True:
        parent = os.path.join(root, place)
        available = set(_read(os.path.join(parent, "cgroup.controllers")).split())
        wanted = [controller for controller in controllers if controller in available]
        if wanted and _enable_controllers(parent, wanted):
            remove_stale(parent)
            folder = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                os.makedirs(folder, exist_ok=True)
                return folder
        if not place:
            return None
        place = os.path.dirname(place)


def _enable_controllers(parent: str, controllers: list[str]) -> bool:
    """Enable the controllers for the children of a group; False where that is not possible."""
    control = os.path.join(parent, "cgroup.subtree_control")
    for controller in controllers:
        if controller not in _read(control).split():
            try:
                _write(control, f"+{controller}")
            except OSError:  # a group with processes of its own cannot delegate controllers
                return False
    return True


def count_limit_events(folders: list[str]) -> dict[str, int]:
    """Count the times each limit was hit: processes killed for memory, processes that could not be started."""
    counts = {MEMORY: 0, PROCESSES: 0}
    for folder in folders:
        for file, key, limit in (
            ("memory.oom_control", "oom_kill", MEMORY),
            ("memory.events", "oom_kill", MEMORY),
            ("pids.events", "max", PROCESSES),
        ):
            for line in _read(os.path.join(folder, file)).splitlines():
                word, _, number = line.partition(" ")
                if word == key and number.isdigit():
                    counts[limit] += int(number)
    return counts


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
