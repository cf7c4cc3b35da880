"""What every HTTP server of the project checks before it reads a request: key, origin, and type of the body.

A server on loopback is reached by more than its machine's programs: a page of another site in a browser posts to it
("simple" requests need no consent), and a page whose own name is made to resolve to 127.0.0.1 (DNS rebinding) even
reads the answers. Neither can show a key.

Invariant: a request without the server's key is served only if it was addressed to this machine by an IP address or a
name the server is known by, and was not sent by a page of another origin.
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
    """The status and the sentence of a request that is not served."""

    status: int
    message: str


def shows_key(headers: Mapping[str, str], key: str | None) -> bool:
    """Whether a request carries `key` as a bearer token; None is a key that nobody has."""
    given = headers.get("Authorization", "").encode(errors="surrogateescape")
    return key is not None and hmac.compare_digest(given, f"Bearer {key}".encode())


def foreign(headers: Mapping[str, str], *, names: Collection[str] = ()) -> Refusal | None:
    """Why a request without a key comes from elsewhere; `names` are further host names of the server."""
    host, origin = headers.get("Host"), headers.get("Origin")
    if host is not None and not _is_local_name(host, names):
        return Refusal(
            403,
            f"Host: {host!r} is not known here: use this server's IP address or localhost, or show its key",
        )
    return foreign_page(headers) if origin is not None else None


def foreign_page(headers: Mapping[str, str]) -> Refusal | None:
    """Why a request was sent by a page of another origin; programs send no `Origin`."""
    origin, host = headers.get("Origin"), headers.get("Host", "")
    if origin is None or origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}"):
        return None
    return Refusal(403, f"Origin: pages of {origin!r} may not use this server: send the request from a program")


def not_json(request: web.Request) -> Refusal | None:
    """Why a body is not read: a page of another site may send any type but JSON's without consent."""
    if not request.body_exists or _is_json(request.content_type):
        return None
    return Refusal(415, "Content-Type: a body must be sent as application/json")


def guard(key: str | None = None) -> Middleware:
    """The checks of a server whose routes are all alike but for /health, which is open to everybody. With a `key`, they
    ask for it; without one, requests must come from this machine."""

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        found = None
        if request.path != "/health" and not shows_key(request.headers, key):
            found = foreign(request.headers)
            if key is not None:
                found = Refusal(401, "give the key of this server: Authorization: Bearer KEY")
        return await _unless(found or not_json(request), request, handler)

    return checked


@web.middleware
async def no_foreign_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The checks of a server whose every request names a secret, such as the key of a session."""
    return await _unless(foreign_page(request.headers) or not_json(request), request, handler)


async def _unless(found: Refusal | None, request: web.Request, handler: Handler) -> web.StreamResponse:
    if found is not None:
        return web.json_response({"error": {"message": found.message}}, status=found.status)
    return await handler(request)


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")


def _is_local_name(host: str, names: Collection[str]) -> bool:
    """An address, which no foreign site can have as its name, localhost, or one of `names`."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        if name == "localhost" or name.endswith(".localhost") or name in {one.lower() for one in names}:
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
