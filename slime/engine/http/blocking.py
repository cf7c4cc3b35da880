"""Single HTTP calls from code that has no event loop: starting, probing, attaching."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from slime.cluster.child_env import CONTROL_KEY_VARIABLE, kept_key
from slime.cluster.child_env import ENGINE_KEY_VARIABLE as KEY_VARIABLE
from slime.cluster.ports import is_loopback
from slime.config import Config
from slime.errors import UserError

# Keys of engines: never in a plan, a log, a saved config or on a command line.
#
# Invariant: an engine's control routes answer only those who show its key, and beyond loopback all of its routes do.
# The engines that a run starts have one key, made for that run; those of somebody else the one in the environment.
# Engines of `slime serve` on loopback make their own, and keep it where other programs of the same user find it.

__all__ = [
    "CONTROL_KEY_VARIABLE",
    "KEY_VARIABLE",
    "authorization",
    "engine_key",
    "key_variable",
    "made_key",
]


def engine_key(config: Config) -> str | None:
    """What `--rollout-external-engine-addrs` ask for: the key in the environment, else the one that engines on this
    machine have kept for this user."""
    addresses = config.rollout_external_engine_addrs
    if not addresses:
        return None
    return os.environ.get(KEY_VARIABLE) or _kept_by(addresses)


def made_key() -> str:
    """The key of engines that are going to be started: the one in the environment, or one that nobody else knows."""
    return os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)


def key_variable(address: str) -> str:
    """The variable by which an embedded engine that listens there gets its key: on loopback it guards control routes,
    beyond it everything."""
    return CONTROL_KEY_VARIABLE if is_loopback(address) else KEY_VARIABLE


def authorization(key: str | None) -> dict[str, str]:
    """The header that shows a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _kept_by(addresses: Sequence[str]) -> str | None:
    keys, others = {}, []
    for address in addresses:
        host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
        if not is_loopback(host):
            others.append(address)
        elif port.isdigit() and (key := kept_key(int(port))) is not None:
            keys[key] = address
    why = None
    if len(keys) > 1:
        why = f"the engines at {' and '.join(keys.values())} have different keys"
    elif keys and others:
        [address] = keys.values()
        why = f"the key of the engine at {address} is kept for this machine's programs and not for {' '.join(others)}"
    if why is not None:
        raise UserError(
            f"--rollout-external-engine-addrs: {why}: start all of them with the same {KEY_VARIABLE} in the "
            "environment, and this run too"
        )
    return next(iter(keys), None)


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
