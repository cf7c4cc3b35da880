"""Per-sample event traces: a dict of plain values in `sample.trace`, which is stored and sent with the sample.

    {"version": 1, "trace_id", "sample_id", "group_id", "attempt", "events": [...]}
    event: {"type": "span_start" | "span_end" | "event", "name", "ts", "trace_id", "sample_id", "group_id", "attempt"}
           and optionally "span_id", "parent_span_id", "attrs"

Invariant: tracing changes nothing but `trace`, and its errors never reach the caller: the first one is logged with its
traceback, later ones are counted (`failures`). A target is a sample, a trace, or a list of these.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from copy import deepcopy
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast

from slime.storage.json_types import JsonMapping, JsonObject

logger = logging.getLogger(__name__)

VERSION = 1
TARGET_NAMES = ("sample", "samples", "group")
"""Parameter names that are searched for the target of a traced function."""

Trace = JsonObject
_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., object])
_open: ContextVar[Mapping[str, str] | None] = ContextVar("open_spans", default=None)
"""The innermost open span of each trace, in this task or thread."""


class TracingErrors:
    """Counter of tracing errors in this process."""

    count = 0

    def note(self, where: str) -> None:
        """Count an error and log the first one; call it from an exception handler."""
        if self.count == 0:
            logger.warning("tracing failed in %s; samples are not affected, and later failures are only counted", where)
        logger.debug("tracing failed in %s", where, exc_info=True)
        self.count += 1


failures = TracingErrors()


def _quiet(function: Callable[_P, _T]) -> Callable[_P, _T | None]:
    @functools.wraps(function)
    def quiet(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            return function(*args, **kwargs)
        except Exception:  # noqa: BLE001  (a tracing error must not fail a sample)
            failures.note(function.__name__)
            return None

    return quiet


def traces_of(target: object) -> list[Trace]:
    """Return the traces of a target; samples without one get a new trace."""
    return list(_traces(target))


def _traces(target: Any) -> Iterator[Trace]:
    if target is None:
        return
    if isinstance(target, list | tuple):
        for one in target:
            yield from _traces(one)
    elif isinstance(target, dict):
        yield _checked(target)
    else:
        held = vars(target).get("trace")
        if held is None:
            held = target.trace = {
                "version": VERSION,
                "trace_id": uuid.uuid4().hex,
                "sample_id": None,
                "group_id": None,
                "attempt": 0,
                "events": [],
            }
        trace = _checked(held)
        for key, value in (("sample_id", target.index), ("group_id", target.group_index)):
            if trace[key] is None:
                trace[key] = value
        yield trace


def _checked(trace: object) -> Trace:
    wanted = {"version", "trace_id", "sample_id", "group_id", "attempt", "events"}
    if not isinstance(trace, dict) or not wanted <= trace.keys() or not isinstance(trace["events"], list):
        raise ValueError(f"a trace is a dict with {', '.join(sorted(wanted))}, not {trace!r:.80}")
    if trace["version"] != VERSION:
        raise ValueError(f"a trace of version {trace['version']!r} cannot be read: this is version {VERSION}")
    return trace


@_quiet
def bind_trace(target: object, **attrs: object) -> Trace | None:
    """Return the (first) trace of a target, created if absent; `attrs` are recorded as an event `bind`."""
    traces = traces_of(target)
    if attrs:
        _append(traces, "event", "bind", attrs)
    return traces[0] if traces else None


@_quiet
def export_trace(target: object) -> Trace | None:
    """Return a copy of the trace as plain values, to send elsewhere; None for a sample without one."""
    held = target if isinstance(target, dict) else vars(target).get("trace")
    return None if held is None else deepcopy(_checked(held))


@_quiet
def import_trace(target: Any, trace: JsonMapping | None = None) -> Trace | None:
    """Merge an exported trace into a sample: missing events if the trace id is the sample's, else the whole trace.

    `import_trace(trace)`, without a sample, returns a copy that is itself a valid target.
    """
    if trace is None:
        return deepcopy(_checked(target))
    given = deepcopy(_checked(dict(trace)))
    held = vars(target).get("trace")
    if held is None or _checked(held)["trace_id"] != given["trace_id"]:
        target.trace = given
        return given
    held["events"] += [event for event in given["events"] if event not in held["events"]]
    held["events"].sort(key=lambda event: event["ts"])
    held["attempt"] = max(held["attempt"], given["attempt"])
    return _checked(held)


@_quiet
def trace_next_attempt(target: object) -> None:
    """Start the next attempt at the sample: later events carry its number."""
    for trace in traces_of(target):
        trace["attempt"] += 1


@_quiet
def trace_event(target: object, name: str, attrs: JsonMapping | None = None) -> None:
    """Record an event at the current time."""
    _append(traces_of(target), "event", name, attrs)


class TraceSpan:
    """Context manager that records a span in the traces of a target.

    Attributes added with `update` and `set` are recorded with the end of the span.
    """

    def __init__(self, target: object, name: str, attrs: JsonMapping | None = None) -> None:
        self._target, self._name, self._first = target, name, attrs
        self._attrs: JsonObject = {}
        self._traces: list[Trace] = []
        self._ids: dict[str, str] = {}
        self._outer: Mapping[str, str] | None = None

    def update(self, attrs: JsonMapping | None = None, **more: object) -> Self:
        self._attrs |= {**(attrs or {}), **more}
        return self

    def set(self, key: str, value: object) -> Self:
        self._attrs[key] = value
        return self

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    @_quiet
    def _begin(self) -> None:
        self._outer = _open.get()
        self._traces = traces_of(self._target)
        self._ids = {trace["trace_id"]: uuid.uuid4().hex[:16] for trace in self._traces}
        _append(self._traces, "span_start", self._name, self._first, self._ids, self._outer)
        _open.set({**(self._outer or {}), **self._ids})

    @_quiet
    def _end(self, error: BaseException | None) -> None:
        if self._ids:
            _open.set(self._outer)
        attrs = self._attrs if error is None else {**self._attrs, "error": f"{type(error).__name__}: {error}"}
        _append(self._traces, "span_end", self._name, attrs, self._ids, self._outer)


def trace_span(target: object, name: str, attrs: JsonMapping | None = None) -> TraceSpan:
    """Record a span: `with trace_span(sample, "tool", attrs={...}) as span: ...; span.set("exit_code", 0)`."""
    return TraceSpan(target, name, attrs)


def trace_function(
    name: str,
    target: object = None,
    target_getter: Callable[..., object] | None = None,
    attrs_getter: Callable[..., JsonMapping | None] | None = None,
) -> Callable[[_F], _F]:
    """Return a decorator that records each call of a sync or async function as a span.

    The span's target is `target` (an object or a parameter name), or the result of `target_getter`, or the parameter
    `sample`, `samples` or `group`. `target_getter` and `attrs_getter` receive the arguments of the call.
    """

    def decorate(function: _F) -> _F:
        signature = inspect.signature(function)

        @_quiet
        def described(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[object, JsonMapping | None]:
            attrs = None if attrs_getter is None else attrs_getter(*args, **kwargs)
            if target_getter is not None:
                return target_getter(*args, **kwargs), attrs
            given = signature.bind_partial(*args, **kwargs).arguments
            names = (target,) if isinstance(target, str) else TARGET_NAMES
            found = target if target is not None and not isinstance(target, str) else None
            return next((given[key] for key in names if key in given), found) if found is None else found, attrs

        def span(args: tuple[object, ...], kwargs: dict[str, object]) -> TraceSpan:
            of, attrs = described(args, kwargs) or (None, None)
            return TraceSpan(of, name, attrs)

        if inspect.iscoroutinefunction(function):
            coroutine_function: Callable[..., Awaitable[object]] = function

            @functools.wraps(function)
            async def traced_async(*args: object, **kwargs: object) -> object:
                with span(args, kwargs):
                    return await coroutine_function(*args, **kwargs)

            return cast(_F, traced_async)

        @functools.wraps(function)
        def traced(*args: object, **kwargs: object) -> object:
            with span(args, kwargs):
                return function(*args, **kwargs)

        return cast(_F, traced)

    return decorate


def _append(
    traces: list[Trace],
    kind: str,
    name: str,
    attrs: JsonMapping | None,
    span_ids: Mapping[str, str] | None = None,
    outer: Mapping[str, str] | None = None,
) -> None:
    now = time.time()
    parents = (_open.get() if span_ids is None else outer) or {}
    plain = {str(key): _plain(value) for key, value in (attrs or {}).items()}
    for trace in traces:
        known = ("trace_id", "sample_id", "group_id", "attempt")
        event: JsonObject = {"type": kind, "name": str(name), "ts": now, **{key: trace[key] for key in known}}
        if span_ids is not None:
            event["span_id"] = span_ids[trace["trace_id"]]
        if trace["trace_id"] in parents:
            event["parent_span_id"] = parents[trace["trace_id"]]
        if plain:
            event["attrs"] = plain
        trace["events"].append(event)


def _plain(value: object) -> object:
    """Convert a value to JSON types; other types become text, so that a trace can always be saved."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return str(value)


_OF_AN_ANSWER = (
    "id",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "weight_version",
    "e2e_latency",
    "queue_time",
    "decode_throughput",
)
_FAMILIES = ("spec_", "pd_")


def build_sglang_meta_trace_attrs(meta_info: JsonMapping | None) -> JsonObject:
    """Extract token counts, times and the finish reason from the `meta_info` of a `/generate` response."""
    given = meta_info or {}
    attrs = {
        key: _plain(value)
        for key, value in given.items()
        if (key in _OF_AN_ANSWER or str(key).startswith(_FAMILIES)) and not isinstance(value, list | dict)
    }
    reason = given.get("finish_reason")
    if reason is not None:
        attrs["finish_reason"] = str(reason.get("type") if isinstance(reason, Mapping) else reason)
    return attrs
