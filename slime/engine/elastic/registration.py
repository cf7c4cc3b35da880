"""Registration server of a run (`--fleet-address`): engines join here, and `slime fleet` lists the engines.

Invariant: only peers that know the run's token are served. The server has its own thread and event loop, so that
neither file transfers nor new connections delay the rollout. An error of a client ends only its own session.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from slime.cluster.http_checks import no_foreign_pages
from slime.cluster.ports import host_address
from slime.cluster.watchdog import background
from slime.engine.elastic.file_server import FILES_ROUTE, FileShares, ListedFile, list_folder_files
from slime.engine.elastic.handshake import (
    ADDRESS_FILE,
    HEARTBEAT_S,
    MAX_WEBSOCKET_MESSAGE_BYTES,
    PATH,
    TOKEN_FILE,
    Disconnected,
    JoinRefused,
    Message,
    accept_peer,
    fleet_token,
    receive_message,
    split_address,
)
from slime.engine.elastic.members import EngineSession, JoinedEngines, JoinRequest, send_if_open
from slime.engine.launch import engine_url
from slime.errors import RunFailed, UserError
from slime.storage.json_types import JsonObject

T = TypeVar("T")

FLAG = "--fleet-address"
MODEL_SHARE = "model"
MARKER_FILE = "fleet.marker"
"""An engine that can read this file shares the folder of weights."""
_START_S = 30.0
_MAX_SESSIONS = 1024

logger = logging.getLogger(__name__)


class RegistrationServer:
    """Accepts engines that join a run: listens at `--fleet-address` from the constructor on.

    The run folder has the address while it listens. `rows` lists the engines.
    """

    def __init__(
        self,
        address: str,
        run_dir: Path,
        joined: JoinedEngines,
        *,
        model: str,
        staged_in: Path | None,
        rows: Callable[[], list[JsonObject]],
    ) -> None:
        host, port = self._where = split_address(f":{address}" if ":" not in address else address, FLAG)
        self._token = fleet_token(run_dir)
        self._joined, self._model, self._rows = joined, Path(model), rows
        self._marker, self._proof = (staged_in or run_dir).absolute() / MARKER_FILE, secrets.token_hex(16)
        self._marker.write_text(self._proof)
        self.shelves = FileShares()
        self._sessions: dict[web.WebSocketResponse, EngineSession] = {}
        self._listing: asyncio.Task[list[ListedFile]] | None = None
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started: concurrent.futures.Future[tuple[str, int]] = concurrent.futures.Future()
        self._waiters = ThreadPoolExecutor(_MAX_SESSIONS, "fleet-guest")
        self._said_goodbye = False
        self._thread = background("fleet-door", self._run)
        try:
            host, port = self._started.result(_START_S)
        except OSError as error:
            self._marker.unlink(missing_ok=True)
            self._thread.close()
            raise UserError(
                f"--fleet-address {host}:{port}: cannot listen at this address ({error.strerror or error}): choose "
                "another one"
            ) from error
        reached_at = host_address() if host in ("0.0.0.0", "::") else host
        self.address = engine_url(reached_at, port).removeprefix("http://")
        self._address_file = run_dir / ADDRESS_FILE
        self._address_file.write_text(json.dumps({"address": self.address}) + "\n")
        self.invitation = f"slime serve --join {self.address} --join-token-file {run_dir.absolute() / TOKEN_FILE}"

    def close(self, *, goodbye: bool = True) -> None:
        """Stop the server. With `goodbye` joined engines end, because the run is over; else they wait for the run to be
        resumed."""
        self._said_goodbye = goodbye
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START_S)
        self._thread.close()
        self._marker.unlink(missing_ok=True)
        self._address_file.unlink(missing_ok=True)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._waiters.shutdown(wait=False)
            self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(middlewares=[no_foreign_pages])
        app.router.add_get(PATH, self._handle_connection)
        app.router.add_get(FILES_ROUTE, self.shelves.serve)
        self.shelves.put(MODEL_SHARE, self._model)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, *self._where).start()
        except OSError as error:
            self._started.set_exception(error)
            await runner.cleanup()
            return
        self._started.set_result(runner.addresses[0][:2])
        await self._stop.wait()
        for session in list(self._sessions.values()):
            await session.end("goodbye" if self._said_goodbye else "away", "the run is over")
        await runner.cleanup()

    async def _handle_connection(self, request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=MAX_WEBSOCKET_MESSAGE_BYTES)
        await ws.prepare(request)
        hello = await accept_peer(ws, self._token)
        if hello is None:
            logger.warning("fleet: refused a connection from %s without the token of this run", request.remote)
        else:
            try:
                await self._handle_request(ws, hello)
            except (Disconnected, ConnectionError):
                pass  # the client has disconnected
            except UserError as error:
                await send_if_open(ws, {"kind": "refused", "why": str(error)})
        await ws.close()
        return ws

    async def _handle_request(self, ws: web.WebSocketResponse, hello: Message) -> None:
        """Process the request in the first message of a client."""
        wants = hello.get("wants")
        if wants == "list":
            await ws.send_json({"kind": "fleet", "engines": await asyncio.to_thread(self._rows)})
        elif wants == "terms":
            await self._give_terms(ws)
        elif wants == "drain":
            name = str(hello.get("name"))
            member = self._joined.find(name)
            session = next((one for one in self._sessions.values() if one.member is member), None)
            if member is None or session is None:
                raise JoinRefused(f"no engine called {name} has joined this run: slime fleet lists them")
            await send_if_open(session.ws, {"kind": "drain"})
            await ws.send_json({"kind": "asked"})
        elif wants == "join":
            request = JoinRequest.from_message(hello, life=self._joined.life, proof=self._proof)
            await self._host(EngineSession(ws, self._loop, self.shelves), request)
        else:
            raise JoinRefused(f"this run does not know the request {wants!r}: install the run's version of slime")

    async def _give_terms(self, ws: web.WebSocketResponse) -> None:
        """Send the requirements for engines, and the listing of the model folder for engines without the model."""
        ticket = secrets.token_urlsafe(24)
        self.shelves.admit(ticket)
        try:
            await ws.send_json({"kind": "terms", "ticket": ticket, "marker": str(self._marker), **self._joined.terms()})
            while (await receive_message(ws)).get("kind") == "model":
                if self._listing is None:  # computed once, with checksums, and shared by all engines
                    listing = asyncio.to_thread(list_folder_files, self._model, checksums=True)
                    self._listing = asyncio.ensure_future(listing)
                files = [one.to_json() for one in await asyncio.shield(self._listing)]
                await ws.send_json({"kind": "model", "files": files})
        finally:
            self.shelves.dismiss(ticket)

    async def _host(self, session: EngineSession, request: JoinRequest) -> None:
        """Serve a joined engine until its session ends for any reason, then remove it."""

        async def remove() -> None:
            session.is_over("its connection broke")
            try:
                member = await joining
            except (RunFailed, UserError):
                return
            if not self._stop.is_set():
                await self._blocking(self._joined.lost, member, "its connection broke")

        self._sessions[session.ws] = session
        self.shelves.admit(session.ticket)
        joining = asyncio.ensure_future(self._blocking(self._joined.join, request, session))
        listening = asyncio.ensure_future(session.process_messages())  # already now: joining may fetch weights
        try:
            await asyncio.wait((joining, listening), return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                session.member = joining.result()
                await session.ws.send_json({"kind": "joined", "name": session.member.name, "life": self._joined.life})
            await listening
            await self._blocking(self._joined.leave, await joining)
            await send_if_open(session.ws, {"kind": "left"})
        finally:
            listening.cancel()
            del self._sessions[session.ws]
            self.shelves.dismiss(session.ticket)
            await asyncio.shield(remove())

    async def _blocking(self, function: Callable[..., T], *args: object) -> T:
        """Run a function in a separate thread pool: joining waits for weight updates, which may wait for files."""
        return await self._loop.run_in_executor(self._waiters, function, *args)
