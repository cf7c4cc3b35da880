"""Python functions as tools: async functions are awaited, plain functions run in a thread and may block.

A function with a parameter named `sample` gets the sample of the attempt; the model does not see that parameter.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

from slime.agent.tools.schemas import Schema, find_mismatch, function_schema
from slime.agent.tools.tool import Tool, ToolFailure, ToolLimits, ToolOutcome
from slime.data.json_samples import to_json
from slime.errors import UserError
from slime.storage.json_types import JsonObject

SAMPLE = "sample"
sample_here: ContextVar[object] = ContextVar("sample_here", default=None)
"""The sample of the attempt that makes the call."""


class FunctionTool:
    """One function as a tool; name, description and parameters are the function's own unless they are given."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout_s: float = 30.0,
        concurrency: int = 64,
        max_result_chars: int = 8192,
    ) -> None:
        if not callable(function):
            raise UserError(f"a tool is a function, not {function!r:.80}")
        given = name or getattr(function, "__name__", None)
        if given is None or given == "<lambda>":
            raise UserError("a tool needs a name: give FunctionTool(function, name=...)")
        self.name: str = given
        self.limits = ToolLimits(timeout_s, concurrency, max_result_chars)
        self._function = function
        self._wants_sample = SAMPLE in inspect.signature(function).parameters
        self._is_async = _is_async(function)
        self.schema: Schema = function_schema(function, name=self.name, hidden=(SAMPLE,))
        if description is not None:
            self.schema["function"]["description"] = description

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[Tool]]:
        """Open the tool for an attempt; a function has no state per attempt."""
        yield (self,)

    async def aclose(self) -> None:
        """Do nothing: a function tool starts nothing."""

    async def call(self, arguments: JsonObject) -> str:
        reason = find_mismatch(arguments, self.schema["function"]["parameters"])
        if reason is not None:
            raise ToolFailure(ToolOutcome.BAD_ARGUMENTS, reason)
        given = {**arguments, SAMPLE: sample_here.get()} if self._wants_sample else arguments
        if self._is_async:
            return as_text(await self._function(**given))
        return as_text(await asyncio.to_thread(self._function, **given))


def as_text(value: object) -> str:
    """Convert a function's result to the text for the model: text unchanged, anything else as JSON if possible."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, Mapping | Sequence | bool) and not isinstance(value, bytes):
        return json.dumps(to_json(value, "a tool's result"), ensure_ascii=False)
    return str(value)


def _is_async(function: Callable[..., object]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
