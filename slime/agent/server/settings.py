"""What the process of the endpoints is told: when it starts (secrets among it, so it comes through a socket), and of
each session that is opened there.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slime.engine.http.pool import EnginePool
from slime.engine.sglang.router import RoutedPool

# What the process of the endpoints is told of a live service, and the file in which clients find it.

ADDRESS_FILE = "live.json"


@dataclass(frozen=True)
class LiveSettings:
    """`key` is what all clients have; `params` and `limits` are those of every conversation (`Opening`)."""

    key: str = field(repr=False)
    store: str
    params: Mapping[str, Any]
    limits: Mapping[str, Any]
    template_kwargs: Mapping[str, Any]
    strict: bool = False
    routing: bool = False
    filter_path: str | None = None
    idle_s: float = 600.0
    most_conversations: int = 4096


def kept_key(folder: Path) -> str:
    """The key of the service: the one that clients were given in an earlier life of the run, else a new one."""
    try:
        known = json.loads((folder / ADDRESS_FILE).read_text())["key"]
    except (OSError, ValueError, KeyError, TypeError):
        known = None
    return known if isinstance(known, str) and len(known) >= 16 else secrets.token_urlsafe(24)


def write_address(folder: Path, url: str, key: str, model: str) -> None:
    """Tell clients where the service is: `live.json` in the run folder, which only this user can read."""
    said = {"openai_url": f"{url}/v1", "anthropic_url": url, "key": key, "model": model}
    beside = folder / f"{ADDRESS_FILE}.new"
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(said, file)
    beside.replace(folder / ADDRESS_FILE)


AGENTS, CONTROL, LISTENERS = "agents.sock", "control.sock", "listeners.sock"
"""Sockets in the folder of the process."""


@dataclass(frozen=True)
class Opening:
    """What a session is opened with.

    `held` ones wait at the driver's gate; `masks`: what was sampled before a wait is not trained on. `names` are
    further names of the model. `attempt` are the fields of the `Attempt` under which the turns are journaled, and
    `record` is what an earlier life of the run left of it (`Session.to_record`). With `routing` turns keep which
    experts the engine's routers chose.
    """

    key: str
    params: Mapping[str, Any]
    limits: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    held: bool = False
    masks: bool = False
    names: tuple[str, ...] = ()
    attempt: Mapping[str, Any] | None = None
    record: Mapping[str, Any] | None = None
    routing: bool = False


@dataclass(frozen=True)
class ServerSettings:
    """`names` are those that clients may call the model by; the first is the one that they are told.

    `folder` belongs to this user alone: its sockets are for the driver (`control.sock`, which asks for `secret`, and
    `listeners.sock`) and for sandboxes that bind `agents.sock` into theirs.
    """

    model: str
    engines: tuple[str, ...]
    folder: str
    secret: str = field(repr=False)
    names: tuple[str, ...] = ()
    trust_remote_code: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    router: str | None = None
    router_only: bool = False
    engine_key: str | None = field(default=None, repr=False)
    engine_timeout_s: float = 3600.0
    fault_tolerant: bool = False
    version: str | None = None
    journal: str | None = None
    """The file in which the turns of unfinished sessions are kept."""
    host: str = "127.0.0.1"
    port: int = 0
    live: LiveSettings | None = None
    """What clients whom nobody dispatched are served with."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServerSettings:
        """The inverse of `to_dict`, from JSON values too."""
        lists = {name: tuple(values[name]) for name in ("engines", "names")}
        live = values.get("live")
        return cls(**{**values, **lists, "live": None if live is None else LiveSettings(**live)})

    def make_pool(self) -> EnginePool:
        """The engines, as this process asks them."""
        if self.router is not None:
            return RoutedPool(
                self.engines,
                self.router,
                router_only=self.router_only,
                timeout_s=self.engine_timeout_s,
                api_key=self.engine_key,
            )
        return EnginePool(self.engines, timeout_s=self.engine_timeout_s, api_key=self.engine_key, may_be_empty=True)
