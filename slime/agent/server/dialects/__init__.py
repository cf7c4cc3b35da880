"""The languages that clients speak: each one a translator between its bodies and our words, without any I/O."""

from collections.abc import Mapping

from slime.agent.server.dialects.anthropic import AnthropicMessages
from slime.agent.server.dialects.chat_completions import ChatCompletions, model_body, models_body
from slime.agent.server.dialects.dialect import (
    Asked,
    Dialect,
    Finished,
    Kind,
    Problem,
    StreamWriter,
    TokenLogProb,
    Usage,
)
from slime.agent.server.dialects.errors import refusal_problem
from slime.agent.server.dialects.responses import OpenAIResponses

__all__ = [
    "DIALECTS",
    "Asked",
    "Dialect",
    "Finished",
    "Kind",
    "Problem",
    "StreamWriter",
    "TokenLogProb",
    "Usage",
    "dialect_of",
    "model_body",
    "models_body",
    "refusal_problem",
]

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), OpenAIResponses(), AnthropicMessages())


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """Whose words to use for a path, also where no dialect has it: Anthropic's clients send their API's version."""
    for dialect in DIALECTS:
        if path in dialect.paths:
            return dialect
    anthropic = any(name.lower() == "anthropic-version" for name in headers)
    return DIALECTS[2] if anthropic or path.startswith("/v1/messages") else DIALECTS[0]
