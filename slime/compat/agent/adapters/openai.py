"""`/v1/chat/completions` and `/v1/responses`, under upstream slime's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from slime.agent.adapters.base import BaseAdapter
from slime.agent.adapters.common import DEFAULT_SID, sid_from_bearer, sid_from_body
from slime.agent.server.dialects.chat_completions import ChatCompletions
from slime.agent.server.dialects.dialect import Dialect
from slime.agent.server.dialects.responses import OpenAIResponses


class OpenAIAdapter(BaseAdapter):
    """OpenAI's endpoints; the session id is the bearer token, `metadata.session_id`, `user` or "default"."""

    dialects: tuple[Dialect, ...] = (ChatCompletions(), OpenAIResponses())

    def _session_id(self, request: web.Request, body: Mapping[str, Any]) -> str:
        return sid_from_bearer(request) or sid_from_body(body) or DEFAULT_SID
