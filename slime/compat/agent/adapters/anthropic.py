"""`/v1/messages` and `/v1/messages/count_tokens`, under upstream slime's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from slime.agent.adapters.base import BaseAdapter
from slime.agent.adapters.common import DEFAULT_SID, sid_from_bearer
from slime.agent.server.dialects.anthropic import AnthropicMessages
from slime.agent.server.dialects.dialect import Dialect


class AnthropicAdapter(BaseAdapter):
    """Anthropic's endpoints; the session id is the bearer token, else `x-api-key`, else "default"."""

    dialects: tuple[Dialect, ...] = (AnthropicMessages(),)

    def _session_id(self, request: web.Request, body: Mapping[str, Any]) -> str:
        return sid_from_bearer(request) or request.headers.get("X-Api-Key", "").strip() or DEFAULT_SID
