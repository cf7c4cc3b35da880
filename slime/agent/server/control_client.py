"""The driver's client of the agent server's control socket (`control.sock`)."""

from __future__ import annotations

import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from slime.agent.server.control import send_listener
from slime.agent.server.dialects import Kind
from slime.agent.server.settings import AGENTS_SOCKET, CONTROL_SOCKET, LISTENERS_SOCKET, Opening
from slime.data.buffer.codec import Codec
from slime.engine.http.blocking import authorization
from slime.storage.json_types import JsonMapping, JsonObject

CALL_TIMEOUT_S = 120.0


class AgentServerFailed(Exception):
    """The agent server died, does not answer, or refuses a call."""


class RemoteServer:
    """A client of the agent server's control calls; `addresses` is its report of being ready."""

    def __init__(self, addresses: JsonMapping, secret: str) -> None:
        folder = Path(addresses["folder"])
        self.host, self.port, self.model = str(addresses["host"]), int(addresses["port"]), str(addresses["model"])
        self.agents_socket = str(folder / AGENTS_SOCKET)
        self._listeners, self._secret = str(folder / LISTENERS_SOCKET), secret
        self._codec = Codec()
        self._http = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=str(folder / CONTROL_SOCKET), limit=0),
            headers=authorization(secret),
            timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S),
        )

    @property
    def url(self) -> str:
        """The URL of the endpoints for agents on this machine, without a trailing slash."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def open(self, opening: Opening) -> JsonObject:
        """Open a session; returns its number of `turns` and, if its template cannot be continued, the `refusal`."""
        answer: JsonObject = await self._call("open", asdict(opening))
        return answer

    async def collect(self, key: str, kind: Kind, message: str) -> JsonObject:
        """Close a session; returns `record` (`Session.to_record`), the last engine `failure` and a user `warning`."""
        answer: JsonObject = await self._call(
            "close", {"key": key, "kind": str(kind), "message": message, "collect": True}
        )
        return answer

    async def drop(self, key: str, kind: Kind, message: str) -> None:
        """Close a session and discard its turns."""
        await self._call("close", {"key": key, "kind": str(kind), "message": message, "collect": False})

    async def turns(self, key: str) -> JsonObject:
        """The `messages` up to the last turn, and the session's `counters`."""
        answer: JsonObject = await self._call("turns", {"key": key})
        return answer

    async def hold(self, key: str) -> None:
        """Hold a session: when this returns, none of its requests is at an engine until `release`."""
        await self._call("hold", {"key": key})

    async def release(self, key: str) -> None:
        """Let a held session continue."""
        await self._call("release", {"key": key})

    async def engine(self, url: str, state: str, reason: str = "", key: str | None = None) -> None:
        """Report the state of an engine (`EnginePool.when_changed`); a new one may require a key."""
        await self._call("engine", {"url": url, "state": state, "reason": reason, "key": key})

    async def version(self, version: str | None) -> None:
        """Report the version of the weights that all engines have."""
        await self._call("version", {"version": version})

    async def stats(self) -> JsonObject:
        answer: JsonObject = await self._call("stats", {})
        return answer

    async def live(self, call: str, **arguments: object) -> Any:
        """Call a live service: take, taken, forget, recorded or stats."""
        return await self._call(f"live_{call}", arguments)

    async def accept_on(self, key: str, listener: socket.socket) -> None:
        """Have the endpoints accept on a listening socket too, until the session is closed."""
        try:
            await send_listener(self._listeners, self._secret, key, listener)
        except OSError as error:
            raise AgentServerFailed(f"the agent server did not take a socket: {error}") from error

    async def aclose(self) -> None:
        await self._http.close()

    async def _call(self, name: str, body: JsonObject) -> Any:
        packed = self._codec.pack(body, name)
        try:
            async with self._http.post(f"http://agent-server/{name}", data=packed) as response:
                content = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise AgentServerFailed(f"the agent server did not answer: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise AgentServerFailed(f"the agent server refused {name}: {content.decode(errors='replace')}")
        return self._codec.unpack(content)
