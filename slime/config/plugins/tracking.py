"""Forwarding of metrics that plugins log to the metrics record of their run.

Invariant: forwarded metrics are numbers and texts by name; any other value is dropped, with one warning per name. In a
process where no run calls plugins there is no record, and a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slime.storage.json_types import JsonMapping, JsonObject

logger = logging.getLogger(__name__)

Record = Callable[[JsonObject, str], None]
"""Records metrics; the second argument names the metric that is their step."""

RESERVED = frozenset({"kind", "step", "rollout_id", "time"})
"""Names that every record already has."""

_records: list[Record] = []  # of the runs of this process, the newest last
_warned: set[str] = set()


@contextmanager
def forward_metrics_to(record: Record) -> Iterator[None]:
    """Send the metrics that plugins of this process log, from any thread, to `record` during the context."""
    _records.append(record)
    try:
        yield
    finally:
        _records.remove(record)


def log_metrics(metrics: JsonMapping, step_key: str) -> None:
    """Forward a plugin's metrics to the newest record."""
    if not _records:
        _warn_once("", "no run calls plugins in this process: the metrics %s are not logged", list(metrics))
        return
    record, reserved = _records[-1], RESERVED - {step_key}
    plain: JsonObject = {}
    for name, value in metrics.items():
        if value is not None and not isinstance(value, bool | int | float | str):
            sizes = [getattr(value, attribute, None) for attribute in ("size", "numel")]  # of an array, of a tensor
            is_single = any((size() if callable(size) else size) == 1 for size in sizes if size is not None)
            value = value.item() if is_single else None
            if value is None:
                kind = type(metrics[name]).__name__
                _warn_once(str(name), "the metric %s is a %s and not logged: log numbers and texts", name, kind)
                continue
        plain[f"plugin/{name}" if name in reserved else str(name)] = value
    record(plain, step_key)


def _warn_once(about: str, message: str, *values: object) -> None:
    if about not in _warned:
        _warned.add(about)
        logger.warning(message, *values)
