"""Small helpers, under the import path of slime plugins."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from typing import Any

from slime.cluster.ports import free_range
from slime.cluster.ports import host_address as get_current_node_ip
from slime.rollout.sglang_rollout import load_function

__all__ = [
    "SingletonMeta",
    "exec_command",
    "get_current_node_ip",
    "get_free_port",
    "group_by",
    "load_function",
    "should_run_periodic_action",
]


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run a shell command; return its output if captured. Raises if it fails."""
    done = subprocess.run(cmd, shell=True, executable="/bin/bash", check=True, capture_output=capture_output, text=True)
    return done.stdout if capture_output else None


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """Return the first port from `start_port` on that starts `consecutive` free ports."""
    return free_range(start_port, consecutive)


def should_run_periodic_action(
    rollout_id: int, interval: int | None, num_rollout_per_epoch: int | None = None, num_rollout: int | None = None
) -> bool:
    """Return True if a rollout is the last one, or ends an interval or an epoch; always False without an interval."""
    if interval is None:
        return False
    step = rollout_id + 1
    ends = (step % count == 0 for count in (interval, num_rollout_per_epoch) if count is not None)
    return step == num_rollout or any(ends)


def group_by(iterable: Iterable[Any], key: Callable[[Any], Any] | None = None) -> dict[Any, list[Any]]:
    """Group items by their key (default: the item itself), in the order of first occurrence."""
    groups: dict[Any, list[Any]] = {}
    for item in iterable:
        groups.setdefault(item if key is None else key(item), []).append(item)
    return groups


class SingletonMeta(type):
    """Metaclass of singletons; the arguments of later calls are ignored."""

    _instance: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_instance" not in cls.__dict__:
            cls._instance = super().__call__(*args, **kwargs)
        return cls._instance

    def clear_instances(cls) -> None:
        """Discard the instance; the next call makes a new one."""
        if "_instance" in cls.__dict__:
            del cls._instance
