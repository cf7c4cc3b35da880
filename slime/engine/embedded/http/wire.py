"""Bodies, answers and event streams on the wire.

Invariant: an error has OpenAI's shape, whatever refused the request: `{"error": {message, type, param, code}}`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web

from slime.engine.embedded.http.fields import Fields
from slime.engine.embedded.refusals import BadRequest, RequestFailed

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


async def json_body(request: web.Request, *, optional: bool = False) -> Fields:
    """The JSON object in a body; numbers are finite, integers have 64 bits, nesting is bounded."""
    raw = await request.read()
    if not raw and optional:
        return Fields({})
    try:
        return Fields(orjson.loads(raw))
    except orjson.JSONDecodeError as cause:
        raise BadRequest(f"the body is not JSON: {cause}") from cause


def json_answer(payload: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(payload), status=status, content_type="application/json")


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_answer(status: int, message: str, param: str | None = None) -> web.Response:
    return json_answer(error_body(status, message or HTTPStatus(status).phrase, param), status)


@asynccontextmanager
async def event_stream(request: web.Request) -> AsyncIterator[web.StreamResponse]:
    """An open stream of events; a request that fails in the middle says so in one."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        yield response
    except RequestFailed as failed:
        await send_event(response, error_body(failed.status, str(failed)))
    await response.write(b"data: [DONE]\n\n")


async def send_event(response: web.StreamResponse, payload: dict[str, Any]) -> None:
    await response.write(b"data: " + orjson.dumps(payload) + b"\n\n")
