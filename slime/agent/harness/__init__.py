"""Agent programs: how each is installed, told where its model is, started, waited for, and what is kept of it."""

from slime.agent.harness.base import BaseHarness, HarnessContext
from slime.agent.harness.claude_code import ClaudeCodeHarness
from slime.agent.harness.codex import CodexHarness
from slime.agent.harness.command import CommandHarness
from slime.agent.harness.mini_swe_agent import MiniSweAgentHarness
from slime.agent.harness.opencode import OpenCodeHarness
from slime.agent.harness.packages import install_node22, install_npm_cli
from slime.agent.harness.qwen_code import QwenCodeHarness
from slime.agent.harness.result import CliCrashed, CliMissing, CliTimedOut, HarnessFailed, HarnessResult
from slime.agent.harness.run import make_harness, run_agent

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
