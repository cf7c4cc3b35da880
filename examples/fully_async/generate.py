"""`--custom-generate-function-path examples/fully_async/generate.py:generate`: an agent that reads notes."""

from __future__ import annotations

import asyncio
from typing import Any

from slime.agent.tools import FunctionTool, ToolEnvironment, ToolError, run_with_tools
from slime.data.sample import Sample


async def read(note: str, sample: Sample) -> str:
    """Read a note of the sample's task; it takes as long as the task says."""
    notes = sample.metadata["notes"]
    if note not in notes:
        raise ToolError(f"no note {note}")
    await asyncio.sleep(sample.metadata["read_s"])
    return str(notes[note])


environment = ToolEnvironment([FunctionTool(read, concurrency=4096)])
"""Whoever waits for a note keeps nobody else from reading one."""


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Ask, read what the model wants to read, tell it, until it wants nothing."""
    return await run_with_tools(args, sample, sampling_params, environment)
