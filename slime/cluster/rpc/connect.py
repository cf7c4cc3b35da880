"""Connects a process to the driver: by an inherited socket, or by a TCP connection authenticated with the run's token.

Invariant: a TCP listener accepts no message before the client has proven that it knows the token, and the token itself
is never sent: each side answers the other's random challenge with an HMAC. A client that fails, stays silent or sends
more than a proof is disconnected and delays no other. Any number of clients uses one thread and bounded descriptors.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence

from slime.cluster.rpc.channel import Channel, ChannelClosed, ChannelTimeout
from slime.errors import UserError

FD_FLAG = "--fd"
CONNECT_FLAG = "--connect"
TOKEN_VARIABLE = "SLIME_RUN_TOKEN"
PEER_TIMEOUT_S = 120
"""A peer that acknowledges nothing for this time counts as gone."""
_CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
_NAME_BYTES = 64
_PROOF_S = 10.0
_CONNECT_S = 60.0
_MOST_STRANGERS = 256
"""Unauthenticated connections allowed in addition to the expected ones."""
_ACCEPT_AGAIN_S = 0.1


def add_channel_flags(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(FD_FLAG, type=int, help="inherited socket to the driver")
    where.add_argument(CONNECT_FLAG, help="HOST:PORT/NAME of the driver; the run's token is in the environment")


def channel_from(args: argparse.Namespace) -> Channel:
    """Open the channel that the flags name; remove the token from the environment, so that children do not see it."""
    if args.fd is not None:
        return Channel.from_fd(args.fd)
    token = os.environ.pop(TOKEN_VARIABLE, None)
    if token is None:
        raise UserError(
            f"{CONNECT_FLAG} needs the run's token in {TOKEN_VARIABLE}: the run that expects {args.connect} sets it"
        )
    return connect_to(args.connect, token)


def connect_to(where: str, token: str) -> Channel:
    """Connect to HOST:PORT/NAME; return the channel."""
    address, _, name = where.rpartition("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not name:
        raise UserError(f"{CONNECT_FLAG} {where} is not of the form HOST:PORT/NAME")
    return connect(host.strip("[]"), int(port), name=name, token=token)


def connect(host: str, port: int, *, name: str, token: str) -> Channel:
    """Connect to the listener at this address under a name it expects; raises `ChannelClosed` if it refuses."""
    deadline = time.monotonic() + _CONNECT_S
    sock = socket.create_connection((host, port), timeout=_CONNECT_S)
    try:
        theirs = _receive_exactly(sock, _CHALLENGE_BYTES, deadline)
        ours = secrets.token_bytes(_CHALLENGE_BYTES)
        data = name.encode()
        if len(data) > _NAME_BYTES:
            raise ValueError(f"the name {name!r} of a process has more than {_NAME_BYTES} bytes")
        sock.sendall(_proof(token, b"client", theirs) + ours + data.ljust(_NAME_BYTES, b"\0"))
        try:
            answer = _receive_exactly(sock, _PROOF_BYTES, deadline)
        except (ChannelClosed, ConnectionError) as refused:
            raise ChannelClosed(
                f"the run at {host}:{port} refused {name}: the token is another run's, or {name} is not expected"
            ) from refused
        if not hmac.compare_digest(answer, _proof(token, b"driver", ours)):
            raise ChannelClosed(f"the server at {host}:{port} does not know this run's token")
        return _channel(sock)
    except BaseException:
        sock.close()
        raise


class Listener:
    """Accepts processes that know the token, each once, by the name it is expected under.

    An event loop in one thread serves all unauthenticated connections. Beyond `_MOST_STRANGERS` of them the oldest are
    disconnected: a proof takes only one round trip.
    """

    def __init__(self, address: str, token: str) -> None:
        self._token = token
        self._socket = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._socket.setblocking(False)
        self.address, self.port = self._socket.getsockname()[:2]
        self._came: dict[str, Channel] = {}
        self._expected: set[str] = set()
        self._changed = threading.Condition()
        self._strangers: dict[asyncio.Task[None], None] = {}  # oldest first
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="cluster-listener", daemon=True)
        self._thread.start()

    def connect_arguments(self, name: str) -> Sequence[str]:
        """Return the arguments with which a process connects here; expect its name from now on."""
        with self._changed:
            self._expected.add(name)
        host = f"[{self.address}]" if ":" in self.address else self.address
        return (CONNECT_FLAG, f"{host}:{self.port}/{name}")

    def wait_for(self, name: str, timeout_s: float) -> Channel:
        """Wait for the channel of the process of this name; raises `ChannelTimeout`."""
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._came, timeout_s):
                self._expected.discard(name)
                raise ChannelTimeout(f"{name} did not connect to {self.address}:{self.port} in {timeout_s:g} s")
            return self._came.pop(name)

    def close(self) -> None:
        """Accept no more connections and close unclaimed channels. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join()
        with self._changed:
            unclaimed, self._came = list(self._came.values()), {}
            self._expected.clear()
        for channel in unclaimed:
            channel.close()

    # the thread

    def _run(self) -> None:
        with self._socket, contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)
        self._loop.close()

    async def _serve(self) -> None:
        try:
            while True:
                most = _MOST_STRANGERS + len(self._expected)
                try:
                    sock, _ = await self._loop.sock_accept(self._socket)
                    greeting = self._loop.create_task(self._greet(sock))
                    self._strangers[greeting] = None
                    greeting.add_done_callback(lambda done: self._strangers.pop(done, None))
                except ConnectionError:  # the client is gone already
                    continue
                except OSError:  # no descriptor is left
                    if not self._strangers:
                        await asyncio.sleep(_ACCEPT_AGAIN_S)
                    most = len(self._strangers) - 1
                await self._disconnect(list(self._strangers)[: max(0, len(self._strangers) - max(0, most))])
        finally:
            await self._disconnect(list(self._strangers))

    async def _disconnect(self, strangers: Sequence[asyncio.Task[None]]) -> None:
        for stranger in strangers:
            del self._strangers[stranger]
            stranger.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)

    async def _greet(self, sock: socket.socket) -> None:
        """Check the client's proof, answer with the driver's proof, and publish the channel."""
        challenge, said = secrets.token_bytes(_CHALLENGE_BYTES), b""
        is_admitted = False
        try:
            async with asyncio.timeout(_PROOF_S):
                await self._loop.sock_sendall(sock, challenge)
                while missing := _PROOF_BYTES + _CHALLENGE_BYTES + _NAME_BYTES - len(said):
                    more = await self._loop.sock_recv(sock, missing)
                    if not more:
                        return
                    said += more
            proof, theirs = said[:_PROOF_BYTES], said[_PROOF_BYTES : _PROOF_BYTES + _CHALLENGE_BYTES]
            name = said[_PROOF_BYTES + _CHALLENGE_BYTES :].rstrip(b"\0").decode(errors="replace")
            with self._changed:
                knows = hmac.compare_digest(proof, _proof(self._token, b"client", challenge))
                if knows and name in self._expected:
                    sock.sendall(_proof(self._token, b"driver", theirs))
                    self._came[name] = _channel(sock)
                    is_admitted = True
                    self._expected.discard(name)
                    self._changed.notify_all()
        except (OSError, TimeoutError):
            return
        finally:
            if not is_admitted:
                sock.close()


def _channel(sock: socket.socket) -> Channel:
    """Wrap an authenticated socket in a channel with TCP keepalive.

    A machine that disappears sends no end of stream: by default TCP would wait a quarter of an hour for it to accept
    the rest of a message, and two hours if there is nothing to send.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every_s = PEER_TIMEOUT_S // 4
    options = {"TCP_KEEPIDLE": every_s, "TCP_KEEPINTVL": every_s, "TCP_KEEPCNT": 3}
    for name, value in (options | {"TCP_USER_TIMEOUT": PEER_TIMEOUT_S * 1000}).items():
        if hasattr(socket, name):  # not all of them on macOS
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Channel(sock)


def _proof(token: str, side: bytes, challenge: bytes) -> bytes:
    return hmac.digest(token.encode(), side + challenge, "sha256")


def _receive_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Read exactly `count` bytes; one deadline limits all reads together."""
    data = b""
    while len(data) < count:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        more = sock.recv(count - len(data))
        if not more:
            raise ChannelClosed("the other side is gone")
        data += more
    return data
