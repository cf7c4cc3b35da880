"""Request checks shared by all HTTP servers of the project: key, host, origin, and content type of the body.

A server on loopback is reachable by more than the programs of its machine: a page of another site in a browser can post
to it ("simple" requests need no consent), and a page whose host name resolves to 127.0.0.1 (DNS rebinding) can also
read the responses. Neither can send a key.

Invariant: a request without the server's key is served only if its Host is an IP address or a known name of the
server, and it was not sent by a page of another origin.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware


class Refusal(NamedTuple):
    """The status and message of a rejected request."""

    status: int
    message: str


def carries_key(headers: Mapping[str, str], key: str | None) -> bool:
    """Return True if a request carries `key` as a bearer token; always False if `key` is None."""
    given = headers.get("Authorization", "").encode(errors="surrogateescape")
    return key is not None and hmac.compare_digest(given, f"Bearer {key}".encode())


def foreign(headers: Mapping[str, str], *, names: Collection[str] = ()) -> Refusal | None:
    """Reject a request without a key that has a foreign Host or Origin; `names` are more host names of the server."""
    host, origin = headers.get("Host"), headers.get("Origin")
    if host is not None and not _is_local_name(host, names):
        return Refusal(
            403,
            f"Host: {host!r} is not known here: use this server's IP address or localhost, or show its key",
        )
    return foreign_page(headers) if origin is not None else None


def foreign_page(headers: Mapping[str, str]) -> Refusal | None:
    """Reject a request from a page of another origin; programs send no `Origin`."""
    origin, host = headers.get("Origin"), headers.get("Host", "")
    if origin is None or origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}"):
        return None
    return Refusal(403, f"Origin: pages of {origin!r} may not use this server: send the request from a program")


def not_json(request: web.Request) -> Refusal | None:
    """Reject a body that is not JSON: a page of another site may send any other type without consent."""
    if not request.body_exists or (kind := request.content_type) == "application/json" or kind.endswith("+json"):
        return None
    return Refusal(415, "Content-Type: a body must be sent as application/json")


def guard(key: str | None = None) -> Middleware:
    """Return the middleware that checks all routes except /health, which is open.

    With a `key`, requests must carry it; without one, they must be addressed to this machine.
    """

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        found = None
        if request.path != "/health" and not carries_key(request.headers, key):
            found = foreign(request.headers)
            if key is not None:
                found = Refusal(401, "give the key of this server: Authorization: Bearer KEY")
        return await _reject_or_handle(found or not_json(request), request, handler)

    return checked


@web.middleware
async def no_foreign_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Check the requests of a server that all carry a secret, such as a session's key."""
    return await _reject_or_handle(foreign_page(request.headers) or not_json(request), request, handler)


async def _reject_or_handle(found: Refusal | None, request: web.Request, handler: Handler) -> web.StreamResponse:
    if found is not None:
        return web.json_response({"error": {"message": found.message}}, status=found.status)
    return await handler(request)


def _is_local_name(host: str, names: Collection[str]) -> bool:
    """Return True for an IP address (which cannot be a foreign site's name), localhost, or one of `names`."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        if name == "localhost" or name.endswith(".localhost") or name in {one.lower() for one in names}:
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
