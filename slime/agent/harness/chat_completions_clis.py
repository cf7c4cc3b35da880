"""Harnesses that use OpenAI's chat completions: mini-swe-agent, opencode and Qwen Code, headless.

Their commands are `mini -y`, `opencode run` and `qwen -p`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from slime.agent.harness.base import BaseHarness, HarnessContext
from slime.agent.harness.packages import Package
from slime.storage.json_types import JsonObject


class MiniSweAgentHarness(BaseHarness):
    """mini-swe-agent: one tool, a prompt of 3 KB. It ends when the model echoes the word that its prompt names."""

    name = "mini_swe_agent"
    package = Package(
        program="mini",
        title="mini-swe-agent",
        variable="MINI",
        install="pip install mini-swe-agent into an environment of its own",
    )
    prompt_on_stdin = False

    def __init__(self, *, step_limit: int = 0, **settings: Any) -> None:
        super().__init__(**settings)
        self.step_limit = step_limit

    def arguments(self, ctx: HarnessContext, prompt: str) -> list[str]:
        config = ["mini.yaml", f"model.model_kwargs.api_base={ctx.openai_url}", f"agent.step_limit={self.step_limit}"]
        if self.max_output_tokens is not None:
            config.append(f"model.model_kwargs.max_tokens={self.max_output_tokens}")
        chosen = [item for setting in config for item in ("-c", setting)]
        model = f"openai/{ctx.model_label}"
        return ["-y", "--exit-immediately", "-l", "0", "-m", model, "-o", "/dev/null", *chosen, "-t", prompt]

    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        return {
            "OPENAI_API_KEY": ctx.session_id,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # its client retries already; this retry waits 4 to 60 s
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }

    def version_command(self, argv: Sequence[str]) -> list[str]:
        """Read the package's metadata if its Python is known: the program itself imports for ten seconds."""
        if len(argv) == 1:
            return [*argv, "--version"]
        return [argv[0], "-c", "import importlib.metadata as m; print(m.version('mini-swe-agent'))"]


DEFAULT_CONTEXT, DEFAULT_OUTPUT = 131_072, 8192


class OpenCodeHarness(BaseHarness):
    """opencode with one provider; with `--title` it makes no extra request for a title."""

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
        config: JsonObject = {
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


TIMEOUT_MS = 900_000
"""Timeout of one answer; its default of 120 s makes it retry while the first answer is still being sampled."""


class QwenCodeHarness(BaseHarness):
    """Qwen Code, which runs on Node.js 22."""

    name = "qwen_code"
    package = Package(
        program="qwen",
        title="Qwen Code",
        variable="QWEN",
        install="npm install -g @qwen-code/qwen-code",
        needs_node=True,
    )

    def arguments(self, ctx: HarnessContext, prompt: str) -> list[str]:
        return ["--auth-type", "openai", "-y", "--output-format", "json"]

    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        return {
            "OPENAI_API_KEY": ctx.session_id,
            "OPENAI_BASE_URL": ctx.openai_url,
            "OPENAI_MODEL": ctx.model_label,
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
        }

    def files(self, ctx: HarnessContext) -> dict[str, str]:
        generation: JsonObject = {"timeout": TIMEOUT_MS, "maxRetries": self.retries}
        if self.context_tokens is not None:
            generation["contextWindowSize"] = self.context_tokens
        if self.max_output_tokens is not None:
            generation["samplingParams"] = {"max_tokens": self.max_output_tokens}
        model: JsonObject = {"generationConfig": generation}
        if not self.compaction:
            model["chatCompression"] = {"contextPercentageThreshold": 0}
        settings = {
            "general": {"disableAutoUpdate": True, "disableUpdateNag": True},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "model": model,
        }
        return {".qwen/settings.json": json.dumps(settings, indent=1)}
