"""What happened to a sample and when: a dict of plain values at `sample.trace`, which goes wherever the sample goes.

    {"version": 1, "trace_id", "sample_id", "group_id", "attempt", "events": [...]}
    event: {"type": "span_start" | "span_end" | "event", "name", "ts", "trace_id", "sample_id", "group_id", "attempt"}
           and "span_id", "parent_span_id", "attrs" where there are such

Invariant: tracing changes nothing but `trace`. Whatever goes wrong in it ends with the call: the first time it is
logged with its traceback, afterwards it is counted (`failures`). A target is a sample, a trace, or a list of such.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from copy import deepcopy
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

logger = logging.getLogger(__name__)

VERSION = 1
TARGET_NAMES = ("sample", "samples", "group")
"""Parameters in which the target of a traced function is looked for."""

Trace = dict[str, Any]
_P = ParamSpec("_P")
_T = TypeVar("_T")
_open: ContextVar[Mapping[str, str] | None] = ContextVar("open_spans", default=None)
"""The innermost open span of each trace, in this task or thread."""


class Failures:
    """How often tracing went wrong in this process."""

    count = 0

    def note(self, where: str) -> None:
        """Call it while the exception is handled."""
        if self.count == 0:
            logger.warning("tracing failed in %s; the samples go on, and further failures are counted", where)
        logger.debug("tracing failed in %s", where, exc_info=True)
        self.count += 1


failures = Failures()


def _quiet(function: Callable[_P, _T]) -> Callable[_P, _T | None]:
    @functools.wraps(function)
    def quiet(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            return function(*args, **kwargs)
        except Exception:  # noqa: BLE001  (a trace is never worth a sample)
            failures.note(function.__name__)
            return None

    return quiet


# traces of targets


def traces_of(target: Any) -> list[Trace]:
    """The traces of a target, made where there is none yet."""
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
        yield _trace_of_sample(target)


def _trace_of_sample(sample: Any) -> Trace:
    held = vars(sample).get("trace")
    if held is None:
        held = sample.trace = {
            "version": VERSION,
            "trace_id": uuid.uuid4().hex,
            "sample_id": None,
            "group_id": None,
            "attempt": 0,
            "events": [],
        }
    trace = _checked(held)
    for key, value in (("sample_id", sample.index), ("group_id", sample.group_index)):
        if trace[key] is None:
            trace[key] = value
    return trace


def _checked(trace: Any) -> Trace:
    wanted = {"version", "trace_id", "sample_id", "group_id", "attempt", "events"}
    if not isinstance(trace, dict) or not wanted <= trace.keys() or not isinstance(trace["events"], list):
        raise ValueError(f"a trace is a dict with {', '.join(sorted(wanted))}, not {trace!r:.80}")
    if trace["version"] != VERSION:
        raise ValueError(f"a trace of version {trace['version']!r} cannot be read: this is version {VERSION}")
    return trace


@_quiet
def bind_trace(target: Any, **attrs: Any) -> Trace | None:
    """The trace of a target (of a list: its first one's), made if need be; `attrs` become an event `bind`."""
    traces = traces_of(target)
    if attrs:
        _append(traces, "event", "bind", attrs)
    return traces[0] if traces else None


@_quiet
def export_trace(target: Any) -> Trace | None:
    """A copy of the trace as plain values, to be sent elsewhere; None for a sample without one."""
    held = target if isinstance(target, dict) else vars(target).get("trace")
    return None if held is None else deepcopy(_checked(held))


@_quiet
def import_trace(target: Any, trace: Mapping[str, Any] | None = None) -> Trace | None:
    """Give a sample the trace that came from elsewhere: of its own, the events it has not yet; else all of it.

    Without a sample (`import_trace(trace)`) the copy itself is a target.
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
def trace_next_attempt(target: Any) -> None:
    """What follows belongs to another attempt at the sample."""
    for trace in traces_of(target):
        trace["attempt"] += 1


# events and spans


@_quiet
def trace_event(target: Any, name: str, attrs: Mapping[str, Any] | None = None) -> None:
    """Something that happened at this moment."""
    _append(traces_of(target), "event", name, attrs)


class Span:
    """A stretch of time in the traces of a target; what `update` and `set` add stands at its end."""

    def __init__(self, target: Any, name: str, attrs: Mapping[str, Any] | None = None) -> None:
        self._target, self._name, self._first = target, name, attrs
        self._attrs: dict[str, Any] = {}
        self._traces: list[Trace] = []
        self._ids: dict[str, str] = {}
        self._outer: Mapping[str, str] | None = None

    def update(self, attrs: Mapping[str, Any] | None = None, **more: Any) -> Self:
        self._attrs |= {**(attrs or {}), **more}
        return self

    def set(self, key: str, value: Any) -> Self:
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


def trace_span(target: Any, name: str, attrs: Mapping[str, Any] | None = None) -> Span:
    """`with trace_span(sample, "tool", attrs={...}) as span: ...; span.set("exit_code", 0)`."""
    return Span(target, name, attrs)


def trace_function(
    name: str,
    target: Any = None,
    target_getter: Callable[..., Any] | None = None,
    attrs_getter: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: every call of the function, plain or async, is a span.

    Of which sample: `target`, an object or the name of a parameter; or what `target_getter` says, which gets the call's
    arguments, as `attrs_getter` does; else the parameter `sample`, `samples` or `group`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @_quiet
        def described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            attrs = None if attrs_getter is None else attrs_getter(*args, **kwargs)
            if target_getter is not None:
                return target_getter(*args, **kwargs), attrs
            given = signature.bind_partial(*args, **kwargs).arguments
            names = (target,) if isinstance(target, str) else TARGET_NAMES
            found = target if target is not None and not isinstance(target, str) else None
            return next((given[key] for key in names if key in given), found) if found is None else found, attrs

        def span(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Span:
            of, attrs = described(args, kwargs) or (None, None)
            return Span(of, name, attrs)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def traced_async(*args: Any, **kwargs: Any) -> Any:
                with span(args, kwargs):
                    return await function(*args, **kwargs)

            return traced_async

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with span(args, kwargs):
                return function(*args, **kwargs)

        return traced

    return decorate


def _append(
    traces: list[Trace],
    kind: str,
    name: str,
    attrs: Mapping[str, Any] | None,
    span_ids: Mapping[str, str] | None = None,
    outer: Mapping[str, str] | None = None,
) -> None:
    now = time.time()
    parents = (_open.get() if span_ids is None else outer) or {}
    plain = {str(key): _plain(value) for key, value in (attrs or {}).items()}
    for trace in traces:
        known = ("trace_id", "sample_id", "group_id", "attempt")
        event: dict[str, Any] = {"type": kind, "name": str(name), "ts": now, **{key: trace[key] for key in known}}
        if span_ids is not None:
            event["span_id"] = span_ids[trace["trace_id"]]
        if trace["trace_id"] in parents:
            event["parent_span_id"] = parents[trace["trace_id"]]
        if plain:
            event["attrs"] = plain
        trace["events"].append(event)


def _plain(value: Any) -> Any:
    """What JSON can hold; anything else as text, so that a trace never keeps a sample out of a file."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return str(value)


# what an engine's answer says about itself

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


def build_sglang_meta_trace_attrs(meta_info: Mapping[str, Any] | None) -> dict[str, Any]:
    """The counts and times in the `meta_info` of a `/generate` answer, and why it ended."""
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
