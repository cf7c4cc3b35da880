"""Keys of engines: never in a plan, a log, a saved config or on a command line.

Invariant: an engine's control routes answer only those who show its key, and beyond loopback all of its routes do. The
engines that a run starts have one key, made for that run; those of somebody else the one in the environment. Engines of
`slime serve` on loopback make their own, and keep it where other programs of the same user find it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from slime.cluster.child_env import CONTROL_KEY_VARIABLE, kept_key
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
