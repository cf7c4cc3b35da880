"""mini-swe-agent, headless (`mini -y`), through OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.agent.harness.base import BaseHarness, HarnessContext
from slime.agent.harness.packages import Package


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
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # its client retries by itself; this one waits 4 to 60 s
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }

    def version_command(self, argv: Sequence[str]) -> list[str]:
        """By its package's metadata, where its Python is known: the program itself imports for ten seconds."""
        if len(argv) == 1:
            return [*argv, "--version"]
        return [argv[0], "-c", "import importlib.metadata as m; print(m.version('mini-swe-agent'))"]
