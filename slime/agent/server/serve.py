"""The process of the endpoints from its start to its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from slime.agent.live.door import Door
from slime.agent.sampling.model import ChatModel
from slime.agent.server.app import AgentApp
from slime.agent.server.control import ControlApp
from slime.agent.server.dialects import Kind, Problem
from slime.agent.server.listeners import Listeners
from slime.agent.server.sessions import Sessions
from slime.agent.server.settings import AGENTS, CONTROL, LISTENERS, ServerSettings
from slime.agent.session.journal import TurnJournal
from slime.cluster.http_server import Connections, bound_file, bound_sockets, most_connections
from slime.cluster.watchdog import ending_signals
from slime.data.chat_template import load_tokenizer, model_context_length
from slime.errors import UserError
from slime.models.parsers.formats import Formats
from slime.rollout.event_loop import DaemonExecutor

DEFAULT_NAMES = ("slime-actor", "default")

_MOST_CONNECTIONS = 4096

_LINGERING_S = 2.0
"""How long the rest of a refused body is read, so that its client sees the answer and no reset."""

logger = logging.getLogger(__name__)


async def serve(
    settings: ServerSettings, ready: Callable[[dict[str, Any]], None], over: Callable[[], asyncio.Future[Any]]
) -> None:
    """Serve until a signal comes or `over()` is done; `ready` is told the addresses once everybody may come."""
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
    door = None if settings.live is None else Door(settings.live, sessions)
    connections = Connections(most_connections(_MOST_CONNECTIONS, descriptors_each=2))  # one more to an engine
    agents = _runner(AgentApp(sessions, tokenizer, names, connections, door).app, auto_decompress=False)
    listeners = Listeners(agents, connections, str(folder / LISTENERS), settings.secret)
    control = _runner(ControlApp(sessions, pool, listeners, settings.secret, door).app)
    try:
        port = await _listen(agents, connections, settings, folder / AGENTS)
        await control.setup()
        await web.UnixSite(control, str(folder / CONTROL)).start()
        await listeners.start()
        gc.collect()
        gc.freeze()  # what was loaded stays: nobody looks through it again
        ready({"host": settings.host, "port": port, "model": names[0], "folder": str(folder)})
        await _told_to_end(over())
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


def _runner(app: web.Application, **options: Any) -> web.AppRunner:
    options |= {"access_log": None, "shutdown_timeout": 1.0, "lingering_time": _LINGERING_S}
    return web.AppRunner(app, handler_cancellation=True, **options)


async def _listen(agents: web.AppRunner, connections: Connections, settings: ServerSettings, path: Path) -> int:
    """Listen for agents on a port and on a socket file; returns the port."""
    await agents.setup()
    assert agents.server is not None
    try:
        bound = await bound_sockets(settings.host, settings.port)
    except OSError as error:
        raise UserError(
            f"agents cannot be served at {settings.host}:{settings.port} ({error.strerror}): choose another port with "
            "--agent-server-port, or another address with --host"
        ) from error
    port = int(bound[0].getsockname()[1])
    file = bound_file(path)
    os.chmod(path, 0o666)  # for whoever has it bound into a sandbox; the folder is closed to all others
    for listening in (*bound, file):
        connections.accept_on(listening, agents.server)
    return port


async def _told_to_end(over: asyncio.Future[Any]) -> None:
    loop, signalled = asyncio.get_running_loop(), asyncio.Event()
    for number in ending_signals():
        loop.add_signal_handler(number, signalled.set)
    waiting = asyncio.ensure_future(signalled.wait())
    await asyncio.wait({waiting, over}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
