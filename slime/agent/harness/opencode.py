"""opencode, headless (`opencode run`), through OpenAI's chat completions."""

from __future__ import annotations

import json
from typing import Any

from slime.agent.harness.base import BaseHarness, HarnessContext
from slime.agent.harness.packages import Package

DEFAULT_CONTEXT, DEFAULT_OUTPUT = 131_072, 8192


class OpenCodeHarness(BaseHarness):
    """opencode with one provider; a `--title` spares the request in which it would ask the model for one."""

    name = "opencode"
    package = Package(
        program="opencode",
        title="opencode",
        variable="OPENCODE",
        install="npm install -g opencode-ai",
        natives=("opencode-linux-{arch}/bin/opencode", "opencode-darwin-{arch}/bin/opencode"),
    )

    def arguments(self, ctx: HarnessContext, prompt: str) -> list[str]:
        return ["run", "--title", "task"]

    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        off = ("AUTOUPDATE", "MODELS_FETCH", "DEFAULT_PLUGINS", "LSP_DOWNLOAD")
        return {f"OPENCODE_DISABLE_{name}": "1" for name in off}

    def files(self, ctx: HarnessContext) -> dict[str, str]:
        model = f"slime/{ctx.model_label}"
        limit = {"context": self.context_tokens or DEFAULT_CONTEXT, "output": self.max_output_tokens or DEFAULT_OUTPUT}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": ctx.openai_url, "apiKey": ctx.session_id},
            "models": {ctx.model_label: {"limit": limit}},
        }
        config: dict[str, Any] = {
            "autoupdate": False,
            "share": "disabled",
            "snapshot": False,
            "permission": {"*": "allow"},
            "enabled_providers": ["slime"],
            "model": model,
            "small_model": model,
            "compaction": {"auto": self.compaction, "prune": False},
            "provider": {"slime": provider},
        }
        return {".config/opencode/opencode.json": json.dumps(config, indent=1)}
