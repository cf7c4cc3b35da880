"""Metrics that plugins log by themselves, on their way to the record of the run they are in.

Invariant: what is handed on is plain, numbers and texts by name; a value that is neither is left out, with one warning
for each name. In a process where no run calls plugins there is no record, and a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

Record = Callable[[dict[str, Any], str], None]
"""Takes metrics, and the name of the one among them that is their step."""

RESERVED = frozenset({"kind", "step", "rollout_id", "time"})
"""What every record has already."""

_records: list[Record] = []  # of what runs in this process, the newest last
_warned: set[str] = set()


@contextmanager
def logged_to(record: Record) -> Iterator[None]:
    """While this lasts, what plugins of this process log goes to `record`, from whatever thread."""
    _records.append(record)
    try:
        yield
    finally:
        _records.remove(record)


def log_metrics(metrics: Mapping[str, Any], step_key: str) -> None:
    """Hand a plugin's metrics to the newest record."""
    if not _records:
        _warn_once("", "no run calls plugins in this process: the metrics %s are logged nowhere", list(metrics))
        return
    _records[-1](_plain(metrics, RESERVED - {step_key}), step_key)


def _plain(metrics: Mapping[str, Any], taken: frozenset[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if value is not None and not isinstance(value, bool | int | float | str):
            value = _only_item(value)
            if value is None:
                kind = type(metrics[name]).__name__
                _warn_once(str(name), "the metric %s is a %s and not logged: log numbers and texts", name, kind)
                continue
        found[f"plugin/{name}" if name in taken else str(name)] = value
    return found


def _only_item(value: Any) -> Any:
    """The number in an array or tensor of one; None for everything else."""
    sizes = [getattr(value, name, None) for name in ("size", "numel")]  # an array has a size, a tensor a numel()
    if any((size() if callable(size) else size) == 1 for size in sizes if size is not None):
        return value.item()
    return None


def _warn_once(about: str, message: str, *values: Any) -> None:
    if about not in _warned:
        _warned.add(about)
        logger.warning(message, *values)
