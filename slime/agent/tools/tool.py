"""A tool as an environment calls it, and what brings tools along.

A `ToolProvider` lives as long as its environment and opens its tools anew for every attempt: what a tool keeps (the
variables of an interpreter) belongs to one attempt, what is shared (a pool of processes, a connection) to the provider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol


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
