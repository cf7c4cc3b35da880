"""Harness of Codex, headless (`codex exec`), which uses OpenAI's Responses API (no chat completions since 0.95)."""

from __future__ import annotations

import json
from typing import Any

from slime.agent.harness.base import BaseHarness, HarnessContext
from slime.agent.harness.packages import Outcome, Package
from slime.storage.json_types import JsonObject

IDLE_TIMEOUT_MS = 900_000
NEVER = 1_000_000_000
"""A number of tokens that no history reaches."""
SMALL_PROMPT = (
    "You are a coding agent in a sandbox. Do the task with the tools, check your work, then say what you did.\n"
)
_END_EVENTS = ("turn.failed", "error", "turn.completed")


class CodexHarness(BaseHarness):
    """Codex without web search and sub-agents; `small_prompt` replaces its 17 KB of instructions by one line."""

    name = "codex"
    package = Package(
        program="codex",
        title="Codex",
        variable="CODEX",
        install="npm install -g @openai/codex",
        natives=("@openai/codex-linux-{arch}/vendor/*/bin/codex", "@openai/codex-darwin-{arch}/vendor/*/bin/codex"),
    )

    def __init__(self, *, small_prompt: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.small_prompt = small_prompt

    def arguments(self, ctx: HarnessContext, prompt: str) -> list[str]:
        unattended = ["--ephemeral", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return ["exec", "--json", *unattended, "-"]

    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        return {"OPENAI_API_KEY": ctx.session_id}

    def files(self, ctx: HarnessContext) -> dict[str, str]:
        """The config.toml of Codex; TOML strings have the same syntax as in JSON."""
        top: JsonObject = {
            "model": ctx.model_label,
            "model_provider": "slime",
            "web_search": "disabled",
            "check_for_update_on_startup": False,
        }
        if self.context_tokens is not None:
            top["model_context_window"] = self.context_tokens
        if not self.compaction:
            top["model_auto_compact_token_limit"] = NEVER
        files = {}
        if self.small_prompt:
            files[".codex/instructions.md"] = SMALL_PROMPT
            top["model_instructions_file"] = "instructions.md"
        provider = {
            "name": "slime",
            "base_url": ctx.openai_url,
            "env_key": "OPENAI_API_KEY",
            "wire_api": "responses",
            "request_max_retries": self.retries,
            "stream_max_retries": self.retries,
            "stream_idle_timeout_ms": IDLE_TIMEOUT_MS,
        }
        off = "[analytics]\nenabled = false\n[features]\ngoals = false\nmulti_agent = false\n"
        files[".codex/config.toml"] = f"{_toml(top)}{off}[model_providers.slime]\n{_toml(provider)}"
        return files

    def verdict(self, exit_code: int, stdout: str, stderr: str) -> tuple[Outcome, str]:
        for line in reversed(stdout.split("\n")):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and event.get("type") in _END_EVENTS:
                if exit_code == 0 and event["type"] == "turn.completed":
                    return "finished", "turn.completed"
                return "failed", f"{event['type']}: {event.get('error') or event.get('message') or ''}"[:500]
        return super().verdict(exit_code, stdout, stderr)


def _toml(values: JsonObject) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
