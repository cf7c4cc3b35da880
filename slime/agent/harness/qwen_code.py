"""Qwen Code, headless (`qwen -p`), through OpenAI's chat completions."""

from __future__ import annotations

import json
from typing import Any

from slime.agent.harness.base import BaseHarness, HarnessContext
from slime.agent.harness.packages import Package

TIMEOUT_MS = 900_000
"""Of one answer; its own 120 s make it ask again while the first answer is still being sampled."""


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
        generation: dict[str, Any] = {"timeout": TIMEOUT_MS, "maxRetries": self.retries}
        if self.context_tokens is not None:
            generation["contextWindowSize"] = self.context_tokens
        if self.max_output_tokens is not None:
            generation["samplingParams"] = {"max_tokens": self.max_output_tokens}
        model: dict[str, Any] = {"generationConfig": generation}
        if not self.compaction:
            model["chatCompression"] = {"contextPercentageThreshold": 0}
        settings = {
            "general": {"disableAutoUpdate": True, "disableUpdateNag": True},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "model": model,
        }
        return {".qwen/settings.json": json.dumps(settings, indent=1)}
