"""Any program that takes a base URL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime.agent.harness.base import BaseHarness, HarnessContext
from slime.errors import UserError


class CommandHarness(BaseHarness):
    """A command with its arguments, one by one, which no shell reads.

    `{url}`, `{openai_url}`, `{key}`, `{model}`, `{workdir}` and `{prompt}` in them are replaced. The same stand in the
    environment under the names that clients of OpenAI and Anthropic look for, and the prompt is on standard input too.
    """

    name = "command"

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **settings: Any) -> None:
        if isinstance(argv, str) or not argv:
            raise UserError(f"the command of an agent is a list of its arguments, not {argv!r}: split it")
        super().__init__(extra_env=env, **settings)
        self.argv = tuple(str(item) for item in argv)

    def arguments(self, ctx: HarnessContext, prompt: str) -> list[str]:
        values = {
            "{url}": ctx.base_url,
            "{openai_url}": ctx.openai_url,
            "{key}": ctx.session_id,
            "{model}": ctx.model_label,
            "{workdir}": ctx.workdir,
            "{prompt}": prompt,
        }
        return [_filled(item, values) for item in self.argv]

    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": ctx.openai_url,
            "OPENAI_API_BASE": ctx.openai_url,
            "OPENAI_API_KEY": ctx.session_id,
            "OPENAI_MODEL": ctx.model_label,
            "ANTHROPIC_BASE_URL": ctx.base_url,
            "ANTHROPIC_API_KEY": ctx.session_id,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            "ANTHROPIC_MODEL": ctx.model_label,
        }


def _filled(item: str, values: Mapping[str, str]) -> str:
    """With the names replaced in one go: what a prompt contains is not looked at again."""
    parts, rest = [], item
    while rest:
        found = [(at, name) for name in values if (at := rest.find(name)) >= 0]
        if not found:
            break
        at, name = min(found)
        parts += [rest[:at], values[name]]
        rest = rest[at + len(name) :]
    return "".join([*parts, rest])
