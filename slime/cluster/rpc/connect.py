"""How a process gets the channel to the driver: an inherited socket, or a connection that shows the run's token.

Invariant: on a TCP listener nobody is heard before he has proven to know the token, and the token itself never travels:
each side answers the other's random challenge with an HMAC of it. Whoever fails, stays silent or sends more than a
proof is disconnected, and nobody else waits for him. However many come, they take one thread and bounded descriptors.
"""

from __future__ import annotations

import argparse
import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from slime.cluster.rpc.channel import Channel, ChannelClosed, ChannelTimeout
from slime.errors import UserError

FD_FLAG = "--fd"
CONNECT_FLAG = "--connect"
TOKEN_VARIABLE = "SLIME_RUN_TOKEN"
GONE_AFTER_S = 120
"""Whoever acknowledges nothing for so long is gone."""
_CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
_NAME_BYTES = 64
_PROOF_S = 10.0
_MOST_STRANGERS = 256
"""Connections beside the expected ones that may be about to prove themselves."""
_ACCEPT_AGAIN_S = 0.1


def add_channel_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a program that serves a channel."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(FD_FLAG, type=int, help="inherited socket to the driver")
    where.add_argument(CONNECT_FLAG, help="HOST:PORT/NAME of the driver; the run's token is in the environment")


def channel_from(args: argparse.Namespace) -> Channel:
    """The channel that the flags name. The token leaves the environment: what the process starts need not know it."""
    if args.fd is not None:
        return Channel.from_fd(args.fd)
    token = os.environ.pop(TOKEN_VARIABLE, None)
    if token is None:
        raise UserError(
            f"{CONNECT_FLAG} needs the run's token in {TOKEN_VARIABLE}: the run that expects {args.connect} sets it"
        )
    return connect_to(args.connect, token)


def connect_to(where: str, token: str) -> Channel:
    """The channel to HOST:PORT/NAME."""
    address, _, name = where.rpartition("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not name:
        raise UserError(f"{CONNECT_FLAG} {where} is not of the form HOST:PORT/NAME")
    return connect(host.strip("[]"), int(port), name=name, token=token)


def connect(host: str, port: int, *, name: str, token: str, timeout_s: float = 60.0) -> Channel:
    """Join the listener at this address under a name it expects; whoever is refused reads `ChannelClosed`."""
    deadline = time.monotonic() + timeout_s
    sock = socket.create_connection((host, port), timeout=timeout_s)
    try:
        theirs = _exactly(sock, _CHALLENGE_BYTES, deadline)
        ours = secrets.token_bytes(_CHALLENGE_BYTES)
        sock.sendall(_proof(token, b"client", theirs) + ours + _padded(name))
        try:
            answer = _exactly(sock, _PROOF_BYTES, deadline)
        except (ChannelClosed, ConnectionError) as refused:
            raise ChannelClosed(
                f"the run at {host}:{port} refused {name}: the token is another run's, or {name} is not expected"
            ) from refused
        if not hmac.compare_digest(answer, _proof(token, b"driver", ours)):
            raise ChannelClosed(f"whoever listens at {host}:{port} does not know this run's token")
        return _channel(sock)
    except BaseException:
        sock.close()
        raise


@dataclass
class _Stranger:
    """A connection whose proof has not come yet."""

    sock: socket.socket
    challenge: bytes
    deadline: float
    said: bytes = b""


class Listener:
    """Lets in processes that know the token, each once, by the name it was expected under.

    One thread reads what all strangers send. Of more strangers than `_MOST_STRANGERS` the oldest are disconnected: a
    proof takes one round trip.
    """

    def __init__(self, address: str, token: str) -> None:
        self._token = token
        self._socket = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._socket.setblocking(False)
        self.address, self.port = self._socket.getsockname()[:2]
        self._came: dict[str, Channel] = {}
        self._expected: set[str] = set()
        self._changed = threading.Condition()
        self._strangers: dict[socket.socket, _Stranger] = {}  # oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._waker, wakened = socket.socketpair()
        self._selector.register(wakened, selectors.EVENT_READ)
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, args=(wakened,), name="cluster-listener", daemon=True)
        self._thread.start()

    def words_for(self, name: str) -> Sequence[str]:
        """The words that lead a process here; it is expected from now on."""
        with self._changed:
            self._expected.add(name)
        host = f"[{self.address}]" if ":" in self.address else self.address
        return (CONNECT_FLAG, f"{host}:{self.port}/{name}")

    def wait_for(self, name: str, timeout_s: float) -> Channel:
        """The channel of the process of this name; `ChannelTimeout` if it does not come in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while name not in self._came:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    self._expected.discard(name)
                    raise ChannelTimeout(f"{name} did not connect to {self.address}:{self.port} in {timeout_s:g} s")
            return self._came.pop(name)

    def close(self) -> None:
        """Let nobody else in. Safe to call again."""
        self._is_closed = True
        self._waker.close()
        self._thread.join()
        with self._changed:
            nobody_waits_for, self._came = list(self._came.values()), {}
            self._expected.clear()
        for channel in nobody_waits_for:
            channel.close()

    # the thread

    def _serve(self, wakened: socket.socket) -> None:
        while not self._is_closed:
            now = time.monotonic()
            for stranger in [one for one in self._strangers.values() if one.deadline <= now]:
                self._disconnect(stranger)
            nearest = min((one.deadline for one in self._strangers.values()), default=None)
            for key, _ in self._selector.select(None if nearest is None else nearest - now):
                if key.fileobj is self._socket:
                    self._accept()
                elif isinstance(key.data, _Stranger):
                    self._hear(key.data)
        for stranger in list(self._strangers.values()):
            self._disconnect(stranger)
        self._selector.close()
        self._socket.close()
        wakened.close()

    def _accept(self) -> None:
        most = _MOST_STRANGERS + len(self._expected)
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):  # he is gone already
            return
        except OSError:  # no descriptor is left
            if not self._strangers:
                time.sleep(_ACCEPT_AGAIN_S)
            most = len(self._strangers) - 1
        else:
            sock.setblocking(False)
            stranger = _Stranger(sock, secrets.token_bytes(_CHALLENGE_BYTES), time.monotonic() + _PROOF_S)
            self._strangers[sock] = stranger
            self._selector.register(sock, selectors.EVENT_READ, stranger)
            try:
                sock.sendall(stranger.challenge)
            except OSError:
                self._disconnect(stranger)
        while self._strangers and len(self._strangers) > most:
            self._disconnect(next(iter(self._strangers.values())))

    def _hear(self, stranger: _Stranger) -> None:
        if stranger.sock not in self._strangers:
            return  # disconnected since he was heard of
        try:
            said = stranger.sock.recv(_PROOF_BYTES + _CHALLENGE_BYTES + _NAME_BYTES - len(stranger.said))
            stranger.said += said
            if not said:
                self._disconnect(stranger)
            elif len(stranger.said) == _PROOF_BYTES + _CHALLENGE_BYTES + _NAME_BYTES:
                self._admit(stranger)
        except BlockingIOError:
            return
        except OSError:
            self._disconnect(stranger)

    def _admit(self, stranger: _Stranger) -> None:
        """Let a stranger in who has proven to know the token, and show him that the driver does."""
        proof, theirs = stranger.said[:_PROOF_BYTES], stranger.said[_PROOF_BYTES : _PROOF_BYTES + _CHALLENGE_BYTES]
        name = stranger.said[_PROOF_BYTES + _CHALLENGE_BYTES :].rstrip(b"\0").decode(errors="replace")
        with self._changed:
            knows = hmac.compare_digest(proof, _proof(self._token, b"client", stranger.challenge))
            if not knows or name not in self._expected:
                self._disconnect(stranger)
                return
            stranger.sock.sendall(_proof(self._token, b"driver", theirs))
            self._forget(stranger)
            stranger.sock.setblocking(True)
            self._expected.discard(name)
            self._came[name] = _channel(stranger.sock)
            self._changed.notify_all()

    def _forget(self, stranger: _Stranger) -> None:
        if self._strangers.pop(stranger.sock, None) is not None:
            self._selector.unregister(stranger.sock)

    def _disconnect(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.sock.close()


def _channel(sock: socket.socket) -> Channel:
    """A machine that disappears sends no end: by itself TCP would wait a quarter of an hour for it to take the rest of
    a message, and two hours when there is nothing to send."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every_s = GONE_AFTER_S // 4
    options = {"TCP_KEEPIDLE": every_s, "TCP_KEEPINTVL": every_s, "TCP_KEEPCNT": 3}
    for name, value in (options | {"TCP_USER_TIMEOUT": GONE_AFTER_S * 1000}).items():
        if hasattr(socket, name):  # not all of them on macOS
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Channel(sock)


def _proof(token: str, side: bytes, challenge: bytes) -> bytes:
    return hmac.digest(token.encode(), side + challenge, "sha256")


def _padded(name: str) -> bytes:
    data = name.encode()
    if len(data) > _NAME_BYTES:
        raise ValueError(f"the name {name!r} of a process has more than {_NAME_BYTES} bytes")
    return data.ljust(_NAME_BYTES, b"\0")


def _exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    """So many bytes, all before the deadline, however slowly they come."""
    data = b""
    while len(data) < count:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        more = sock.recv(count - len(data))
        if not more:
            raise ChannelClosed("the other side is gone")
        data += more
    return data
