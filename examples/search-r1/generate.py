"""Two ways to the same samples: our own loop, and a program that speaks OpenAI's API.

`--custom-generate-function-path examples/search-r1/generate.py:generate` (or `:as_client`), with the address of the
retrieval server as `search_url` in the file of `--custom-config-path`.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openai_client import run_as_client

from slime.agent.tools import FunctionTool, ToolEnvironment, run_with_tools
from slime.data.sample import Sample

TOP = 1
"""Passages a search: a tiny model reads little."""


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Ask, search what the model wants to know, tell it, until it answers."""
    return await run_with_tools(args, sample, sampling_params, environment(args.search_url))


async def as_client(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """The same as any agent would do it, that knows a base URL and a key."""
    return await run_as_client(args, sample, sampling_params, environment(args.search_url))


@functools.cache
def environment(url: str) -> ToolEnvironment:
    """One tool, `search`, that asks the retrieval server at `url`."""

    async def search(query: str) -> str:
        """Finds passages.

        Args:
            query: words of what you look for
        """
        asked = {"queries": [query], "topk": TOP}
        async with aiohttp.ClientSession() as session, session.post(url, json=asked) as response:
            response.raise_for_status()
            [found] = (await response.json())["result"]
        return "\n".join(entry["document"]["contents"].partition("\n")[2] for entry in found) or "nothing found"

    return ToolEnvironment([FunctionTool(search, timeout_s=10.0, concurrency=32, max_result_chars=400)])
