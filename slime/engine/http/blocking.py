"""Blocking HTTP calls for code without an event loop (starting, probing, attaching), and the API keys of engines.

Keys are never in a plan, a log, a saved config or on a command line. Invariant: an engine's control routes answer only
requests with its key; if the engine listens beyond loopback, all of its routes do. The engines that a run starts share
one key, made for that run; the key of external engines is read from the environment. Engines of `slime serve` on
loopback create their own key and store it where other programs of the same user find it.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
from typing import Any
from urllib.parse import urlsplit

from slime.cluster.child_env import CONTROL_KEY_VARIABLE, read_engine_key
from slime.cluster.child_env import ENGINE_KEY_VARIABLE as KEY_VARIABLE
from slime.cluster.ports import is_loopback
from slime.config import Config
from slime.errors import UserError

__all__ = [
    "CONTROL_KEY_VARIABLE",
    "KEY_VARIABLE",
    "authorization",
    "engine_key",
    "key_variable",
    "made_key",
]


def engine_key(config: Config) -> str | None:
    """Key of the engines in `--rollout-external-engine-addrs`: the one in the environment, else the one that engines on
    this machine have stored for this user."""
    addresses = config.rollout_external_engine_addrs
    if not addresses:
        return None
    if from_environment := os.environ.get(KEY_VARIABLE):
        return from_environment
    keys, others = {}, []
    for address in addresses:
        host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
        if not is_loopback(host):
            others.append(address)
        elif port.isdigit() and (key := read_engine_key(int(port))) is not None:
            keys[key] = address
    problem = None
    if len(keys) > 1:
        problem = f"the engines at {' and '.join(keys.values())} have different keys"
    elif keys and others:
        [address] = keys.values()
        problem = f"the engine at {address} stored its key for this machine's programs and not for {' '.join(others)}"
    if problem is not None:
        raise UserError(
            f"--rollout-external-engine-addrs: {problem}: start all of them with the same {KEY_VARIABLE} in the "
            "environment, and this run too"
        )
    return next(iter(keys), None)


def made_key() -> str:
    """Key for engines that are about to be started: the one in the environment, or a new random one."""
    return os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)


def key_variable(address: str) -> str:
    """Environment variable with the key of an embedded engine that listens at `address`: on loopback the key protects
    the control routes, beyond loopback all routes."""
    return CONTROL_KEY_VARIABLE if is_loopback(address) else KEY_VARIABLE


def authorization(key: str | None) -> dict[str, str]:
    """The HTTP header that carries a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


DEFAULT_TIMEOUT_S = 30.0


class NoResponse(Exception):
    """No HTTP response was received; the text says why."""


def ask(
    method: str, url: str, body: object = None, *, timeout_s: float = DEFAULT_TIMEOUT_S, api_key: str | None = None
) -> tuple[int, Any]:
    """Send a request; returns (status, the response as JSON, or as text if it is not JSON)."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
    headers = authorization(api_key) | ({} if body is None else {"Content-Type": "application/json"})
    path = (address.path or "/") + (f"?{address.query}" if address.query else "")
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise NoResponse(str(error) or type(error).__name__) from error
    finally:
        connection.close()
    try:
        return response.status, json.loads(text)
    except json.JSONDecodeError:
        return response.status, text


def connection_problem(url: str, *, timeout_s: float) -> str | None:
    """Return why no connection to the host of a URL can be made; None if one can."""
    address = urlsplit(url if "//" in url else f"//{url}")
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        with socket.create_connection((address.hostname or "", port), timeout=timeout_s):
            return None
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__
