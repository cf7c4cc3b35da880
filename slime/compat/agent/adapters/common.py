"""Helpers shared by upstream slime's adapters, under its names: session ids of requests, and small conversions."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from slime.agent.server.dialects.request_fields import parsed_arguments
from slime.agent.trajectory import TurnRecord
from slime.engine.http.client import EngineClient
from slime.engine.http.errors import EngineError

__all__ = [
    "DEFAULT_SID",
    "Reply",
    "Session",
    "TurnRecord",
    "call_sglang_generate",
    "flatten_content",
    "manager_finish_reason",
    "sid_from_bearer",
    "sid_from_body",
    "tool_call_dict",
]

DEFAULT_SID = "default"
ABORT_TIMEOUT_S = 10.0
_FINISH = {"stop": "stop", "end_turn": "stop", "stop_sequence": "stop", "eos": "stop"}
_FINISH |= {"tool_calls": "tool_calls", "tool_use": "tool_calls", "function_call": "tool_calls"}
_FINISH |= {"length": "length", "max_tokens": "length", "abort": "abort"}


@dataclass
class Session:
    """The parameters that a session was opened with."""

    sid: str
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    max_context_tokens: int = 0


@dataclass(frozen=True)
class Reply:
    """The response to a turn: the body in the format of the client's API."""

    body: Mapping[str, Any]
    finish_reason: str


def sid_from_bearer(request: web.Request) -> str | None:
    """Return the bearer token of a request."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def sid_from_body(body: Mapping[str, Any]) -> str | None:
    """Return `metadata.session_id` of a body, else its `user`."""
    metadata = body.get("metadata")
    given = metadata.get("session_id") if isinstance(metadata, Mapping) else None
    found = given or body.get("user")
    return found if isinstance(found, str) and found else None


def flatten_content(content: Any) -> str:
    """Convert content to text: strings unchanged, texts of a list joined by newlines, other parts as a note."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return str(content)
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif isinstance(part, Mapping) and "content" in part:
            parts.append(flatten_content(part["content"]))
        elif isinstance(part, Mapping):
            parts.append(f"[{part.get('type', 'part')} omitted]")
    return "\n".join(parts)


def tool_call_dict(name: str, arguments: Any, call_id: str | None = None) -> dict[str, Any]:
    """Build a tool call for chat templates: its arguments are a mapping."""
    if isinstance(arguments, str):
        arguments = parsed_arguments(arguments)
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": dict(arguments or {})}}
    return call if call_id is None else {"id": call_id, **call}


def manager_finish_reason(reason: Any) -> str:
    """Map SGLang's or an API's finish reason to one of `stop`, `tool_calls`, `length`, `abort`."""
    if isinstance(reason, Mapping):
        reason = reason.get("type")
    return _FINISH.get(str(reason), "stop")


async def call_sglang_generate(
    sglang_url: str,
    input_ids: Sequence[int],
    sampling_params: Mapping[str, Any],
    *,
    sid: str = DEFAULT_SID,
    timeout_s: float = 900.0,
) -> dict[str, Any]:
    """Send one request to an engine or router and return SGLang's answer; a cancellation aborts it there."""
    rid = uuid.uuid4().hex
    params = {**sampling_params, "no_stop_trim": True, "skip_special_tokens": False}
    payload = {"rid": rid, "input_ids": list(input_ids), "sampling_params": params, "return_logprob": True}
    client = EngineClient(sglang_url.rstrip("/"), timeout_s=timeout_s, control_timeout_s=min(timeout_s, 120.0))
    try:
        return await client.generate(payload, headers={"X-SMG-Routing-Key": sid})
    except asyncio.CancelledError:
        with suppress(EngineError):  # the engine is gone, and the request with it
            await asyncio.shield(client.abort(rid=rid, timeout_s=ABORT_TIMEOUT_S))
        raise
    finally:
        await client.aclose()
