"""`python -m slime.agent.server`: for a run, which hands its settings over a socket, or alone, with flags."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from slime.agent.server.serve import serve
from slime.agent.server.settings import ServerSettings
from slime.cluster.http_server import ClientNoise
from slime.engine.http.blocking import KEY_VARIABLE
from slime.errors import UserError

SWITCH_S = 0.001
"""How long a thread that tokenizes may keep the event loop waiting for the interpreter."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(ClientNoise())
    sys.setswitchinterval(SWITCH_S)
    try:
        asyncio.run(_for_a_run(options.channel) if options.channel is not None else _alone(options))
    except UserError as mistake:
        print(f"error: {mistake}", file=sys.stderr, flush=True)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m slime.agent.server", description=__doc__)
    add = parser.add_argument
    add("--channel", type=int, help="descriptor of the socket to the driver, which says everything else")
    add("--model", help="model folder: tokenizer, chat template and config.json")
    add("--engine", action="append", default=[], metavar="URL", help="an engine; several times for several")
    add("--router", metavar="URL", help="a router before the engines")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0: a free one")
    add("--folder", help="where the sockets go; must exist and be this user's alone (default: a new one)")
    add("--fault-tolerant", action="store_true", help="go on elsewhere when an engine dies")
    add("--log-level", default="info")
    return parser


async def _for_a_run(descriptor: int) -> None:
    """One line in: the settings. One line out: the addresses. The other end closing it is the end."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
    settings = ServerSettings.from_dict(json.loads(await reader.readline()))

    def ready(addresses: dict[str, Any]) -> None:
        writer.write(json.dumps(addresses).encode() + b"\n")

    try:
        await serve(settings, ready, lambda: asyncio.ensure_future(reader.read()))
    except UserError as mistake:
        ready({"error": str(mistake)})
        await writer.drain()
        raise
    finally:
        writer.close()


async def _alone(options: argparse.Namespace) -> None:
    """Settings from flags; the line with the addresses, and the secret for the control socket, goes to stdout."""
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

    def ready(addresses: dict[str, Any]) -> None:
        print(json.dumps({**addresses, "secret": settings.secret}), flush=True)

    await serve(settings, ready, asyncio.get_running_loop().create_future)


if __name__ == "__main__":
    faulthandler.register(signal.SIGQUIT, all_threads=True, chain=False)  # into the log, for whoever waits for us
    sys.exit(main())
