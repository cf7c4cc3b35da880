"""Single HTTP calls from code that has no event loop: starting, probing, attaching."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any
from urllib.parse import urlsplit

from slime.engine.http.key import authorization

DEFAULT_TIMEOUT_S = 30.0


class NoAnswer(Exception):
    """There was no HTTP answer; the text says why."""


def ask(
    method: str, url: str, body: Any = None, *, timeout_s: float = DEFAULT_TIMEOUT_S, api_key: str | None = None
) -> tuple[int, Any]:
    """(status, the answer as JSON, or as text when it is none)."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
    headers = authorization(api_key) | ({} if body is None else {"Content-Type": "application/json"})
    path = (address.path or "/") + (f"?{address.query}" if address.query else "")
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(str(error) or type(error).__name__) from error
    finally:
        connection.close()
    try:
        return response.status, json.loads(text)
    except json.JSONDecodeError:
        return response.status, text


def why_unreachable(url: str, *, timeout_s: float) -> str | None:
    """Why no connection can be made to where a URL points; None when one can."""
    address = urlsplit(url if "//" in url else f"//{url}")
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        with socket.create_connection((address.hostname or "", port), timeout=timeout_s):
            return None
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__
