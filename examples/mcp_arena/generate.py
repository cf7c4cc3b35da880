"""Attempts with the tools of an MCP server: `--custom-generate-function-path examples/mcp_arena/generate.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from slime.agent.tools import McpServer, ToolEnvironment, run_with_tools
from slime.data.sample import Sample

SERVER = Path(__file__).resolve().with_name("server.py")
environment = ToolEnvironment([McpServer.stdio([sys.executable, str(SERVER)], name="travel")])


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Ask, have the server run what the model calls, tell it, until it calls nothing."""
    return await run_with_tools(args, sample, sampling_params, environment)
