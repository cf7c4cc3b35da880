"""Two ways to the same samples: our own loop, and a program that speaks OpenAI's API.

`--custom-generate-function-path examples/retool/generate.py:generate` (or `:as_client`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openai_client import run_as_client

from slime.agent.tools import PythonInterpreter, ToolEnvironment, run_with_tools
from slime.data.sample import Sample

environment = ToolEnvironment([PythonInterpreter(timeout_s=5.0, memory_mb=256, max_result_chars=40)])


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Ask, run what the model calls, tell it, until it calls nothing."""
    return await run_with_tools(args, sample, sampling_params, environment)


async def as_client(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """The same as any agent would do it, that knows a base URL and a key."""
    return await run_as_client(args, sample, sampling_params, environment)
