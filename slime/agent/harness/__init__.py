"""Harnesses of agent programs: install, configure, start and wait for a program, and collect its result."""

from slime.agent.harness.base import BaseHarness, CommandHarness, HarnessContext
from slime.agent.harness.chat_completions_clis import MiniSweAgentHarness, OpenCodeHarness, QwenCodeHarness
from slime.agent.harness.claude_code import ClaudeCodeHarness
from slime.agent.harness.codex import CodexHarness
from slime.agent.harness.packages import (
    CliCrashed,
    CliMissing,
    CliTimedOut,
    HarnessFailed,
    HarnessResult,
    install_node22,
    install_npm_cli,
)
from slime.agent.harness.registry import make_harness, run_agent

__all__ = [
    "BaseHarness",
    "ClaudeCodeHarness",
    "CliCrashed",
    "CliMissing",
    "CliTimedOut",
    "CodexHarness",
    "CommandHarness",
    "HarnessContext",
    "HarnessFailed",
    "HarnessResult",
    "MiniSweAgentHarness",
    "OpenCodeHarness",
    "QwenCodeHarness",
    "install_node22",
    "install_npm_cli",
    "make_harness",
    "run_agent",
]
