"""How a process gets the channel to the driver: an inherited socket, or a connection that shows the run's token.

Invariant: on a TCP listener nobody is heard before he has proven to know the token, and the token itself never travels:
each side answers the other's random challenge with an HMAC of it. Whoever fails, stays silent or sends more than a
proof is disconnected, and nobody else waits for him.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence

from slime.cluster.channel import Channel, ChannelClosed, ChannelTimeout
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


class Listener:
    """Lets in processes that know the token, each once, by the name it was expected under."""

    def __init__(self, address: str, token: str) -> None:
        self._token = token
        self._socket = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.address, self.port = self._socket.getsockname()[:2]
        self._came: dict[str, Channel] = {}
        self._expected: set[str] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._accept, name="cluster-listener", daemon=True)
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
        with contextlib.suppress(OSError):  # closed already, or a system where a listener is never connected
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes up who accepts
        self._socket.close()
        with self._changed:
            nobody_waits_for, self._came = list(self._came.values()), {}
            self._expected.clear()
        for channel in nobody_waits_for:
            channel.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._admit, args=(sock,), name="cluster-handshake", daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            name = self._proven_name(sock, time.monotonic() + _PROOF_S)
        except (OSError, ChannelClosed):  # a stranger: nothing of the run depends on him
            sock.close()
            return
        with self._changed:
            if name not in self._expected:
                sock.close()
                return
            self._expected.discard(name)
            self._came[name] = _channel(sock)
            self._changed.notify_all()

    def _proven_name(self, sock: socket.socket, deadline: float) -> str:
        """Who is there, once he has proven to know the token and was shown that the driver does."""
        ours = secrets.token_bytes(_CHALLENGE_BYTES)
        sock.settimeout(_PROOF_S)
        sock.sendall(ours)
        said = _exactly(sock, _PROOF_BYTES + _CHALLENGE_BYTES + _NAME_BYTES, deadline)
        proof, theirs = said[:_PROOF_BYTES], said[_PROOF_BYTES : _PROOF_BYTES + _CHALLENGE_BYTES]
        name = said[_PROOF_BYTES + _CHALLENGE_BYTES :].rstrip(b"\0").decode(errors="replace")
        if not hmac.compare_digest(proof, _proof(self._token, b"client", ours)):
            raise ChannelClosed("a wrong token")
        with self._changed:
            if name not in self._expected:
                raise ChannelClosed(f"{name} is not expected")
        sock.sendall(_proof(self._token, b"driver", theirs))
        return name


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
