"""Protocols of tools and tool providers, and the outcomes, results and counts of calls.

A `ToolProvider` lives as long as its environment and opens its tools for every attempt: the state of a tool (the
variables of an interpreter) belongs to one attempt, shared resources (a pool of processes, a connection) belong to the
provider.

Invariant: a failure of a tool ends its call and nothing else. Every call ends with one `ToolOutcome` and a text for the
model. The outcome says which side failed; the outcomes are counted (`ToolCounts`) and shown by a run as `agent/tool_*`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from slime.agent.messages import Message, ToolCall
from slime.storage.json_types import JsonMapping, JsonObject


@dataclass(frozen=True)
class ToolLimits:
    """Limits of one tool: seconds per call, concurrent calls over all samples, characters of a result."""

    timeout_s: float = 30.0
    concurrency: int = 64
    max_result_chars: int = 8192


class Tool(Protocol):
    """A tool that a model can call."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> JsonMapping:
        """The schema in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
        ...

    @property
    def limits(self) -> ToolLimits: ...

    async def call(self, arguments: JsonObject) -> str:
        """Run the tool and return the text for the model.

        Raises `ToolFailure`; any other exception is the outcome `error`.
        """
        ...


class ToolProvider(Protocol):
    """A source of tools for an environment: a function, an interpreter, an MCP server."""

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """Open the tools of one attempt for its duration."""
        ...

    async def aclose(self) -> None:
        """Stop everything that the provider started; it may be opened again afterwards."""
        ...


class ToolOutcome(StrEnum):
    """The outcome of a call."""

    OK = "ok"
    ERROR = "error"
    """The tool ran and reported a failure: the function or the model's code raised."""
    BAD_ARGUMENTS = "bad_arguments"
    UNKNOWN_TOOL = "unknown_tool"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    """The process or connection behind the tool died, or could not be started."""
    TOO_MUCH_OUTPUT = "too_much_output"
    REFUSED = "refused"
    """The tool did not run: the limit of calls is reached, or the tool refuses this call."""


class ToolFailure(Exception):
    """Raised by a tool to end the call with an outcome and a text for the model."""

    def __init__(self, outcome: ToolOutcome, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome
        self.text = text


class ToolError(ToolFailure):
    """Raised by user functions: the model reads exactly the text of `ToolError("there is no city of that name")`."""

    def __init__(self, text: str) -> None:
        super().__init__(ToolOutcome.ERROR, text)


class ToolRefusal(ToolFailure):
    """Raised by user functions that refuse a call."""

    def __init__(self, text: str) -> None:
        super().__init__(ToolOutcome.REFUSED, text)


@dataclass(frozen=True)
class ToolResult:
    """One call with its outcome; `text` is the text for the model, `cut` the number of characters left out of it."""

    call: ToolCall
    outcome: ToolOutcome
    text: str
    seconds: float = 0.0
    cut: int = 0

    @property
    def message(self) -> Message:
        """The result as the tool message of the conversation."""
        return Message("tool", self.text, tool_call_id=self.call.id, name=self.call.name)


@dataclass
class ToolCounts:
    """Counts of the outcomes of one attempt's calls, with their total time."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    cut_results: int = 0

    def add(self, result: ToolResult) -> None:
        self.outcomes[result.outcome.value] += 1
        self.seconds += result.seconds
        self.cut_results += result.cut > 0

    def to_metadata(self) -> dict[str, float]:
        """Return the counts for `sample.metadata["tool_calls"]`, the source of the metrics `agent/tool_*`."""
        counts = {"calls": self.outcomes.total(), **self.outcomes, "seconds": self.seconds}
        return {name: float(value) for name, value in counts.items()} | (
            {"cut_results": float(self.cut_results)} if self.cut_results else {}
        )


def shorten_text(text: str, limit: int) -> tuple[str, int]:
    """Shorten a text to `limit` characters, its head and tail around a note; return it with the characters left out."""
    if len(text) <= limit:
        return text, 0
    note = f"\n... [{len(text) - limit} characters left out] ...\n"
    head = (limit + 1) // 2
    tail = limit - head
    return text[:head] + note + text[len(text) - tail :], len(text) - limit
