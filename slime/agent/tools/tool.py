"""A tool as an environment calls it, and what brings tools along.

A `ToolProvider` lives as long as its environment and opens its tools anew for every attempt: what a tool keeps (the
variables of an interpreter) belongs to one attempt, what is shared (a pool of processes, a connection) to the provider.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from slime.agent.messages import Message, ToolCall


@dataclass(frozen=True)
class ToolLimits:
    """What one tool may take: seconds for a call, calls at once over all samples, characters of a result."""

    timeout_s: float = 30.0
    concurrency: int = 64
    max_result_chars: int = 8192


class Tool(Protocol):
    """Something that a model can call."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """In OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
        ...

    @property
    def limits(self) -> ToolLimits: ...

    async def call(self, arguments: dict[str, Any]) -> str:
        """What the model gets to read. Raises `ToolFailure`; anything else that it raises is the outcome `error`."""
        ...


class ToolProvider(Protocol):
    """What an environment is made of."""

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """The tools of one attempt, for as long as it lasts."""
        ...

    async def aclose(self) -> None:
        """End what the provider started; it may be opened again afterwards."""
        ...


# What becomes of a tool call: one of these, always with a text that the model can read.
#
# Invariant: no failure of a tool ends more than its call. Whose fault it was is in the outcome; how often each came is
# counted (`ToolCounts`), and a run shows it as `agent/tool_*`.


class ToolOutcome(StrEnum):
    """How a call ended."""

    OK = "ok"
    ERROR = "error"
    """The tool ran and says that it failed: the function or the model's code raised."""
    BAD_ARGUMENTS = "bad_arguments"
    UNKNOWN_TOOL = "unknown_tool"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    """The process or the connection behind the tool is gone, or could not be had."""
    TOO_MUCH_OUTPUT = "too_much_output"
    REFUSED = "refused"
    """It was not run: no more calls are allowed, or the tool will not do this."""


class ToolFailure(Exception):
    """Raised by a tool: the call ends with this outcome, and the model reads the text."""

    def __init__(self, outcome: ToolOutcome, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome
        self.text = text


class ToolError(ToolFailure):
    """For functions of users: `raise ToolError("there is no city of that name")` tells the model just that."""

    def __init__(self, text: str) -> None:
        super().__init__(ToolOutcome.ERROR, text)


class ToolRefusal(ToolFailure):
    """For functions of users that will not do what they are asked for."""

    def __init__(self, text: str) -> None:
        super().__init__(ToolOutcome.REFUSED, text)


@dataclass(frozen=True)
class ToolResult:
    """One call with its outcome; `text` is what the model gets to read, `cut` how many characters it does not."""

    call: ToolCall
    outcome: ToolOutcome
    text: str
    seconds: float = 0.0
    cut: int = 0

    @property
    def message(self) -> Message:
        """The answer as the conversation goes on with it."""
        return Message("tool", self.text, tool_call_id=self.call.id, name=self.call.name)


@dataclass
class ToolCounts:
    """What the calls of one attempt came to."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    cut_results: int = 0

    def add(self, result: ToolResult) -> None:
        self.outcomes[result.outcome.value] += 1
        self.seconds += result.seconds
        self.cut_results += result.cut > 0

    def to_metadata(self) -> dict[str, float]:
        """For `sample.metadata["tool_calls"]`, of which a run makes `agent/tool_*`."""
        counts = {"calls": self.outcomes.total(), **self.outcomes, "seconds": self.seconds}
        return {name: float(value) for name, value in counts.items()} | (
            {"cut_results": float(self.cut_results)} if self.cut_results else {}
        )


def bounded(text: str, limit: int) -> tuple[str, int]:
    """The text, or its head and its tail around a note of how much is left out; and how many characters that is."""
    if len(text) <= limit:
        return text, 0
    note = f"\n... [{len(text) - limit} characters left out] ...\n"
    head = (limit + 1) // 2
    tail = limit - head
    return text[:head] + note + text[len(text) - tail :], len(text) - limit
