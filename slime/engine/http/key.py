"""Keys of engines: never in a plan, a log or a saved config.

Invariant: an engine that is reached from other machines answers only those who show its key. The engines that a run
starts have one key, made for that run; those of somebody else the one in the environment.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable

from slime.cluster.ports import is_loopback
from slime.cluster.secrets import ENGINE_KEY_VARIABLE as KEY_VARIABLE
from slime.config import Config

__all__ = ["KEY_VARIABLE", "authorization", "engine_key", "made_key"]


def engine_key(config: Config) -> str | None:
    """What `--rollout-external-engine-addrs` ask for."""
    return (os.environ.get(KEY_VARIABLE) or None) if config.rollout_external_engine_addrs else None


def made_key(addresses: Iterable[str]) -> str | None:
    """The key of engines that are going to listen there: the one in the environment, or one that nobody else knows.
    None where all listen on loopback."""
    if all(is_loopback(address) for address in addresses):
        return None
    return os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)


def authorization(key: str | None) -> dict[str, str]:
    """The header that shows a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}
