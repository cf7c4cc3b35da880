"""`python -m slime.agent.server`: serves a run, which sends the settings over a socket, or alone, with flags."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from aiohttp import web

from slime.agent.server.app import AgentApp
from slime.agent.server.control import ControlApp, Listeners
from slime.agent.server.dialects import Kind, Problem
from slime.agent.server.online_intake import LiveConversations
from slime.agent.server.sessions import Sessions
from slime.agent.server.settings import AGENTS_SOCKET, CONTROL_SOCKET, LISTENERS_SOCKET, ServerSettings
from slime.agent.session.template import ChatModel
from slime.agent.session.turn_journal import TurnJournal
from slime.cluster.http_server import (
    ClientLogLimit,
    Connections,
    bind_sockets,
    bind_unix_socket,
    most_connections,
)
from slime.cluster.watchdog import ending_signals
from slime.data.chat_template import load_tokenizer, model_context_length
from slime.engine.http.blocking import KEY_VARIABLE
from slime.errors import UserError
from slime.models.parsers.formats import Formats
from slime.rollout.event_loop import DaemonExecutor
from slime.storage.json_types import JsonObject

DEFAULT_NAMES = ("slime-actor", "default")

_MOST_CONNECTIONS = 4096

_LINGERING_S = 2.0
"""How long the rest of a refused body is read, so that its client gets the answer and not a connection reset."""

logger = logging.getLogger("slime.agent.server")  # this module also runs as `__main__`


async def serve(settings: ServerSettings, ready: Callable[[JsonObject], None], over: Awaitable[object]) -> None:
    """Serve until a signal or until `over` is done; calls `ready` with the addresses when all of them accept."""
    os.umask(0o077)
    asyncio.get_running_loop().set_default_executor(DaemonExecutor())  # a live filter that hangs blocks no other call
    tokenizer = load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code)
    formats = Formats(settings.tool_call_parser, settings.reasoning_parser)
    model = ChatModel(tokenizer, context=model_context_length(settings.model), formats=formats)
    pool = settings.make_pool()
    journal = None if settings.journal is None else TurnJournal(Path(settings.journal))
    sessions = Sessions(model, pool, fault_tolerant=settings.fault_tolerant, version=settings.version, journal=journal)
    names = (*settings.names, Path(settings.model).name, settings.model, *DEFAULT_NAMES)
    folder = Path(settings.folder)
    door = None if settings.live is None else LiveConversations(settings.live, sessions)
    connections = Connections(most_connections(_MOST_CONNECTIONS, descriptors_each=2))  # to the client and an engine
    agents = _runner(AgentApp(sessions, tokenizer, names, connections, door).app, auto_decompress=False)
    listeners = Listeners(agents, connections, str(folder / LISTENERS_SOCKET), settings.secret)
    control = _runner(ControlApp(sessions, pool, listeners, settings.secret, door).app)
    try:
        port = await _listen(agents, connections, settings, folder / AGENTS_SOCKET)
        await control.setup()
        await web.UnixSite(control, str(folder / CONTROL_SOCKET)).start()
        await listeners.start()
        gc.collect()
        gc.freeze()  # loaded modules and tokenizer stay: exclude them from later collections
        ready({"host": settings.host, "port": port, "model": names[0], "folder": str(folder)})
        is_over = asyncio.ensure_future(over)
        loop, signalled = asyncio.get_running_loop(), asyncio.Event()
        for number in ending_signals():
            loop.add_signal_handler(number, signalled.set)
        waiting = asyncio.ensure_future(signalled.wait())
        await asyncio.wait({waiting, is_over}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
    finally:
        await sessions.close_all(Problem(Kind.SHUTTING_DOWN, "the run is over"))
        await connections.aclose()
        await listeners.aclose()
        await agents.cleanup()
        await control.cleanup()
        await pool.aclose()
        if door is not None:
            await door.aclose()
        if journal is not None:
            journal.close()
        shutil.rmtree(folder, ignore_errors=True)


def _runner(app: web.Application, *, auto_decompress: bool = True) -> web.AppRunner:
    return web.AppRunner(
        app,
        handler_cancellation=True,
        auto_decompress=auto_decompress,
        access_log=None,
        shutdown_timeout=1.0,
        lingering_time=_LINGERING_S,
    )


async def _listen(agents: web.AppRunner, connections: Connections, settings: ServerSettings, path: Path) -> int:
    """Listen for agents on a port and on a socket file; returns the port."""
    await agents.setup()
    assert agents.server is not None
    try:
        bound = await bind_sockets(settings.host, settings.port)
    except OSError as error:
        raise UserError(
            f"the agent server cannot listen at {settings.host}:{settings.port} ({error.strerror}): choose another "
            "port with --agent-server-port, or another address with --host"
        ) from error
    port = int(bound[0].getsockname()[1])
    file = bind_unix_socket(path)
    os.chmod(path, 0o666)  # for users of a sandbox that binds it; other users cannot enter the folder
    for listening in (*bound, file):
        connections.accept_on(listening, agents.server)
    return port


SWITCH_S = 0.001
"""Seconds for which a tokenizing thread may keep the event loop waiting for the interpreter."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m slime.agent.server", description=__doc__)
    add = parser.add_argument
    add("--channel", type=int, help="descriptor of the socket to the driver, which sends all other settings")
    add("--model", help="model folder: tokenizer, chat template and config.json")
    add("--engine", action="append", default=[], metavar="URL", help="URL of an engine; repeat for several")
    add("--router", metavar="URL", help="URL of a router in front of the engines")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0: a free one")
    add("--folder", help="folder of the sockets; must exist and be accessible to this user only (default: a new one)")
    add("--fault-tolerant", action="store_true", help="continue on another engine when an engine dies")
    add("--log-level", default="info")
    options = parser.parse_args(argv)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(ClientLogLimit())
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[handler]
    )
    sys.setswitchinterval(SWITCH_S)
    try:
        asyncio.run(_serve_with(options))
    except UserError as mistake:
        print(f"error: {mistake}", file=sys.stderr, flush=True)
        return 2
    return 0


async def _serve_with(options: argparse.Namespace) -> None:
    """Serve a run: read one line with the settings, write one with the addresses, end when the driver closes.

    Without a channel the settings are from flags, and the line with the addresses and the control secret is printed.
    """
    if options.channel is not None:
        connection = socket.socket(fileno=options.channel)
        connection.set_inheritable(False)
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
        settings = ServerSettings.from_dict(json.loads(await reader.readline()))
        try:
            await serve(
                settings,
                lambda said: writer.write(json.dumps(said).encode() + b"\n"),
                asyncio.ensure_future(reader.read()),
            )
        except UserError as mistake:
            writer.write(json.dumps({"error": str(mistake)}).encode() + b"\n")
            await writer.drain()
            raise
        finally:
            writer.close()
        return
    if not options.model or not options.engine:
        raise UserError("python -m slime.agent.server needs --model DIR and at least one --engine URL")
    settings = ServerSettings(
        model=options.model,
        engines=tuple(options.engine),
        folder=options.folder or tempfile.mkdtemp(prefix="slime-agents-"),
        secret=secrets.token_urlsafe(24),
        router=options.router,
        engine_key=os.environ.get(KEY_VARIABLE),
        fault_tolerant=options.fault_tolerant,
        host=options.host,
        port=options.port,
    )
    never = asyncio.get_running_loop().create_future()
    await serve(settings, lambda said: print(json.dumps({**said, "secret": settings.secret}), flush=True), never)


if __name__ == "__main__":
    faulthandler.register(signal.SIGQUIT, all_threads=True, chain=False)  # stacks go to the log
    sys.exit(main())
