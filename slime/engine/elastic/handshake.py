"""How two sides at a run's door know each other, and what they say.

Invariant: nobody is heard before he has proven to know the run's token, and the token itself never travels: each side
answers the other's random challenge with an HMAC of it. Messages are JSON objects with a `kind`, over one WebSocket;
the key that a joined engine asks for is derived from the token on both sides.
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
from typing import Any

import aiohttp
from aiohttp import web

from slime.cluster.rpc.connect import TOKEN_VARIABLE
from slime.errors import RunFailed, UserError

PROTOCOL = 1
ADDRESS_FILE, TOKEN_FILE = "fleet.json", "fleet.token"
"""In the run folder: where the door is, and the token that opens it."""
PATH = "/fleet"
HEARTBEAT_S = 15.0
MOST_MESSAGE_BYTES = 1 << 22
_HANDSHAKE_S = 10.0
_NO_TOKEN = re.compile(r"\s")

Socket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse
Message = dict[str, Any]


class Disconnected(RunFailed):
    """The other side is gone."""


class Refused(UserError):
    """The run does not want this; the text says why."""


def read_token(file: str | None) -> str:
    """The token of the run to join: from the file, else from the environment."""
    if file is not None:
        try:
            token = Path(file).read_text().strip()
        except (OSError, UnicodeError) as error:
            raise UserError(f"--join-token-file {file} cannot be read ({error}): name the run's fleet.token") from error
        where = f"--join-token-file {file}"
    else:
        token, where = os.environ.get(TOKEN_VARIABLE, "").strip(), f"the environment variable {TOKEN_VARIABLE}"
    if not token or _NO_TOKEN.search(token):
        raise UserError(
            f"{where} has no token: give the run's, which is in the file fleet.token of its folder, by "
            f"--join-token-file or in {TOKEN_VARIABLE}"
        )
    return token


def fleet_token(run_dir: Path) -> str:
    """The token of a run: the environment's, the one that this run folder had before, or a new one. It is in the run
    folder from now on, for this user to read."""
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


def key_of_joined(token: str) -> str:
    """What joined engines ask of whoever calls them."""
    return hmac.digest(token.encode(), b"key of joined engines", "sha256").hex()


def split_address(address: str, flag: str) -> tuple[str, int]:
    """The host and port that a flag names; loopback without a host."""
    host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise UserError(f"{flag} {address}: give HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def url_of(host: str, port: int) -> str:
    """The base URL of a server there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def admitted(ws: web.WebSocketResponse, token: str) -> Message | None:
    """The run's side: what somebody who knows the token asks for; None, and told so, for everybody else."""
    challenge = secrets.token_hex(32)
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            await ws.send_json({"kind": "challenge", "challenge": challenge, "protocol": PROTOCOL})
            hello = await received(ws)
            theirs, proof = str(hello.get("challenge", "")), str(hello.get("proof", ""))
            if not hmac.compare_digest(proof.encode(), _proof(token, "guest", challenge).encode()):
                await ws.send_json({"kind": "refused", "why": "token"})
                return None
            await ws.send_json({"kind": "welcome", "proof": _proof(token, "run", theirs)})
    except (TimeoutError, Disconnected, ConnectionError):
        return None
    return hello


@asynccontextmanager
async def visiting(address: str, token: str, **wants: Any) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """The guest's side: a WebSocket to the run at `HOST:PORT`, which has let us in."""
    host, port = split_address(address, "--join")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=_HANDSHAKE_S)) as session:
        try:
            ws = await session.ws_connect(
                url_of(host, port) + PATH, heartbeat=HEARTBEAT_S, max_msg_size=MOST_MESSAGE_BYTES
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise NobodyThere(address, str(error) or type(error).__name__) from error
        async with ws:
            await _introduced(ws, address, token, wants)
            yield ws


class NobodyThere(UserError):
    """No run answers at an address."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(
            f"no run answers at {address} ({why}): give the address that the run printed, which must have been started "
            "with --fleet-address"
        )


async def _introduced(ws: aiohttp.ClientWebSocketResponse, address: str, token: str, wants: Message) -> None:
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            theirs = await received(ws)
            if theirs.get("protocol") != PROTOCOL:
                raise Refused(
                    f"the run at {address} has another version of slime, whose door this one cannot pass: install the "
                    "run's version here"
                )
            ours = secrets.token_hex(32)
            proof = _proof(token, "guest", str(theirs.get("challenge", "")))
            await ws.send_json({**wants, "kind": "hello", "challenge": ours, "proof": proof})
            answer = await received(ws)
    except (TimeoutError, Disconnected, ConnectionError) as error:
        raise NobodyThere(address, str(error) or "it does not answer as a run does") from error
    if answer.get("kind") == "refused":
        raise Refused(
            f"the run at {address} has another token: give the one in the file fleet.token of its folder, by "
            f"--join-token-file or in {TOKEN_VARIABLE}"
        )
    if not hmac.compare_digest(str(answer.get("proof", "")).encode(), _proof(token, "run", ours).encode()):
        raise Refused(f"whoever answers at {address} does not know this token: it is not the run that you mean")


async def received(ws: Socket) -> Message:
    """The next message; `Disconnected` when there is none any more, or it is none of ours."""
    message = await ws.receive()
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise Disconnected("the connection is closed")
    try:
        content = json.loads(message.data)
    except ValueError as error:
        raise Disconnected("the other side does not speak JSON") from error
    if not isinstance(content, dict):
        raise Disconnected("the other side sent something that is no message")
    return content


def _proof(token: str, side: str, challenge: str) -> str:
    return hmac.digest(token.encode(), f"{side}:{challenge}".encode(), "sha256").hex()
