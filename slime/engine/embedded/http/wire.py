"""Bodies and event streams on the wire."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from slime.engine.embedded.sampling_params import BadRequest


async def json_body(request: web.Request, *, optional: bool = False) -> dict[str, Any]:
    raw = await request.read()
    if not raw and optional:
        return {}
    try:
        body = json.loads(raw)
    except ValueError as cause:
        raise BadRequest(f"the body is not JSON: {cause}") from cause
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


async def open_event_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


async def send_event(response: web.StreamResponse, payload: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(payload).encode() + b"\n\n")
