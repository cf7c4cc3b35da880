"""The registry of harnesses, and a function that runs an agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.agent.harness.base import BaseHarness, CommandHarness, HarnessContext
from slime.agent.harness.chat_completions_clis import MiniSweAgentHarness, OpenCodeHarness, QwenCodeHarness
from slime.agent.harness.claude_code import ClaudeCodeHarness
from slime.agent.harness.codex import CodexHarness
from slime.agent.harness.packages import HarnessResult
from slime.agent.sandbox import Sandbox
from slime.errors import UserError

HARNESSES: dict[str, type[BaseHarness]] = {
    harness.name: harness
    for harness in (ClaudeCodeHarness, CodexHarness, OpenCodeHarness, QwenCodeHarness, MiniSweAgentHarness)
}


def make_harness(name: str, *, command: Sequence[str] | None = None, **settings: Any) -> BaseHarness:
    """Create a harness by name; `command` is the argument list of the harness named "command"."""
    if name == CommandHarness.name:
        if not command:
            raise UserError("the agent 'command' needs a command: give its arguments as a list")
        return CommandHarness(command, **settings)
    if name not in HARNESSES:
        known = ", ".join([*HARNESSES, CommandHarness.name])
        raise UserError(f"there is no agent {name!r}: choose one of {known}")
    return HARNESSES[name](**settings)


async def run_agent(
    harness: BaseHarness | str,
    sb: Sandbox,
    *,
    workdir: str,
    session_id: str,
    adapter_url: str,
    time_budget_sec: int,
    prompt: str,
    model_label: str = "slime-actor",
) -> HarnessResult:
    """Run an agent in a sandbox to its end and return its result."""
    agent = make_harness(harness) if isinstance(harness, str) else harness
    context = HarnessContext(workdir, session_id, adapter_url, model_label)
    return await agent.work(sb, context, prompt=prompt, time_budget_sec=time_budget_sec)
