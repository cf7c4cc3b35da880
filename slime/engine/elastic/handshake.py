"""Mutual authentication and messages between a run and the engines that join it.

Invariant: a peer's messages are processed only after it has proven that it knows the run's token, and the token is
never sent: each side answers the other's random challenge with an HMAC of it. Messages are JSON objects with a `kind`,
over one WebSocket. Both sides derive the API key of joined engines from the token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from slime.cluster.rpc.connect import TOKEN_VARIABLE
from slime.engine.launch import engine_url
from slime.errors import RunFailed, UserError
from slime.storage.json_types import JsonObject

PROTOCOL = 1
ADDRESS_FILE, TOKEN_FILE = "fleet.json", "fleet.token"
"""Files in the run folder: the address where engines join, and the token that they need."""
PATH = "/fleet"
HEARTBEAT_S = 15.0
MAX_WEBSOCKET_MESSAGE_BYTES = 1 << 22
_HANDSHAKE_S = 10.0
_WHITESPACE = re.compile(r"\s")

Socket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse
Message = JsonObject


class Disconnected(RunFailed):
    """The connection to the other side is closed, or the other side sent an invalid message."""


class JoinRefused(UserError):
    """The run refused a request; the text says why."""


def read_token(file: str | None) -> str:
    """Read the token of the run to join from the file, else from the environment."""
    if file is not None:
        try:
            token = Path(file).read_text().strip()
        except (OSError, UnicodeError) as error:
            raise UserError(f"--join-token-file {file} cannot be read ({error}): name the run's fleet.token") from error
        where = f"--join-token-file {file}"
    else:
        token, where = os.environ.get(TOKEN_VARIABLE, "").strip(), f"the environment variable {TOKEN_VARIABLE}"
    if not token or _WHITESPACE.search(token):
        raise UserError(
            f"{where} has no token: give the run's token, from the file fleet.token in its folder, with "
            f"--join-token-file or in {TOKEN_VARIABLE}"
        )
    return token


def fleet_token(run_dir: Path) -> str:
    """The token of a run: from the environment, else from this run folder, else a new one. It is stored in the run
    folder, readable for this user only."""
    path = run_dir / TOKEN_FILE
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token and path.is_file():
        token = path.read_text().strip()
    token = token or secrets.token_urlsafe(32)
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    fresh.replace(path)
    return token


def joined_engine_key(token: str) -> str:
    """API key of joined engines, derived from the token."""
    return hmac.digest(token.encode(), b"key of joined engines", "sha256").hex()


def split_address(address: str, flag: str) -> tuple[str, int]:
    """Parse the host and port of a flag; loopback without a host."""
    host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise UserError(f"{flag} {address}: give HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


async def accept_peer(ws: web.WebSocketResponse, token: str) -> Message | None:
    """Run side of the handshake: return the first message of a peer that knows the token; refuse others and return
    None."""
    challenge = secrets.token_hex(32)
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            await ws.send_json({"kind": "challenge", "challenge": challenge, "protocol": PROTOCOL})
            hello = await receive_message(ws)
            theirs, proof = str(hello.get("challenge", "")), str(hello.get("proof", ""))
            if not hmac.compare_digest(proof.encode(), _proof(token, "guest", challenge).encode()):
                await ws.send_json({"kind": "refused", "why": "token"})
                return None
            await ws.send_json({"kind": "welcome", "proof": _proof(token, "run", theirs)})
    except (TimeoutError, Disconnected, ConnectionError):
        return None
    return hello


@asynccontextmanager
async def connect_to_run(address: str, token: str, **wants: object) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """Client side: an authenticated WebSocket to the run at `HOST:PORT`."""
    host, port = split_address(address, "--join")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=_HANDSHAKE_S)) as session:
        try:
            ws = await session.ws_connect(
                engine_url(host, port) + PATH, heartbeat=HEARTBEAT_S, max_msg_size=MAX_WEBSOCKET_MESSAGE_BYTES
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise RunUnreachable(address, str(error) or type(error).__name__) from error
        async with ws:
            try:  # prove the token to the run, and verify the run's proof
                async with asyncio.timeout(_HANDSHAKE_S):
                    theirs = await receive_message(ws)
                    if theirs.get("protocol") != PROTOCOL:
                        raise JoinRefused(
                            f"the run at {address} has another version of slime with an incompatible protocol: install "
                            "the run's version here"
                        )
                    ours = secrets.token_hex(32)
                    proof = _proof(token, "guest", str(theirs.get("challenge", "")))
                    await ws.send_json({**wants, "kind": "hello", "challenge": ours, "proof": proof})
                    answer = await receive_message(ws)
            except (TimeoutError, Disconnected, ConnectionError) as error:
                raise RunUnreachable(address, str(error) or "it does not answer as a run does") from error
            if answer.get("kind") == "refused":
                raise JoinRefused(
                    f"the run at {address} has another token: give the one from the file fleet.token in its folder, "
                    f"with --join-token-file or in {TOKEN_VARIABLE}"
                )
            if not hmac.compare_digest(str(answer.get("proof", "")).encode(), _proof(token, "run", ours).encode()):
                raise JoinRefused(
                    f"the server at {address} does not know this token: give the address of the right run"
                )
            yield ws


class RunUnreachable(UserError):
    """No run answers at an address."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(
            f"no run answers at {address} ({why}): give the address printed by a run that was started with "
            "--fleet-address"
        )


async def receive_message(ws: Socket) -> Message:
    """Receive the next message; raises `Disconnected` if the connection is closed or the message is invalid."""
    message = await ws.receive()
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise Disconnected("the connection is closed")
    try:
        content = json.loads(message.data)
    except ValueError as error:
        raise Disconnected("the other side does not speak JSON") from error
    if not isinstance(content, dict):
        raise Disconnected("the other side sent JSON that is not an object")
    return content


def _proof(token: str, side: str, challenge: str) -> str:
    return hmac.digest(token.encode(), f"{side}:{challenge}".encode(), "sha256").hex()
