"""HTTP helpers for plugin code that talks to engines, tools or services by URL.

Each request has a deadline; responses in the 4xx range are the caller's error and are not retried. Requests to this
run's engines carry their key, survive weight updates and, with `--partial-rollout`, the end of the rollout.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp

from slime.cluster.ports import free_range, host_address, port_is_free
from slime.config.plugins.view import num_engines
from slime.engine.http.blocking import authorization
from slime.engine.http.errors import EngineError, EngineFailed, EngineRejected, EngineTimeout, EngineUnreachable
from slime.engine.http.protocol import error_message
from slime.rollout.generate import answer_to, get_model_url
from slime.rollout.runtime import key_behind

__all__ = [
    "find_available_port",
    "get",
    "get_host_info",
    "get_model_url",
    "get_rollout_num_engines",
    "init_http_client",
    "is_port_available",
    "post",
]

RETRY_PAUSE_S = 1.0
RETRIED_STATUSES = frozenset({408, 425, 429})


async def post(
    url: str,
    payload: Any,
    max_retries: int = 60,
    headers: dict[str, str] | None = None,
    *,
    timeout_s: float = 3600.0,
) -> Any:
    """POST JSON; return the response as parsed JSON, else as text. At most `max_retries` tries, 1 s apart.

    A request to `/generate` of this run's engines that is aborted there is resumed from its tokens into one response,
    unless a plugin made the engine abort all requests.
    """

    async def send(body: Any) -> Any:
        return await _request("POST", url, body, max_retries, headers, timeout_s)

    return await answer_to(url, payload, send)


async def get(url: str, max_retries: int = 1, *, timeout_s: float = 60.0) -> Any:
    """GET; return the response as parsed JSON, else as text."""
    return await _request("GET", url, None, max_retries, None, timeout_s)


def init_http_client(args: Any) -> None:
    """Do nothing: each request opens its own connection. Existing plugins call this."""


def get_rollout_num_engines(args: Any) -> int:
    return num_engines(args)


def get_host_info() -> tuple[str, str]:
    """Return the name and address of this machine; `SLIME_HOST_IP` overrides the detected address."""
    return socket.gethostname(), host_address()


def is_port_available(port: int) -> bool:
    """Return True if a server can listen on this port now."""
    return port_is_free(port)


def find_available_port(base_port: int) -> int:
    """Return the first port from `base_port` on that a server can listen on now."""
    return free_range(base_port)


async def _request(
    method: str, url: str, payload: Any, max_retries: int, headers: dict[str, str] | None, timeout_s: float
) -> Any:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
    headers = {**authorization(key_behind(url)), **(headers or {})}
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for attempt in range(1, max_retries + 1):
            try:
                async with asyncio.timeout(timeout_s):
                    return await _once(session, method, url, payload, headers)
            except TimeoutError as error:
                raise EngineTimeout(url, method, timeout_s) from error
            except EngineError as error:
                if not _worth_retrying(error) or attempt >= max_retries:
                    raise
            await asyncio.sleep(RETRY_PAUSE_S)
    raise ValueError(f"max_retries must be at least 1, not {max_retries}")


async def _once(
    session: aiohttp.ClientSession, method: str, url: str, payload: Any, headers: dict[str, str] | None
) -> Any:
    try:
        async with session.request(method, url, json=payload, headers=headers) as response:
            text, status = await response.text(errors="replace"), response.status
    except aiohttp.ClientError as error:
        raise EngineUnreachable(url, method, f"failed ({type(error).__name__}: {error})", accepted=True) from error
    if status >= 500:
        raise EngineFailed(url, method, status, error_message(text))
    if status >= 400:
        raise EngineRejected(url, method, status, error_message(text))
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _worth_retrying(error: EngineError) -> bool:
    return error.transient or (isinstance(error, EngineRejected) and error.status in RETRIED_STATUSES)
