"""Reads JSON bodies, and writes JSON answers and event streams.

Invariant: every error has OpenAI's shape: `{"error": {message, type, param, code}}`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus

import orjson
from aiohttp import web

from slime.engine.embedded.errors import BadRequest, RequestFailed, shown
from slime.storage.json_types import JsonMapping, JsonObject


class Fields:
    """A JSON object from a client, read field by field with a required type.

    Invariant: a method returns a value of its type, or raises a `BadRequest` that names the field. An absent field and
    a null one mean the same.
    """

    def __init__(self, body: object) -> None:
        if not isinstance(body, Mapping):
            raise BadRequest("the body must be a JSON object")
        self.body: JsonMapping = body

    def __contains__(self, name: str) -> bool:
        return self.body.get(name) is not None

    def string(self, name: str, default: str | None = None) -> str:
        value = self.optional_string(name)
        if value is None:
            if default is None:
                raise BadRequest(f"{name} is missing: give a string", name)
            return default
        return value

    def optional_string(self, name: str) -> str | None:
        value = self.body.get(name)
        if value is not None and not isinstance(value, str):
            raise BadRequest(f"{name} must be a string, not {shown(value)}", name)
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            raise BadRequest(f"{name} must be true or false, not {shown(value)}", name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, *, low: int, high: int) -> int:
        value = self.body.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadRequest(f"{name} must be an integer, not {shown(value)}", name)
        if not low <= value <= high:
            raise BadRequest(f"{name} must be between {low} and {high}, not {shown(value)}", name)
        return value

    def strings(self, name: str) -> list[str]:
        value = self.body.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise BadRequest(f"{name} must be a list of strings, not {shown(value)}", name)
        return value

    def one_of(self, name: str, known: tuple[str, ...], default: str) -> str:
        value = self.string(name, default)
        if value not in known:
            raise BadRequest(f"{name} must be one of {', '.join(known)}, not {shown(value)}", name)
        return value


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


async def json_body(request: web.Request, *, optional: bool = False) -> Fields:
    """Parse the JSON object in a body; numbers are finite, integers have 64 bits, nesting is bounded."""
    raw = await request.read()
    if not raw and optional:
        return Fields({})
    try:
        return Fields(orjson.loads(raw))
    except orjson.JSONDecodeError as cause:
        raise BadRequest(f"the body is not JSON: {cause}") from cause


def json_answer(payload: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(payload), status=status, content_type="application/json")


def error_body(status: int, message: str, param: str | None = None) -> JsonObject:
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


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
