"""Reads JSON bodies, and writes JSON answers and event streams.

Invariant: every error has OpenAI's shape: `{"error": {message, type, param, code}}`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import orjson
from aiohttp import web

from slime.engine.embedded.errors import BadRequest, RequestFailed, shown
from slime.models.openai_api import Field, error_json
from slime.storage.json_types import JsonObject


class RequestField(Field):
    """A JSON value of a request body; its errors name the outermost field as their `param`."""

    __slots__ = ()

    def bad(self, why: str) -> BadRequest:
        return BadRequest(f"{self.path} {why}", None if self.is_body else re.split(r"[.\[]", self.path)[0])

    def must_be(self, expected: str) -> Exception:
        return self.bad(f"is missing: give {expected}") if self.value is None else super().must_be(expected)

    @staticmethod
    def described(value: object) -> str:
        return shown(value)


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


async def json_body(request: web.Request, *, optional: bool = False) -> RequestField:
    """Parse the JSON object in a body; numbers are finite, integers have 64 bits, nesting is bounded."""
    raw = await request.read()
    try:
        body = {} if not raw and optional else orjson.loads(raw)
    except orjson.JSONDecodeError as cause:
        raise BadRequest(f"the body is not JSON: {cause}") from cause
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return RequestField(body)


def json_answer(payload: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(payload), status=status, content_type="application/json")


def error_body(status: int, message: str, param: str | None = None) -> JsonObject:
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return error_json(message, kind, param, status)


def error_answer(status: int, message: str, param: str | None = None) -> web.Response:
    return json_answer(error_body(status, message or HTTPStatus(status).phrase, param), status)


@asynccontextmanager
async def event_stream(request: web.Request) -> AsyncIterator[web.StreamResponse]:
    """Open a stream of events; a request that fails in the middle sends an error event."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        yield response
    except RequestFailed as failed:
        await send_event(response, error_body(failed.status, str(failed)))
    await response.write(b"data: [DONE]\n\n")


async def send_event(response: web.StreamResponse, payload: JsonObject) -> None:
    await response.write(b"data: " + orjson.dumps(payload) + b"\n\n")
