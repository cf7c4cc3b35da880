"""The process of the endpoints as its driver calls it: `control.sock`, call by call."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from slime.agent.server.control import hand_over
from slime.agent.server.dialects import Kind
from slime.agent.server.settings import AGENTS, CONTROL, LISTENERS, Opening
from slime.data.buffer.codec import Codec
from slime.engine.http.blocking import authorization

CALL_TIMEOUT_S = 120.0


class AgentServerFailed(Exception):
    """The process of the endpoints is gone, does not answer, or refuses what it is told."""


class RemoteServer:
    """The control side of a process that serves agents; `addresses` is what it said when it was ready."""

    def __init__(self, addresses: Mapping[str, Any], secret: str) -> None:
        folder = Path(addresses["folder"])
        self.host, self.port, self.model = str(addresses["host"]), int(addresses["port"]), str(addresses["model"])
        self.agents_socket = str(folder / AGENTS)
        self._listeners, self._secret = str(folder / LISTENERS), secret
        self._codec = Codec()
        self._http = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=str(folder / CONTROL), limit=0),
            headers=authorization(secret),
            timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S),
        )

    @property
    def url(self) -> str:
        """Where agents on this machine find the endpoints, without a slash at the end."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def open(self, opening: Opening) -> dict[str, Any]:
        """Open a session; how many `turns` it has already, and why its template cannot be continued (`refusal`)."""
        answer: dict[str, Any] = await self._call("open", asdict(opening))
        return answer

    async def collect(self, key: str, kind: Kind, message: str) -> dict[str, Any]:
        """Close a session; its record (`Session.to_record`), its last engine failure, a warning for the user."""
        answer: dict[str, Any] = await self._call(
            "close", {"key": key, "kind": str(kind), "message": message, "collect": True}
        )
        return answer

    async def drop(self, key: str, kind: Kind, message: str) -> None:
        """Close a session whose turns nobody wants."""
        await self._call("close", {"key": key, "kind": str(kind), "message": message, "collect": False})

    async def turns(self, key: str) -> dict[str, Any]:
        """What was said up to the last turn."""
        answer: dict[str, Any] = await self._call("turns", {"key": key})
        return answer

    async def hold(self, key: str) -> None:
        """Nothing of a session is at an engine when this returns, until `release`."""
        await self._call("hold", {"key": key})

    async def release(self, key: str) -> None:
        """Let a session go on."""
        await self._call("release", {"key": key})

    async def engine(self, url: str, state: str, reason: str = "", key: str | None = None) -> None:
        """What became of an engine (`EnginePool.when_changed`); a new one may ask for a key."""
        await self._call("engine", {"url": url, "state": state, "reason": reason, "key": key})

    async def version(self, version: str | None) -> None:
        """All engines have these weights."""
        await self._call("version", {"version": version})

    async def stats(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self._call("stats", {})
        return answer

    async def live(self, call: str, **arguments: Any) -> Any:
        """One call of a live service: take, taken, forget, recorded, stats."""
        return await self._call(f"live_{call}", arguments)

    async def accept_on(self, key: str, listener: socket.socket) -> None:
        """Have the endpoints accept on a listening socket too, for as long as the session lasts."""
        try:
            await hand_over(self._listeners, self._secret, key, listener)
        except OSError as error:
            raise AgentServerFailed(f"the agent server did not take a socket: {error}") from error

    async def aclose(self) -> None:
        await self._http.close()

    async def _call(self, name: str, body: dict[str, Any]) -> Any:
        packed = self._codec.pack(body, name)
        try:
            async with self._http.post(f"http://agent-server/{name}", data=packed) as response:
                content = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise AgentServerFailed(f"the agent server did not answer: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise AgentServerFailed(f"the agent server refused {name}: {content.decode(errors='replace')}")
        return self._codec.unpack(content)
