"""Harness of Claude Code, headless (`claude -p`), which uses Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from slime.agent.harness.base import BaseHarness, HarnessContext
from slime.agent.harness.packages import Outcome, Package

TOOLS = ("Bash", "Edit", "Read", "Write")


class ClaudeCodeHarness(BaseHarness):
    """Claude Code with few tools; `small_prompt` (`--bare`) reduces it to a prompt of 4 KB and Bash, Edit and Read."""

    name = "claude_code"
    package = Package(
        program="claude",
        title="Claude Code",
        variable="CC",
        install="npm install -g @anthropic-ai/claude-code",
    )

    def __init__(self, *, tools: Sequence[str] = TOOLS, small_prompt: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.tools = tuple(tools)
        self.small_prompt = small_prompt

    def arguments(self, ctx: HarnessContext, prompt: str) -> list[str]:
        scope = ["--bare"] if self.small_prompt else ["--tools", ",".join(self.tools)]
        output = ["--output-format", "stream-json", "--verbose"]
        return ["-p", "--dangerously-skip-permissions", *output, *scope]

    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        model = ctx.model_label
        given = {
            "ANTHROPIC_BASE_URL": ctx.base_url,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            "ANTHROPIC_MODEL": model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
            "CLAUDE_CODE_SUBAGENT_MODEL": model,
            "IS_SANDBOX": "1",  # lets root skip the permission prompts
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
            "CLAUDE_CODE_MAX_RETRIES": str(self.retries),
        }
        if self.small_prompt:
            given["ANTHROPIC_API_KEY"] = ctx.session_id
        if not self.compaction:
            given["DISABLE_AUTO_COMPACT"] = "1"
        if self.context_tokens is not None:
            given["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(self.context_tokens)
            if self.compaction:
                given["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(self.context_tokens)
        if self.max_output_tokens is not None:
            given["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(self.max_output_tokens)
        return given

    def verdict(self, exit_code: int, stdout: str, stderr: str) -> tuple[Outcome, str]:
        """Read the result event: `subtype` is success for API errors too, so `is_error` counts."""
        for line in reversed(stdout.split("\n")):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and event.get("type") == "result":
                reason = str(event.get("terminal_reason") or event.get("subtype") or "")
                if exit_code == 0 and not event.get("is_error"):
                    return "finished", reason
                return "failed", f"{reason}: {event.get('result', '')}"[:500]
        return super().verdict(exit_code, stdout, stderr)
