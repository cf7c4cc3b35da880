"""Dialects: translators between the APIs that clients use and the server's own types, without any I/O."""

from collections.abc import Mapping

from slime.agent.server.dialects.anthropic import AnthropicMessages
from slime.agent.server.dialects.chat_completions import ChatCompletions, model_body, models_body
from slime.agent.server.dialects.dialect import Asked, Dialect, FinishedTurn, StreamWriter, TokenLogProb, Usage
from slime.agent.server.dialects.errors import Kind, Problem, refusal_problem
from slime.agent.server.dialects.responses import OpenAIResponses

__all__ = [
    "DIALECTS",
    "Asked",
    "Dialect",
    "FinishedTurn",
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
    """The dialect for a response on this path. Unknown paths are decided by the `anthropic-version` header."""
    for dialect in DIALECTS:
        if path in dialect.paths:
            return dialect
    anthropic = any(name.lower() == "anthropic-version" for name in headers)
    return DIALECTS[2] if anthropic or path.startswith("/v1/messages") else DIALECTS[0]
