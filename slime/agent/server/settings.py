"""Settings of the agent server: those of the process, of its live service, and of each session that is opened.

The settings of the process contain secrets, so the driver sends them through a socket.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slime.engine.http.pool import EnginePool
from slime.engine.sglang.router import RoutedPool
from slime.storage.json_types import JsonMapping, JsonObject

ADDRESS_FILE = "live.json"
"""The file in the run folder in which clients find the live service."""


@dataclass(frozen=True)
class LiveSettings:
    """Settings of a live service; all clients share `key`, all conversations `params` and `limits` (`Opening`)."""

    key: str = field(repr=False)
    store: str
    params: JsonMapping
    limits: JsonMapping
    template_kwargs: JsonMapping
    strict: bool = False
    routing: bool = False
    filter_path: str | None = None
    idle_s: float = 600.0
    most_conversations: int = 4096


def load_or_create_key(folder: Path) -> str:
    """The key of the service: from an existing address file, so that clients keep it on resume, else a new key."""
    try:
        known = json.loads((folder / ADDRESS_FILE).read_text())["key"]
    except (OSError, ValueError, KeyError, TypeError):
        known = None
    return known if isinstance(known, str) and len(known) >= 16 else secrets.token_urlsafe(24)


def write_address(folder: Path, url: str, key: str, model: str) -> None:
    """Write the address of the service for clients: `live.json` in the run folder, readable by this user only."""
    address = {"openai_url": f"{url}/v1", "anthropic_url": url, "key": key, "model": model}
    temporary = folder / f"{ADDRESS_FILE}.new"
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(address, file)
    temporary.replace(folder / ADDRESS_FILE)


AGENTS_SOCKET, CONTROL_SOCKET, LISTENERS_SOCKET = "agents.sock", "control.sock", "listeners.sock"
"""Sockets in the folder of the agent server."""


@dataclass(frozen=True)
class Opening:
    """The settings with which a session is opened.

    A `held` session waits at the driver's gate; with `masks`, tokens sampled before a wait are not trained on. `names`
    are additional names of the model. `attempt` has the fields of the `Attempt` under which the turns are journaled,
    and `record` is the session as an interrupted run left it (`Session.to_record`). With `routing` turns keep the
    experts that the engine's routers chose.
    """

    key: str
    params: JsonMapping
    limits: JsonMapping = field(default_factory=dict)
    strict: bool = False
    template_kwargs: JsonMapping = field(default_factory=dict)
    held: bool = False
    masks: bool = False
    names: tuple[str, ...] = ()
    attempt: JsonMapping | None = None
    record: JsonMapping | None = None
    routing: bool = False


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the process. `names` are the names of the model for clients; `/v1/models` returns the first.

    Only this user can access `folder`: its sockets are for the driver (`control.sock`, which requires `secret`, and
    `listeners.sock`) and for sandboxes, which bind-mount `agents.sock`.
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
    """The file that stores the turns of unfinished sessions."""
    host: str = "127.0.0.1"
    port: int = 0
    live: LiveSettings | None = None
    """Settings for external clients; None without a live service."""

    def to_dict(self) -> JsonObject:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: JsonMapping) -> ServerSettings:
        """The inverse of `to_dict`, from JSON values too."""
        lists = {name: tuple(values[name]) for name in ("engines", "names")}
        live = values.get("live")
        return cls(**{**values, **lists, "live": None if live is None else LiveSettings(**live)})

    def make_pool(self) -> EnginePool:
        """Create the engine pool of the process."""
        if self.router is not None:
            return RoutedPool(
                self.engines,
                self.router,
                router_only=self.router_only,
                timeout_s=self.engine_timeout_s,
                api_key=self.engine_key,
            )
        return EnginePool(self.engines, timeout_s=self.engine_timeout_s, api_key=self.engine_key, may_be_empty=True)
